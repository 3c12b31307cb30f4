"""Keep a window of turns, and one older checkpoint that a user bookmarked."""

from datetime import timedelta
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from retaining_saver import CheckpointNotFoundError, RetainingSaver, RetentionPolicy


def reply(state: MessagesState) -> dict[str, Any]:
    return {"messages": [AIMessage(f"You said: {state['messages'][-1].content}")]}


saver = RetainingSaver(InMemorySaver())
builder = StateGraph(MessagesState)
builder.add_node("reply", reply)
builder.add_edge(START, "reply")
graph = builder.compile(checkpointer=saver)
thread: RunnableConfig = {"configurable": {"thread_id": "1"}}

ends: list[RunnableConfig] = []
for turn in range(10):
    graph.invoke({"messages": [HumanMessage(f"message {turn}")]}, thread)
    ends.append(graph.get_state(thread).config)

bookmark, forgotten = ends[2], ends[3]
saver.pin(bookmark, ttl=timedelta(days=90))
report = saver.enforce_thread_retention("1", RetentionPolicy(keep_last_turns=3))
print(f"dropped {len(report.dropped)} checkpoints, kept {report.after.rows['checkpoints']}")

# The bookmark is whole, and a run can branch from it.
assert len(graph.get_state(bookmark).values["messages"]) == 6
branched = graph.invoke({"messages": [HumanMessage("from the bookmark")]}, bookmark)
assert len(branched["messages"]) == 8
# Another old checkpoint is gone: a run from it is an error, never an empty conversation.
try:
    graph.invoke({"messages": [HumanMessage("from nowhere")]}, forgotten)
    raise SystemExit("expected an error")
except CheckpointNotFoundError as error:
    print(error)
