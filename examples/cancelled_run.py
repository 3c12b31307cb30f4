"""Roll back a run that was cancelled: its checkpoints go, and the question it answered is open."""

from typing import Any, TypedDict

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt

from retaining_saver import RetainingSaver


class Order(TypedDict, total=False):
    item: str
    approved: str


def approve(state: Order) -> dict[str, Any]:
    return {"approved": interrupt(f"Buy {state['item']}?")}


saver = RetainingSaver(InMemorySaver())
builder = StateGraph(Order)
builder.add_node("approve", approve)
builder.add_edge(START, "approve")
graph = builder.compile(checkpointer=saver)


def thread(run_id: str) -> RunnableConfig:
    # LangGraph stores a run's id in the metadata of the checkpoints it makes.
    return {"configurable": {"thread_id": "1"}, "metadata": {"run_id": run_id}}


graph.invoke({"item": "a boat"}, thread("ask"))
assert graph.get_state(thread("any")).interrupts[0].value == "Buy a boat?"

graph.invoke(Command(resume="yes"), thread("answered by mistake"))
assert graph.get_state(thread("any")).values["approved"] == "yes"

saver.delete_for_runs(["answered by mistake"])
state = graph.get_state(thread("any"))
print(f"open again: {state.interrupts[0].value}")
assert state.interrupts[0].value == "Buy a boat?"
assert "approved" not in state.values

result = graph.invoke(Command(resume="no"), thread("answered again"))
print(f"approved: {result['approved']}")
assert result["approved"] == "no"
