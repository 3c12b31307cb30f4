"""Run history of applications that write their own leaves."""

from __future__ import annotations

import copy
import json
from typing import Any, TypedDict

import pytest
from langgraph.checkpoint.base.id import uuid6
from langgraph.graph import START, StateGraph

from retaining_saver import PlanRefused, RetainingSaver, folds
from tests.support.faces import SYNC
from tests.support.graphs import chat_graph, say
from tests.support.leaves import put_leaf
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


async def _never(*args: Any, **kwargs: Any) -> Any:
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

        counts: list[int] = await SYNC(stored, _never)
        # The head tells all of it; every other checkpoint tells of its own run at most.
        assert 12 == counts[0]
        assert {0, 1} == set(counts[1:])
        history = await SYNC(saver.run_history, saver.arun_history, named)
        assert {f"run-{n}": n for n in range(12)} == history.durations
        assert json.dumps(history.durations)


def snapshots(saver: Saver, thread_id: str) -> int:
    """Count the checkpoints that store a snapshot of a delta channel."""
    found = saver.list({"configurable": {"thread_id": thread_id}})
    values = [v for c in found for v in c.checkpoint["channel_values"].values()]
    return sum(type(value).__name__ == "_DeltaSnapshot" for value in values)


@pytest.mark.parametrize("annotations", ["leaf", "fold"])
@pytest.mark.parametrize("kind", KINDS)
async def test_as_many_snapshots_are_taken_as_without_leaves(
    kind: str, annotations: Any, where: Where, thread_id: str
) -> None:
    async with open_saver(kind, where) as bare:
        saver = RetainingSaver(bare, annotations=annotations)

        def talk() -> None:
            for name, keeper in ((f"{thread_id}-bare", bare), (thread_id, saver)):
                graph = chat_graph(keeper, "delta")
                config: Any = {"configurable": {"thread_id": name}}
                for turn in range(12):
                    graph.invoke(say(f"message {turn}"), config)
                    if keeper is saver:
                        put_leaf(saver, name, run_id=f"run-{turn}")
                        saver.record_run(config, f"also-{turn}", duration=turn)

        await SYNC(talk, _never)
        without = await SYNC(snapshots, _never, bare, f"{thread_id}-bare")
        assert without > 1
        # A leaf on a snapshot copies it; the last turn's may be such a leaf.
        left = [c for c in await SYNC(_rows, _never, bare, thread_id) if not is_leaf(c)]
        assert without == sum(
            type(value).__name__ == "_DeltaSnapshot"
            for c in left
            for value in c.checkpoint["channel_values"].values()
        )


def _rows(saver: Saver, thread_id: str) -> list[Any]:
    return list(saver.list({"configurable": {"thread_id": thread_id}}))


def is_leaf(found: Any) -> bool:
    return folds.kind_of(found.checkpoint["id"], found.metadata) is not None


@pytest.mark.parametrize("mode", ["full", "delta"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_run_that_is_entered_again_does_not_repeat_its_input(
    kind: str, mode: Any, where: Where, thread_id: str
) -> None:
    async with open_saver(kind, where) as bare:
        saver = RetainingSaver(bare, admission="manual")

        def talk() -> tuple[int, int]:
            graph = chat_graph(saver, mode)
            config: Any = {"configurable": {"thread_id": thread_id}, "metadata": {"run_id": "one"}}
            once = graph.invoke(say("hello"), config)
            saver.record_run(config, "one", duration=1)
            again = graph.invoke(say("hello"), config)
            return len(once["messages"]), len(again["messages"])

        once, again = await SYNC(talk, _never)
        assert once == again


class Count(TypedDict):
    turns: int


@pytest.mark.parametrize("kind", KINDS)
async def test_metadata_grow_with_the_number_of_runs_and_not_faster(
    kind: str, where: Where, thread_id: str
) -> None:
    async with open_saver(kind, where) as bare:
        saver = RetainingSaver(bare)

        def counts(state: Count) -> dict[str, int]:
            return {"turns": state["turns"] + 1}

        builder = StateGraph(Count)
        builder.add_node("counts", counts)
        builder.add_edge(START, "counts")
        graph = builder.compile(checkpointer=saver)

        def grow(first: int, last: int) -> int:
            config: Any = {"configurable": {"thread_id": thread_id}}
            for turn in range(first, last):
                graph.invoke({"turns": turn}, config, durability="exit")
                written = [f"answer-{turn:04}", f"tool-{turn:04}"]
                saver.record_run(config, f"run-{turn:04}", duration=turn, message_ids=written)
            return sum(len(json.dumps(c.metadata)) for c in _rows(bare, thread_id))

        half = await SYNC(grow, _never, 0, 150)
        whole = await SYNC(grow, _never, 150, 300)
        assert whole <= 2.3 * half


@pytest.mark.parametrize("kind", KINDS)
async def test_no_link_tells_a_run_that_was_deleted(
    kind: str, where: Where, thread_id: str
) -> None:
    async with open_saver(kind, where) as bare:
        # Nothing is reclaimed, so the next run grows over each leaf, which tells every run so far.
        saver = RetainingSaver(bare, admission="manual")

        def talk() -> dict[str, int]:
            graph = chat_graph(saver, "full")
            named: Any = {"configurable": {"thread_id": thread_id}}
            for turn in range(4):
                run_id = f"{thread_id}-{turn}"
                graph.invoke(say(f"message {turn}"), {**named, "metadata": {"run_id": run_id}})
                saver.record_run(named, run_id, duration=turn)
            saver.delete_for_runs([f"{thread_id}-1"])
            return saver.run_history(named).durations

        durations = await SYNC(talk, _never)
        assert {f"{thread_id}-{n}": n for n in (0, 2, 3)} == durations


@pytest.mark.parametrize("mode", ["full", "delta"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_conversation_is_not_lost_with_the_run_that_retention_left_of_it(
    kind: str, mode: Any, where: Where, thread_id: str
) -> None:
    async with open_saver(kind, where) as bare:
        saver = RetainingSaver(bare)
        named: Any = {"configurable": {"thread_id": thread_id}}

        def talk() -> tuple[int, int]:
            graph = chat_graph(saver, mode)
            for turn in range(3):
                run: Any = {**named, "metadata": {"run_id": f"{thread_id}-{turn}"}}
                graph.invoke(say(f"message {turn}"), run)
            saver.prune([thread_id])
            before = len(graph.get_state(named).values["messages"])
            with pytest.raises(PlanRefused, match="delete_thread"):
                saver.delete_for_runs([f"{thread_id}-2"])
            return before, len(graph.get_state(named).values["messages"])

        before, after = await SYNC(talk, _never)
        assert before == after > 0


@pytest.mark.parametrize("durability", ["sync", "exit"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_thread_goes_with_its_only_run(
    kind: str, durability: Any, where: Where, thread_id: str
) -> None:
    async with open_saver(kind, where) as bare:
        saver = RetainingSaver(bare)
        named: Any = {"configurable": {"thread_id": thread_id}}

        def talk() -> list[Any]:
            run: Any = {**named, "metadata": {"run_id": thread_id}}
            chat_graph(saver, "full").invoke(say("hello"), run, durability=durability)
            saver.delete_for_runs([thread_id])
            return _rows(bare, thread_id)

        assert [] == await SYNC(talk, _never)
