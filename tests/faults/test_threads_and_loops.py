"""One saver used from OS threads and event loops at once, and callers that give up, and hooks."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver

from retaining_saver import Event, LeafTagged, Reclaimed, RetainingSaver
from retaining_saver.backends.memory import MemoryBackend
from tests.support import graphs
from tests.support.savers import Where, open_saver
from tests.support.threads import dangling, metadata_only, named, root

TURNS = 6


def _busy(saver: RetainingSaver, thread_id: str, name: str) -> None:
    graph = graphs.chat_graph(saver)
    for turn in range(TURNS):
        graph.invoke(graphs.say(f"{name}-{turn}"), named(thread_id))
        saver.record_run(named(thread_id), f"{name}-{turn}", duration=turn)
        saver.admit(named(thread_id))


async def _abusy(saver: RetainingSaver, thread_id: str, name: str) -> None:
    graph = graphs.chat_graph(saver)
    for turn in range(TURNS):
        await graph.ainvoke(graphs.say(f"{name}-{turn}"), named(thread_id))
        await saver.arecord_run(named(thread_id), f"{name}-{turn}", duration=turn)
        await saver.aadmit(named(thread_id))


def _work(saver: RetainingSaver, start: threading.Barrier, work: Callable[[], Any]) -> None:
    start.wait(30)
    work()


def test_two_event_loops_and_two_threads_share_a_saver(thread_id: str) -> None:
    saver = RetainingSaver(InMemorySaver())
    start = threading.Barrier(4)
    works: list[Callable[[], Any]] = [
        lambda: asyncio.run(_abusy(saver, f"{thread_id}-0", "loop one")),
        lambda: asyncio.run(_abusy(saver, f"{thread_id}-0", "loop two")),
        lambda: _busy(saver, f"{thread_id}-1", "thread one"),
        lambda: _busy(saver, f"{thread_id}-1", "thread two"),
    ]
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(_work, saver, start, work) for work in works]:
            done.result(60)
    for shared in ("0", "1"):
        config = named(f"{thread_id}-{shared}")
        assert "no_leaf" == saver.admit(config).outcome
        rows = list(saver.list(config))
        assert [] == dangling(rows)
        assert root(rows)[0].checkpoint["id"] not in metadata_only(rows)
    gc.collect()
    assert 0 == len(saver._locks)


@pytest.mark.parametrize("kind", ["asqlite", "apg_pool"])
async def test_threads_and_the_savers_own_loop_record_at_once(
    kind: str, where: Where, thread_id: str
) -> None:
    async with open_saver(kind, where) as bare:
        saver = RetainingSaver(bare)
        await graphs.chat_graph(saver).ainvoke(graphs.say("a"), named(thread_id))
        config = named(thread_id)
        awaited = [saver.arecord_run(config, f"task-{n}", duration=n) for n in range(8)]
        # Not the loop's own pool: the Postgres saver needs a thread of that to answer.
        with ThreadPoolExecutor(8) as pool:
            blocking = [
                asyncio.wrap_future(
                    pool.submit(saver.record_run, config, f"thread-{n}", duration=n)
                )
                for n in range(8)
            ]
            await asyncio.wait_for(asyncio.gather(*blocking, *awaited), 60)
        expected = {f"{name}-{n}": n for n in range(8) for name in ("thread", "task")}
        assert expected == (await saver.arun_history(config)).durations
        assert "reclaimed" == (await saver.aadmit(config)).outcome
        assert expected == (await saver.arun_history(config)).durations


class Gated(MemoryBackend):
    """A backend whose deletion is under way until the gate opens."""

    gate: asyncio.Event
    entered: asyncio.Event

    async def areclaim(self, *args: Any, **kwargs: Any) -> Any:
        self.entered.set()
        await self.gate.wait()
        return await super().areclaim(*args, **kwargs)


def _gated() -> tuple[RetainingSaver, Gated, list[Event]]:
    bare = InMemorySaver()
    backend = Gated(bare)
    backend.gate, backend.entered = asyncio.Event(), asyncio.Event()
    events: list[Event] = []
    saver = RetainingSaver(bare, backend=backend, hooks=(events.append,))
    graphs.chat_graph(saver).invoke(graphs.say("a"), named("thread"))
    saver.record_run(named("thread"), "one", duration=7)
    return saver, backend, events


async def test_a_caller_that_is_cancelled_again_and_again_waits_for_the_deletion() -> None:
    saver, backend, _ = _gated()
    task = asyncio.create_task(saver.aadmit(named("thread")))
    await backend.entered.wait()
    waiting = asyncio.create_task(saver.aadmit(named("thread")))
    for _ in range(5):
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
    assert not waiting.done()
    backend.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "no_leaf" == (await asyncio.wait_for(waiting, 30)).outcome
    assert 0 == len(saver._locks)
    assert {"one": 7} == saver.run_history(named("thread")).durations


async def test_a_caller_that_waits_for_the_lock_may_give_up() -> None:
    saver, backend, _ = _gated()
    task = asyncio.create_task(saver.aadmit(named("thread")))
    await backend.entered.wait()
    for _ in range(3):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(saver.arecord_run(named("thread"), "two", duration=7), 0.01)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(saver.apin(named("thread")), 0.01)
    backend.gate.set()
    assert "reclaimed" == (await asyncio.wait_for(task, 30)).outcome
    assert 0 == len(saver._locks)
    assert [] == saver.pins("thread")
    assert {"one": 7} == saver.run_history(named("thread")).durations


async def test_a_run_that_is_cancelled_while_it_is_admitted_leaves_the_thread_whole() -> None:
    saver, backend, _ = _gated()
    graph = graphs.chat_graph(saver)
    task = asyncio.create_task(graph.ainvoke(graphs.say("b"), named("thread")))
    await backend.entered.wait()
    task.cancel()
    backend.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [] == dangling(saver.list(named("thread")))
    done = await graph.ainvoke(graphs.say("c"), named("thread"))
    assert 8 == len(done["messages"])
    assert {"one": 7} == saver.run_history(named("thread")).durations


def test_a_hook_may_call_the_saver_back() -> None:
    seen: list[str] = []

    def call_back(event: Event) -> None:
        seen.append(type(event).__name__)
        config = named(event.thread_id)
        if isinstance(event, LeafTagged):
            saver.record_run(config, "by the hook", duration=1)
            seen.append(saver.admit(config).outcome)
        if isinstance(event, Reclaimed):
            saver.pin(config)

    saver = RetainingSaver(InMemorySaver(), hooks=(call_back,))
    graphs.chat_graph(saver).invoke(graphs.say("a"), named("thread"))
    saver.record_run(named("thread"), "one", duration=7)
    assert {"one": 7, "by the hook": 1} == saver.run_history(named("thread")).durations
    assert ["LeafTagged", "Folded", "Invalidated", "Folded", "Reclaimed", "reclaimed"] == seen
    assert 1 == len(saver.pins("thread"))


async def test_a_hook_may_call_the_saver_back_from_a_task() -> None:
    outcomes: list[str] = []

    def call_back(event: Event) -> None:
        if isinstance(event, LeafTagged):
            outcomes.append(saver.admit(named(event.thread_id)).outcome)

    saver = RetainingSaver(InMemorySaver(), hooks=(call_back,))
    await graphs.chat_graph(saver).ainvoke(graphs.say("a"), named("thread"))
    await asyncio.wait_for(saver.arecord_run(named("thread"), "one", duration=7), 30)
    assert ["reclaimed"] == outcomes


def test_a_hundred_thousand_threads_leave_a_bounded_memory() -> None:
    saver = RetainingSaver(InMemorySaver())
    known = saver._parts.known
    for n in range(100_000):
        # What a process remembers of a thread whose leaf it has seen, and of one it reclaimed.
        known.saw(f"thread-{n}", "leaf", "parent", None)
        known.reclaimed(f"thread-{n}", "older leaf", "parent")
        with saver._locks.hold(f"thread-{n}"):
            pass
    assert 10_000 == len(known)
    assert 5_000 == len(known._threads)
    assert 0 == len(saver._locks)
