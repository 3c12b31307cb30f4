"""Deleting threads and runs, copying threads, and caches that must be purged first."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from langgraph.checkpoint.base.id import uuid6
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt

from retaining_saver import MemoryHistoryCache, RetentionPolicy
from retaining_saver.errors import PlanRefused
from tests.support import graphs
from tests.support.histories import BY_NAME
from tests.support.interjections import interject
from tests.support.retained import (
    Retained,
    is_carrier,
    key_of,
    open_retained,
    renamed,
    said,
    shown,
    timeless,
)
from tests.support.savers import Saver, Where
from tests.support.threads import dangling, face_of, named

KINDS = ("memory", "sqlite", "pg")
each_kind = pytest.mark.parametrize("kind", KINDS)
each_mode = pytest.mark.parametrize("mode", graphs.MODES)
each_durability = pytest.mark.parametrize("durability", ["async", "exit"])


def _nothing(thread: Retained) -> bool:
    return not any(thread.dump().values())


def _entries(cache: MemoryHistoryCache) -> int:
    entries = cache.stats().entries
    assert entries is not None
    return entries


# Threads


@pytest.mark.parametrize("name", ["calls-delta", "subgraphs-full", "leaves-delta"])
@pytest.mark.parametrize("kind", [*KINDS, "asqlite", "apg_pool"])
async def test_a_deleted_thread_leaves_nothing_anywhere(
    kind: str, name: str, where: Where, thread_id: str
) -> None:
    history, cache = BY_NAME[name], MemoryHistoryCache()
    options = {"history_cache": cache}
    async with open_retained(kind, where, thread_id, history.graph, **options) as thread:
        await history.live(thread.on_bare)
        other = await thread.copied("other")
        kept = other.dump()
        for each in (thread, other):
            await each.do("pin", named(each.thread_id), ttl=None)
            await each.seen(each.ours)
        cached = _entries(cache)
        await thread.do("delete_thread", thread_id)
        assert _nothing(thread)
        assert [] == await thread.do("pins", thread_id)
        assert kept == other.dump()
        assert 1 == len(await other.do("pins", other.thread_id))
        if "delta" in name:
            assert 0 < _entries(cache) < cached
        await other.do("delete_thread", other.thread_id)
        assert 0 == _entries(cache)
        assert {} == (await thread.do("run_history", named(thread_id))).durations


CHECKPOINTS = 3_000
STATE = 10_000


@pytest.mark.parametrize("way", ["delete_thread", "policy"])
@pytest.mark.parametrize("kind", ["sqlite", "pg"])
async def test_a_long_thread_is_deleted_in_bounded_memory(
    kind: str, way: str, where: Where, thread_id: str
) -> None:
    async with open_retained(kind, where, thread_id, _chat("full")) as thread:
        await face_of(kind)(_grow, _never, thread.bare, thread_id)
        policy = RetentionPolicy(delete_idle_after=timedelta(hours=1))
        tracemalloc.start()
        try:
            if way == "policy":
                report = await thread.enforce(policy)
                assert CHECKPOINTS == report.before.rows["checkpoints"]
            else:
                await thread.do("delete_thread", thread_id)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert _nothing(thread)
        # Records of it may be in memory, about a kilobyte each; never what they stand for.
        assert peak < CHECKPOINTS * STATE / 4


def _grow(saver: Saver, thread_id: str) -> None:
    config: Any = named(thread_id, checkpoint_ns="")
    for n in range(CHECKPOINTS):
        version = f"{n + 1:032}.0"
        checkpoint: Any = {
            "v": 4,
            "id": str(uuid6()),
            "ts": "2024-01-01T00:00:00+00:00",
            "channel_values": {"text": f"{n}" + "x" * STATE},
            "channel_versions": {"text": version, "__start__": version},
            "versions_seen": {},
            "updated_channels": None,
        }
        metadata: Any = {"source": "loop", "step": n, "parents": {}}
        config = saver.put(config, checkpoint, metadata, {"text": version})


async def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the saver has a blocking face")


def _chat(mode: graphs.Mode) -> Callable[[Saver], Any]:
    return lambda saver: graphs.chat_graph(saver, mode)


# Caches


class _FailingCache(MemoryHistoryCache):
    """A cache that cannot be purged while a test says so."""

    fails = False

    def delete_thread(self, thread_id: str) -> None:
        if self.fails:
            raise ConnectionError("the cache is out of reach")
        super().delete_thread(thread_id)

    async def adelete_thread(self, thread_id: str) -> None:
        self.delete_thread(thread_id)


@pytest.mark.parametrize("kind", [*KINDS, "apg_pool"])
async def test_what_cannot_be_purged_is_not_changed(
    kind: str, where: Where, thread_id: str
) -> None:
    cache, policy = _FailingCache(), RetentionPolicy(keep_last_turns=1)
    history = BY_NAME["forks-delta"]
    options = {"history_cache": cache}
    async with open_retained(kind, where, thread_id, history.graph, **options) as thread:
        await history.live(thread.on_bare)
        run_id = str(uuid6())
        await thread.on_bare.say(graphs.say("in a run"), run_id=run_id)
        before, target = thread.dump(), thread.named(f"{thread_id}-target")
        cache.fails = True
        for name, *args in (
            ("enforce_thread_retention", thread_id, policy),
            ("prune", [thread_id]),
            ("delete_for_runs", [run_id]),
            ("delete_thread", thread_id),
            ("copy_thread", thread_id, target.thread_id),
        ):
            with pytest.raises(ConnectionError):
                await thread.do(name, *args)
            assert before == thread.dump(), name
        assert _nothing(target)
        dry = await thread.enforce(policy, dry_run=True)  # Changes nothing, so purges nothing.
        cache.fails = False
        assert dry.dropped == (await thread.enforce(policy)).dropped != ()


# Copies


@pytest.mark.parametrize("latest_only", [False, True])
@each_kind
async def test_nothing_is_copied_onto_a_thread_that_exists(
    kind: str, latest_only: bool, where: Where, thread_id: str
) -> None:
    async with open_retained(kind, where, thread_id, _chat("delta")) as thread:
        await thread.on_bare.say(graphs.say("one"))
        target = await thread.copied("target")
        before = target.dump()
        with pytest.raises(PlanRefused, match="has checkpoints already"):
            await thread.do("copy_thread", thread_id, target.thread_id, latest_only=latest_only)
        with pytest.raises(ValueError, match="onto itself"):
            await thread.do("copy_thread", thread_id, thread_id, latest_only=latest_only)
        assert before == target.dump()


@each_kind
async def test_of_two_copies_at_once_onto_one_thread_one_is_refused(
    kind: str, where: Where, thread_id: str
) -> None:
    async with open_retained(kind, where, thread_id, _chat("delta")) as thread:
        await thread.on_bare.say(graphs.say("one"))
        args = (thread_id, f"{thread_id}-target", None)
        backend = thread.backend
        plain, twin = backend.copy_thread, backend.acopy_thread
        done = interject(
            backend, "copy_thread", "before", lambda: plain(*args), lambda: twin(*args)
        )
        with pytest.raises(PlanRefused):
            await thread.do("copy_thread", *args[:2])
        assert ["copy_thread"] == done
        expected = renamed(thread.dump(), thread_id, "t")
        target = thread.named(args[1])
        assert expected == renamed(target.dump(), target.thread_id, "t")


@pytest.mark.parametrize("name", ["calls-delta", "forks-delta", "leaves-full", "two-deltas"])
@each_kind
async def test_a_copy_of_the_newest_state_needs_nothing_of_its_source(
    kind: str, name: str, where: Where, thread_id: str
) -> None:
    history = BY_NAME[name]
    async with open_retained(kind, where, thread_id, history.graph) as thread:
        await history.live(thread.on_bare)
        before, twin = shown(await thread.on_bare.state()), await thread.copied("twin")
        history_before = await thread.do("run_history", named(thread_id))
        # Pins promise ids of the source only.
        oldest = min(key_of(f)[1] for f in await thread.rows())
        await thread.do("pin", named(thread_id, oldest), ttl=None)
        latest = thread.named(f"{thread_id}-latest")
        await thread.do("copy_thread", thread_id, latest.thread_id, latest_only=True)
        await thread.do("delete_thread", thread_id)
        rows = await latest.rows()
        assert 1 == len([f for f in rows if not key_of(f)[0] and not is_carrier(f)])
        assert [] == dangling(rows)
        assert (set(), set()) == await latest.orphans()
        assert before == shown(await latest.on_bare.state())
        assert before == shown(await latest.on_ours.state())
        assert history_before == await latest.do("run_history", named(latest.thread_id))
        for given in history.later:
            assert said(await twin.on_bare.say(given)) == said(await latest.on_ours.say(given))
            assert timeless(await twin.on_bare.state()) == timeless(await latest.on_ours.state())


@each_kind
async def test_a_copy_shows_nothing_that_was_cached_of_an_earlier_thread(
    kind: str, where: Where, thread_id: str
) -> None:
    """Another process deleted the thread that had the target's name."""
    async with open_retained(kind, where, thread_id, graphs.two_delta_graph) as thread:
        for n in range(3):
            await thread.on_bare.say({"log": [f"{n}"], "notes": []})
        target = await thread.copied("target")
        await target.seen(target.ours)
        face = face_of(kind)
        await face(thread.bare.delete_thread, thread.bare.adelete_thread, target.thread_id)
        middle = sorted(key_of(f)[1] for f in await thread.rows())[5]
        await thread.on_bare.say({"log": ["fork"], "notes": []}, at=middle)
        await thread.do("copy_thread", thread_id, target.thread_id)
        assert await thread.seen(thread.bare) == await target.seen(target.ours)


# Runs


@each_durability
@each_mode
@each_kind
async def test_a_cancelled_answer_leaves_its_question_open_and_other_work_done(
    kind: str, mode: graphs.Mode, durability: str, where: Where, thread_id: str
) -> None:
    ran: list[str] = []

    def builder(saver: Saver) -> Any:
        return graphs.asking_graph(saver, mode, ran=ran)

    cancelled = f"cancelled-{thread_id}"
    async with open_retained(kind, where, thread_id, builder) as thread:
        options = {"durability": durability}
        await thread.on_ours.say({"log": ["u"]}, run_id=f"asks-{thread_id}", **options)
        asked, before = shown(await thread.on_ours.state()), await thread.seen(thread.bare)
        await thread.on_ours.say(Command(resume="cancelled"), run_id=cancelled, **options)
        await thread.do("record_run", named(thread_id), cancelled, duration=3)
        await thread.do("delete_for_runs", [cancelled])
        assert asked == shown(await thread.on_ours.state())
        assert ["which?"] == [i.value for i in asked[3]]
        assert before == await thread.seen(thread.bare)
        assert (set(), set()) == await thread.orphans()
        assert {} == (await thread.do("run_history", named(thread_id))).durations
        ran.clear()
        done = await thread.on_ours.say(Command(resume="real"))
        assert ["u", "real", "p"] == done["log"]
        assert ["asks"] == ran  # What had finished beside it is not done again.


@each_durability
@each_mode
@each_kind
async def test_what_a_command_gave_a_waiting_checkpoint_outlives_a_run_with_an_input(
    kind: str, mode: graphs.Mode, durability: str, where: Where, thread_id: str
) -> None:
    def builder(saver: Saver) -> Any:
        return graphs.asking_graph(saver, mode)

    runs, options = [f"{thread_id}-{n}" for n in range(3)], {"durability": durability}
    async with open_retained(kind, where, thread_id, builder) as thread:
        await thread.on_ours.say({"log": ["one"]}, run_id=runs[0], **options)
        command: Any = Command(goto="works", update={"log": ["two"]})
        # It stores no checkpoint: the question is still there.
        await thread.on_ours.say(command, run_id=runs[1], **options)
        asked, before = shown(await thread.on_ours.state()), await thread.seen(thread.bare)
        assert ["one", "two", "p"] == asked[0]["log"]
        await thread.on_ours.say({"log": ["three"]}, run_id=runs[2], **options)
        await thread.do("delete_for_runs", [runs[2]])
        assert before == await thread.seen(thread.bare)
        assert asked == shown(await thread.on_ours.state())
        answer: Any = Command(resume="a")
        done = await thread.on_ours.say(answer)
        assert {"one", "two", "a", "p"} == set(done["log"])


@each_durability
@each_kind
async def test_nothing_that_a_deleted_run_stored_on_a_waiting_checkpoint_is_left(
    kind: str, durability: str, where: Where, thread_id: str
) -> None:
    """At its exit a run stores what it wrote to delta channels where it started from."""

    def builder(saver: Saver) -> Any:
        return _asking_after_work(saver)

    runs, options = [f"{thread_id}-{n}" for n in range(2)], {"durability": durability}
    async with open_retained(kind, where, thread_id, builder) as thread:
        await thread.on_ours.say({"log": ["one"]}, run_id=runs[0], **options)
        asked, before = shown(await thread.on_ours.state()), await thread.seen(thread.bare)
        await thread.on_ours.say({"log": ["two"]}, run_id=runs[1], **options)
        await thread.do("delete_for_runs", [runs[1]])
        assert before == await thread.seen(thread.bare)
        assert asked == shown(await thread.on_ours.state())


@each_mode
@each_kind
async def test_what_a_stopped_run_had_finished_outlives_a_run_with_an_input(
    kind: str, mode: graphs.Mode, where: Where, thread_id: str
) -> None:
    def builder(saver: Saver) -> Any:
        return _two_at_once(saver, mode)

    runs = [f"{thread_id}-{n}" for n in range(2)]
    async with open_retained(kind, where, thread_id, builder) as thread:
        await thread.on_ours.say({"log": ["one"]}, run_id=runs[0])
        begun = await thread.on_ours.state()
        [works] = [task.id for task in begun.tasks if task.name == "works"]
        # As a process leaves it that ends while the other one still runs.
        put = thread.bare.put_writes, thread.bare.aput_writes
        await face_of(kind)(*put, begun.config, [("log", ["p"])], works)
        stopped, before = shown(await thread.on_ours.state()), await thread.seen(thread.bare)
        assert ("hangs",) == (await thread.on_ours.state()).next
        await thread.on_ours.say({"log": ["two"]}, run_id=runs[1])
        await thread.do("delete_for_runs", [runs[1]])
        assert before == await thread.seen(thread.bare)
        assert stopped == shown(await thread.on_ours.state())


def _two_at_once(saver: Saver, mode: graphs.Mode) -> Any:
    builder = StateGraph(graphs.DeltaLog if mode == "delta" else graphs.FullLog)
    for name in ("works", "hangs"):
        builder.add_node(name, lambda state: {"log": ["p"]})
        builder.add_edge(START, name)
    return builder.compile(checkpointer=saver, interrupt_before=["works", "hangs"])


def _asking_after_work(saver: Saver) -> Any:
    builder = StateGraph(graphs.DeltaLog)
    builder.add_node("works", lambda state: {"log": ["p"]})
    builder.add_node("asks", graphs.in_context(lambda state: {"log": [interrupt("which?")]}))
    builder.add_edge(START, "works")
    builder.add_edge("works", "asks")
    return builder.compile(checkpointer=saver)


@each_mode
@each_kind
async def test_a_run_goes_with_its_subgraph_calls(
    kind: str, mode: graphs.Mode, where: Where, thread_id: str
) -> None:
    def builder(saver: Saver) -> Any:
        return graphs.subgraph_graph(saver, mode, ask=False)

    async with open_retained(kind, where, thread_id, builder) as thread:
        runs = [f"{thread_id}-{n}" for n in range(3)]
        seen = []
        for n, run_id in enumerate(runs):
            await thread.on_ours.say({"log": [f"u{n}"]}, run_id=run_id)
            seen.append(await thread.seen(thread.bare))
        twin = await thread.copied("twin")
        await thread.do("delete_for_runs", [runs[2]])
        assert seen[1] == await thread.seen(thread.bare)
        assert seen[1] == await twin.seen(twin.bare)  # A run goes from every thread that has it.
        assert (set(), set()) == await thread.orphans()
        one, other = await thread.copied("one"), await thread.copied("other")
        await thread.do("delete_for_runs", [runs[0], "no such run"])
        rows = await thread.rows()
        assert [] == dangling(rows)
        kept = {key: seen[1][key] for key in seen[1] if key not in seen[0]}
        assert kept == await thread.seen(thread.bare)
        assert kept == await one.seen(one.ours)
        # What began these threads is gone: the rest of a conversation goes by its thread only.
        with pytest.raises(PlanRefused, match="delete_thread"):
            await thread.do("delete_for_runs", runs)
        assert kept == await thread.seen(thread.bare)
        for each in (thread, twin, one, other):
            await each.do("delete_thread", each.thread_id)
            assert _nothing(each)


@each_kind
async def test_a_pinned_checkpoint_of_a_deleted_run_stays(
    kind: str, where: Where, thread_id: str
) -> None:
    async with open_retained(kind, where, thread_id, _chat("delta")) as thread:
        for n in range(3):
            await thread.on_ours.say(graphs.say(f"{n}"), run_id=f"{thread_id}-{n}")
        rest = await thread.on_ours.at_rest()
        before = shown(await thread.on_ours.state())
        await thread.do("pin", named(thread_id, rest), ttl=None)
        await thread.do("delete_for_runs", [f"{thread_id}-2", f"{thread_id}-1"])
        assert before == shown(await thread.on_bare.state(rest))
        assert 5 + 1 == len([f for f in await thread.rows() if not is_carrier(f)])
        assert (set(), set()) == await thread.orphans()


@each_kind
async def test_runs_of_a_broken_thread_are_not_deleted(
    kind: str, where: Where, thread_id: str
) -> None:
    async with open_retained(kind, where, thread_id, _chat("full")) as thread:
        await thread.on_ours.say(graphs.say("one"), run_id=thread_id)
        middle = sorted(key_of(f)[1] for f in await thread.rows())[2]
        thread.set_parent(middle, str(uuid6()))
        before = thread.dump()
        with pytest.raises(PlanRefused, match="left alone"):
            await thread.do("delete_for_runs", [thread_id])
        assert before == thread.dump()
        with pytest.raises(TypeError):
            await thread.do("delete_for_runs", thread_id)
        with pytest.raises(TypeError):
            await thread.do("prune", thread_id)
        with pytest.raises(ValueError, match="strategy"):
            await thread.do("prune", [thread_id], strategy="keep")
