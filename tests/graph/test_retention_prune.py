"""What a prune leaves: of full threads what the native one does; of delta threads as little."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import uuid4

import pytest
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.types import Command

from retaining_saver import RetainingSaver, RetentionPolicy
from tests.support import graphs, releases
from tests.support.faces import SYNC
from tests.support.histories import BY_NAME
from tests.support.leaves import aput_leaf, put_leaf
from tests.support.retained import (
    Dump,
    Retained,
    is_carrier,
    key_of,
    open_retained,
    said,
    shown,
    timeless,
)
from tests.support.savers import Where, open_saver
from tests.support.threads import dangling, face_of, named

KINDS = ("memory", "sqlite", "pg")


def _ids_and_keys(dump: Dump) -> dict[str, list[Any]]:
    """Keep of a dump what a prune decides: ids, parents, keys; and each write in every column."""
    return {
        "checkpoints": sorted((row[1], row[2], row[3] or None) for row in dump["checkpoints"]),
        "writes": sorted(repr(row[1:]) for row in dump["checkpoint_writes"]),
        "blobs": sorted(repr(row[1:]) for row in dump["checkpoint_blobs"]),
    }


async def _native_prune(thread: Retained) -> bool:
    """Prune as the saver itself does; tell whether it can."""
    face, prune, aprune = face_of(thread.kind), thread.bare.prune, thread.bare.aprune
    if releases.POSTGRES_PRUNES:
        await face(prune, aprune, [thread.thread_id])
    else:
        with pytest.raises(NotImplementedError):
            await face(prune, aprune, [thread.thread_id])
    return releases.POSTGRES_PRUNES


@pytest.mark.parametrize(
    "name", ["turns-full", "exit-full", "forks-full", "questions-full", "subgraphs-full"]
)
@pytest.mark.parametrize("kind", ["pg", "apg"])
async def test_a_full_thread_is_left_as_the_native_prune_leaves_it(
    kind: str, name: str, where: Where, thread_id: str
) -> None:
    history = BY_NAME[name]
    async with open_retained(kind, where, thread_id, history.graph) as thread:
        await history.live(thread.on_bare)
        before = thread.dump()
        native = await thread.copied("native")
        if not await _native_prune(native):
            return
        await thread.do("prune", [thread_id])
        expected = _ids_and_keys(native.dump())
        assert expected == _ids_and_keys(thread.dump())
        assert len(expected["checkpoints"]) < len(before["checkpoints"])
        assert {None} == {parent for _, _, parent in expected["checkpoints"]}


@pytest.mark.parametrize("kind", ["pg", "apg"])
async def test_waiting_subgraph_calls_are_left_as_the_native_prune_leaves_them(
    kind: str, where: Where, thread_id: str
) -> None:
    history = BY_NAME["calls-full"]
    async with open_retained(kind, where, thread_id, history.graph) as thread:
        await history.live(thread.on_bare)
        native = await thread.copied("native")
        if not await _native_prune(native):
            return
        await thread.do("prune", [thread_id])
        expected = _ids_and_keys(native.dump())
        assert expected == _ids_and_keys(thread.dump())
        answered: Any = Command(resume="answer")
        assert said(await native.on_bare.say(answered)) == said(await thread.on_ours.say(answered))
        assert timeless(await native.on_bare.state()) == timeless(await thread.on_ours.state())


@pytest.mark.parametrize("channels", ["one channel", "two channels"])
@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_left_of_a_delta_thread_does_not_grow_with_its_history(
    kind: str, channels: str, where: Where, thread_id: str
) -> None:
    one = channels == "one channel"
    builder = _delta_chat if one else graphs.two_delta_graph
    async with open_retained(kind, where, thread_id, builder) as thread:
        left = {}
        for turns in (10, 40):
            each = thread.named(f"{thread_id}-{turns}")
            for n in range(turns):
                given: Any = graphs.say(f"{n}") if one else {"log": [f"{n}"], "notes": []}
                await each.on_bare.say(given)
            before = shown(await each.on_bare.state())
            await each.do("prune", [each.thread_id])
            assert before == shown(await each.on_bare.state())
            assert before == shown(await each.on_ours.state())
            left[turns] = len(each.dump()["checkpoints"])
            assert (set(), set()) == await each.orphans()
        assert left[10] == left[40] <= 2


def _delta_chat(saver: Any) -> Any:
    return graphs.chat_graph(saver, "delta")


@pytest.mark.parametrize("mode", graphs.MODES)
@pytest.mark.parametrize("build", ["asking", "subgraphs"])
@pytest.mark.parametrize("kind", KINDS)
async def test_under_a_leaf_the_waiting_head_survives_with_its_question(
    kind: str, build: str, mode: graphs.Mode, where: Where, thread_id: str
) -> None:
    """The leaf was put by a writer that did not know it would hide a question."""

    def builder(saver: Any) -> Any:
        if build == "asking":
            return graphs.asking_graph(saver, mode)
        return graphs.subgraph_graph(saver, mode)

    async with open_retained(kind, where, thread_id, builder) as thread:
        for n in range(2):
            await thread.on_bare.say({"log": [f"u{n}"]})
            await thread.on_bare.say(Command(resume=f"a{n}"))
        await thread.on_bare.say({"log": ["u"]})
        twin = await thread.copied("twin")
        before, asked = await thread.seen(thread.bare), await thread.on_bare.state()
        head = max(i for ns, i in before if not ns)
        face = face_of(kind)
        _, leaf = await face(put_leaf, aput_leaf, thread.bare, thread_id, run_id="one")
        assert () == (await thread.on_bare.state()).interrupts
        await thread.do("prune", [thread_id])
        rows = await thread.rows()
        ids = _real_ids(rows)
        assert [head] == ids
        assert leaf not in ids
        assert before["", head].pending == (await thread.seen(thread.bare))["", head].pending
        assert shown(asked) == shown(await thread.on_ours.state())
        assert 1 == len(asked.interrupts)
        assert {"one": 7} == (await thread.do("run_history", named(thread_id))).durations
        answered: Any = Command(resume="answer")
        assert said(await twin.on_bare.say(answered)) == said(await thread.on_ours.say(answered))
        assert timeless(await twin.on_bare.state()) == timeless(await thread.on_ours.state())


def _real_ids(rows: Iterable[Any]) -> list[str]:
    return [key_of(f)[1] for f in rows if not key_of(f)[0] and not is_carrier(f)]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_broken_thread_is_left_alone_and_the_others_of_the_batch_go_on(
    kind: str, where: Where, thread_id: str
) -> None:
    events: list[Any] = []
    builder = _delta_chat
    async with open_retained(kind, where, thread_id, builder, hooks=[events.append]) as thread:
        for n in range(2):
            await thread.on_bare.say(graphs.say(f"{n}"))
        broken, whole = await thread.copied("broken"), await thread.copied("whole")
        middle = sorted(i for i in _real_ids(await broken.rows()))[3]
        broken.set_parent(middle, "00000000-0000-6000-8000-000000000000")
        left = broken.dump()
        await thread.do("prune", [broken.thread_id, "there is none", whole.thread_id])
        assert left == broken.dump()
        assert [middle] == dangling(await broken.rows())
        assert 1 == len(_real_ids(await whole.rows()))
        said_of = [(type(e).__name__, e.thread_id, getattr(e, "outcome", None)) for e in events]
        assert ("Refused", broken.thread_id, "broken") in said_of
        assert ("ThreadRetained", whole.thread_id, None) in said_of
        report = await broken.enforce()
        assert report.problems
        assert report.before == report.after
        assert left == broken.dump()


@pytest.mark.parametrize("strategy", ["delete", "delete_all"])
@pytest.mark.parametrize("kind", KINDS)
async def test_pruning_by_deletion_leaves_nothing_of_the_named_threads(
    kind: str, strategy: str, where: Where, thread_id: str
) -> None:
    async with open_retained(kind, where, thread_id, _delta_chat) as thread:
        await thread.on_ours.say(graphs.say("one"))
        other = await thread.copied("other")
        kept = other.dump()
        await thread.do("prune", [thread_id], strategy=strategy)
        assert [] == [row for rows in thread.dump().values() for row in rows]
        assert kept == other.dump()


@pytest.mark.parametrize("kind", ["memory", "sqlite", "pg"])
async def test_a_thread_of_langgraph_js_delta_channels_is_left_alone(
    kind: str, where: Where, thread_id: str
) -> None:
    # It keeps no counters and no Python snapshots: nothing tells what its channels need.
    async with open_saver(kind, where) as bare:
        saver = RetainingSaver(bare)

        def story() -> tuple[list[str], list[str]]:
            config: Any = named(thread_id, checkpoint_ns="")
            for step in range(3):
                checkpoint: Any = empty_checkpoint()
                checkpoint["v"] = 4
                metadata: Any = {"source": "loop", "step": step, "delta_writes_versioned": True}
                config = bare.put(config, checkpoint, metadata, {})
            before = [c.checkpoint["id"] for c in bare.list(named(thread_id))]
            saver.prune([thread_id])
            report = saver.enforce_thread_retention(thread_id, RetentionPolicy(keep_last_turns=1))
            assert report.problems
            return before, [c.checkpoint["id"] for c in bare.list(named(thread_id))]

        before, after = await SYNC(story, _unused)
        assert 3 == len(before)
        assert before == after


async def _unused(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the saver has a blocking face")


@pytest.mark.parametrize("kind", KINDS)
async def test_updates_that_count_no_delta_channel_are_read_as_before(
    kind: str, where: Where, thread_id: str
) -> None:
    """LangGraph before 1.2.15 stored updates so; they may be all that a thread has."""
    async with open_retained(kind, where, thread_id, _delta_chat) as thread:

        def update(config: Any, step: int) -> Any:
            checkpoint: Any = empty_checkpoint()
            checkpoint["v"] = 4
            checkpoint["channel_versions"] = {"messages": f"{step + 1:032}.0"}
            metadata: Any = {"source": "update", "step": step}
            return thread.bare.put(config, checkpoint, metadata, checkpoint["channel_versions"])

        def updates(*steps: int) -> None:
            newest = thread.bare.get_tuple(named(thread_id, checkpoint_ns=""))
            config = newest.config if newest else update(named(thread_id, checkpoint_ns=""), 0)
            for step in steps:
                said_now = graphs.say(f"{step}")["messages"]
                thread.bare.put_writes(config, [("messages", said_now)], str(uuid4()))
                config = update(config, step)

        for steps, expected in (((1, 2, 3), ["1", "2", "3"]), ((4, 5), ["1", "2", "3", "4", "5"])):
            await SYNC(updates, _unused, *steps)
            for _ in range(2):
                state = await thread.on_bare.state()
                assert expected == [message.content for message in state.values["messages"]]
                await thread.do("prune", [thread_id])
                assert state.values == (await thread.on_bare.state()).values
