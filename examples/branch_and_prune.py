"""Branch a conversation into a thread of its own, then keep only the newest state of both."""

from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from retaining_saver import RetainingSaver


def reply(state: MessagesState) -> dict[str, Any]:
    return {"messages": [AIMessage(f"You said: {state['messages'][-1].content}")]}


saver = RetainingSaver(InMemorySaver())
builder = StateGraph(MessagesState)
builder.add_node("reply", reply)
builder.add_edge(START, "reply")
graph = builder.compile(checkpointer=saver)
main: RunnableConfig = {"configurable": {"thread_id": "main"}}
branch: RunnableConfig = {"configurable": {"thread_id": "branch"}}

for turn in range(5):
    graph.invoke({"messages": [HumanMessage(f"message {turn}")]}, main)

saver.copy_thread("main", "branch", latest_only=True)
graph.invoke({"messages": [HumanMessage("another way")]}, branch)
graph.invoke({"messages": [HumanMessage("straight on")]}, main)
before = [len(graph.get_state(c).values["messages"]) for c in (main, branch)]

saver.prune(["main", "branch"])
stored = [len(list(saver.list(c))) for c in (main, branch)]
print(f"checkpoints after pruning: {stored}")
assert stored == [1, 1]
assert [len(graph.get_state(c).values["messages"]) for c in (main, branch)] == before == [12, 12]
after = graph.invoke({"messages": [HumanMessage("and on")]}, branch)["messages"]
assert len(after) == 14
assert after[10].content == "another way"
