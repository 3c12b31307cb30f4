"""A pin is a promise that a checkpoint id stays addressable until a stated time."""

from datetime import timedelta
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.store.memory import InMemoryStore

from retaining_saver import CheckpointReclaimedError, RetainingSaver, StorePins


def reply(state: MessagesState) -> dict[str, Any]:
    return {"messages": [AIMessage(f"You said: {state['messages'][-1].content}")]}


# In a store, the promise holds for every worker that uses the store.
pins = StorePins(InMemoryStore(), ttl=timedelta(minutes=15))
saver = RetainingSaver(InMemorySaver(), pins=pins)
builder = StateGraph(MessagesState)
builder.add_node("reply", reply)
builder.add_edge(START, "reply")
graph = builder.compile(checkpointer=saver)


def turn(thread: RunnableConfig, text: str) -> RunnableConfig:
    graph.invoke({"messages": [HumanMessage(text)]}, thread)
    return saver.record_run(thread, text, duration=1)  # The leaf's config.


# Without a pin the leaf goes at the next turn, and its id is a loud error.
plain: RunnableConfig = {"configurable": {"thread_id": "plain"}}
leaf = turn(plain, "first")
turn(plain, "second")
try:
    graph.get_state(leaf)
    raise SystemExit("expected an error")
except CheckpointReclaimedError as error:
    print(f"reclaimed: {error}")
    held_by = error.parent_id
same: RunnableConfig = {"configurable": {**plain["configurable"], "checkpoint_id": held_by}}
assert len(graph.get_state(same).values["messages"]) == 2

# With a pin it stays.
bookmarked: RunnableConfig = {"configurable": {"thread_id": "bookmarked"}}
leaf = turn(bookmarked, "first")
pin = saver.pin(leaf, ttl=timedelta(days=7))
turn(bookmarked, "second")
assert len(graph.get_state(leaf).values["messages"]) == 2
assert saver.admit(bookmarked).outcome == "reclaimed"  # The newest leaf, which has no pin.
print(f"pinned until {pin.expires_at}: {pin.checkpoint_id} is still there")
saver.unpin(leaf)
assert saver.pins("bookmarked") == []
