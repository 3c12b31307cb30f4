"""Run history of applications that write their own leaves."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from langgraph.checkpoint.base.id import uuid6

from retaining_saver import RetainingSaver
from tests.support.faces import SYNC
from tests.support.graphs import chat_graph, say
from tests.support.savers import Saver, Where, open_saver

KINDS = ("memory", "sqlite", "pg")


def write_leaf(saver: Saver, thread_id: str, metadata: dict[str, Any]) -> None:
    """Write a leaf on the head as an application does, with nothing but ``metadata`` added."""
    head = saver.get_tuple({"configurable": {"thread_id": thread_id, "checkpoint_ns": ""}})
    assert head is not None
    checkpoint = copy.deepcopy(head.checkpoint)
    checkpoint["id"] = str(uuid6())
    recorded: Any = {**copy.deepcopy(head.metadata), "source": "update", **metadata}
    saver.put(head.config, checkpoint, recorded, {})


async def turns(saver: Saver, thread_id: str, count: int, leaf: Any) -> None:
    graph = chat_graph(saver, "full")
    config: Any = {"configurable": {"thread_id": thread_id}}

    def talk() -> None:
        for turn in range(count):
            graph.invoke(say(f"message {turn}"), config)
            write_leaf(saver, thread_id, leaf(turn))

    await SYNC(talk, _never)


async def _never() -> None:
    raise AssertionError("blocking only")


@pytest.mark.parametrize("kind", KINDS)
async def test_durations_that_only_the_marker_holds_are_kept(
    kind: str, where: Where, thread_id: str
) -> None:
    async with open_saver(kind, where) as bare:
        saver = RetainingSaver(bare)

        def leaf(turn: int) -> dict[str, Any]:
            payload = {"run_id": f"run-{turn}", "duration": turn}
            return {"writes": {"runtime_run_duration": payload}}

        await turns(saver, thread_id, 4, leaf)
        named: Any = {"configurable": {"thread_id": thread_id}}
        history = await SYNC(saver.run_history, saver.arun_history, named)
        assert {f"run-{turn}": turn for turn in range(4)} == history.durations


@pytest.mark.parametrize("kind", KINDS)
async def test_repeating_the_whole_history_in_each_leaf_does_not_multiply_it(
    kind: str, where: Where, thread_id: str
) -> None:
    async with open_saver(kind, where) as bare:
        saver = RetainingSaver(bare)

        def leaf(turn: int) -> dict[str, Any]:
            return {"run_durations": {f"run-{n}": n for n in range(turn + 1)}}

        await turns(saver, thread_id, 12, leaf)
        named: Any = {"configurable": {"thread_id": thread_id}}

        def stored() -> list[Any]:
            found = list(bare.list({"configurable": {"thread_id": thread_id}}))
            told: list[Any] = [c.metadata.get("run_durations", {}) for c in found]
            return [len(durations) for durations in told]

        counts: list[int] = await SYNC(stored, _nothing)
        # The head tells all of it; every other checkpoint tells of its own run at most.
        assert 12 == counts[0]
        assert {0, 1} == set(counts[1:])
        history = await SYNC(saver.run_history, saver.arun_history, named)
        assert {f"run-{n}": n for n in range(12)} == history.durations
        assert json.dumps(history.durations)


async def _nothing() -> list[Any]:
    raise AssertionError("blocking only")
