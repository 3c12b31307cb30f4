"""Run as a program: three turns of a graph whose state is a model, with leaves in between.

A gateway that does not know the graph records the runs: it reads dicts where the graph has models.
Print the class that the graph's node found in each turn, how many leaves there are at the end, and
whether LangGraph was strict at all.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from pathlib import Path
from typing import Any

from langgraph.graph import END, START, StateGraph
from pydantic import BaseModel
from typing_extensions import TypedDict

from retaining_saver import RetainingSaver
from tests.support.leaves import put_leaf
from tests.support.savers import Where, open_saver
from tests.support.threads import metadata_only, named


class Model(BaseModel):
    """A value that only an allowed class is read as."""

    turn: int


class State(TypedDict):
    model: Model


async def main(kind: str, annotations: Any, place: str) -> None:
    found: list[str] = []

    def node(state: State) -> State:
        found.append(type(state["model"]).__name__)
        return {"model": Model(turn=len(found))}

    builder = StateGraph(State)
    builder.add_node("node", node)
    builder.add_edge(START, "node")
    builder.add_edge("node", END)
    async with open_saver(kind, Where(Path(place).parent, lambda: place)) as saver:
        ours = RetainingSaver(saver, annotations=annotations)
        graph = builder.compile(checkpointer=ours)
        thread_id = str(uuid.uuid4())
        for turn in range(3):
            given: Any = {"model": Model(turn=0)} if turn == 0 else {}
            graph.invoke(given, named(thread_id))
            put_leaf(ours, thread_id, run_id=f"run {turn}")
        history = ours.run_history(named(thread_id))
        assert {"run 0": 7, "run 1": 7, "run 2": 7} == history.durations
        leaves = metadata_only(saver.list(named(thread_id)))
        head = saver.get_tuple(named(thread_id))
        assert head is not None
        strict = not isinstance(head.checkpoint["channel_values"]["model"], Model)
    print(*found, len(leaves), "strict" if strict else "lax")  # noqa: T201  # Read by the test.


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
