"""Storage, caches, hooks and callers fail in the middle: threads stay whole, and runs go on."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.checkpoint.base.id import uuid6

from retaining_saver import (
    DeleteFailed,
    Event,
    MemoryPins,
    PinFailed,
    Refused,
    RetainingSaver,
)
from retaining_saver.backends import find_backend
from retaining_saver.caches.memory import MemoryHistoryCache
from tests.support import graphs
from tests.support.faces import Face
from tests.support.interjections import Scripted
from tests.support.leaves import aput_leaf, put_leaf
from tests.support.savers import ONE_PER_BACKEND, Saver, Where, open_saver
from tests.support.threads import (
    dangling,
    face_of,
    ids,
    metadata_only,
    named,
    root,
    stored,
)

EFFECTS = (
    "row",
    "metadata",
    "lineage",
    "has_writes",
    "surroundings",
    "exists",
    "reclaimed_into",
    "fold",
    "reclaim",
    "rescue",
)
TASK = "11111111-2222-3333-4444-555555555555"
each_backend = pytest.mark.parametrize("kind", ONE_PER_BACKEND)


class Failed(Exception):
    """What the storage raises in these tests."""


class Desk:
    """A wrapped saver whose backend's effects are scripted."""

    def __init__(self, face: Face, saver: Saver, **options: Any) -> None:
        found = find_backend(saver)
        assert found is not None
        backend = found(saver)
        self.face = face
        self.saver = saver
        self.events: list[Event] = []
        self.scripted = Scripted(backend, EFFECTS)
        self.ours = RetainingSaver(saver, backend=backend, hooks=(self.events.append,), **options)
        self.graph = graphs.chat_graph(self.ours)

    async def say(self, text: str, thread_id: str) -> list[str]:
        done = await self.face(
            self.graph.invoke, self.graph.ainvoke, graphs.say(text), named(thread_id)
        )
        return [m.id for m in done["messages"] if m.id.startswith("human")]

    async def leaf(self, thread_id: str, run_id: str) -> RunnableConfig:
        put, _ = await self.face(put_leaf, aput_leaf, self.ours, thread_id, run_id=run_id)
        return put

    async def admit(self, thread_id: str) -> str:
        done = await self.face(self.ours.admit, self.ours.aadmit, named(thread_id))
        return str(done.outcome)

    async def rows(self, thread_id: str) -> list[CheckpointTuple]:
        return await stored(self.face, self.saver, thread_id)

    async def durations(self, thread_id: str) -> dict[str, int]:
        ours = self.ours
        history = await self.face(ours.run_history, ours.arun_history, named(thread_id))
        return history.durations

    def fail_at(self, at: int) -> None:
        def script(n: int, name: str) -> None:
            if n == at:
                raise Failed(name)

        self.scripted.effects.clear()
        self.scripted.script = script

    def recover(self) -> int:
        """Let everything work again; return how many effects there were."""
        self.scripted.script = lambda n, name: None
        return len(self.scripted.effects)


@asynccontextmanager
async def _desk(kind: str, where: Where, **options: Any) -> AsyncIterator[Desk]:
    async with open_saver(kind, where) as saver:
        yield Desk(face_of(kind), saver, **options)


async def _two_turns(desk: Desk) -> str:
    thread_id = str(uuid.uuid4())
    assert ["human-a"] == await desk.say("a", thread_id)
    await desk.leaf(thread_id, "one")
    assert ["human-a", "human-b"] == await desk.say("b", thread_id)
    await desk.leaf(thread_id, "two")
    await desk.admit(thread_id)
    return thread_id


@pytest.mark.parametrize("admission", ["auto", "put", "manual"])
@each_backend
async def test_an_effect_that_fails_fails_no_run_and_loses_nothing(
    kind: str, admission: Any, where: Where
) -> None:
    async with _desk(kind, where, admission=admission) as desk:
        await _two_turns(desk)
        effects = desk.recover()
        assert effects > 5
        for at in range(1, effects + 1):
            desk.fail_at(at)
            thread_id = await _two_turns(desk)
            desk.recover()
            assert [] == dangling(await desk.rows(thread_id))
            assert ["human-a", "human-b", "human-c"] == await desk.say("c", thread_id)
            await desk.leaf(thread_id, "three")
            assert "reclaimed" == await desk.admit(thread_id)
            rows = await desk.rows(thread_id)
            assert [] == dangling(rows)
            assert root(rows)[-1].checkpoint["id"] not in metadata_only(rows)
            assert {"one": 7, "two": 7, "three": 7} == await desk.durations(thread_id)


@each_backend
async def test_admission_says_that_storage_failed(kind: str, where: Where) -> None:
    async with _desk(kind, where) as desk:
        thread_id = str(uuid.uuid4())
        await desk.say("a", thread_id)
        await desk.leaf(thread_id, "one")
        before = ids(await desk.rows(thread_id))
        desk.events.clear()
        for at in range(1, 5):
            desk.fail_at(at)
            assert "delete_failed" == await desk.admit(thread_id)
            assert before == ids(await desk.rows(thread_id))
        failures = [e.error_type for e in desk.events if isinstance(e, DeleteFailed)]
        assert ["Failed"] * 4 == failures
        desk.recover()
        assert "reclaimed" == await desk.admit(thread_id)


@each_backend
async def test_a_record_that_cannot_be_folded_is_the_writers_error(kind: str, where: Where) -> None:
    async with _desk(kind, where, annotations="fold") as desk:
        thread_id = str(uuid.uuid4())
        await desk.say("a", thread_id)
        before = ids(await desk.rows(thread_id))

        def script(n: int, name: str) -> None:
            if name == "fold":
                raise Failed(name)

        desk.scripted.script = script
        with pytest.raises(Failed):
            await desk.leaf(thread_id, "one")
        desk.recover()
        assert before == ids(await desk.rows(thread_id))
        await desk.leaf(thread_id, "one")
        assert {"one": 7} == await desk.durations(thread_id)


async def _on_a_leaf(desk: Desk, thread_id: str) -> Callable[[], Awaitable[Any]]:
    """Prepare a child of a leaf, as a run's first put, and what puts it."""
    await desk.leaf(thread_id, "one")
    leaf = await desk.saver.aget_tuple(named(thread_id))
    assert leaf is not None
    checkpoint = {**leaf.checkpoint, "id": str(uuid6())}
    metadata = {"source": "input", "step": 9, "parents": {}}
    args: tuple[Any, ...] = (leaf.config, checkpoint, metadata, {})
    return lambda: desk.ours.aput(*args)


async def _admitting(desk: Desk, thread_id: str) -> Callable[[], Awaitable[Any]]:
    await desk.leaf(thread_id, "one")
    return lambda: desk.ours.aadmit(named(thread_id))


async def _recording(desk: Desk, thread_id: str) -> Callable[[], Awaitable[Any]]:
    return lambda: aput_leaf(desk.ours, thread_id, run_id="one")


async def _folding(desk: Desk, thread_id: str) -> Callable[[], Awaitable[Any]]:
    head = await desk.saver.aget_tuple(named(thread_id))
    assert head is not None
    await desk.saver.aput_writes(head.config, [("__interrupt__", "which?")], TASK)
    return lambda: aput_leaf(desk.ours, thread_id, run_id="one")


async def _asking(desk: Desk, thread_id: str) -> Callable[[], Awaitable[Any]]:
    head = await desk.saver.aget_tuple(named(thread_id))
    assert head is not None
    config = head.config
    await desk.leaf(thread_id, "one")
    writes = [("__interrupt__", "which?")]
    return lambda: desk.ours.aput_writes(config, writes, TASK)


OPERATIONS = [_admitting, _recording, _folding, _on_a_leaf, _asking]


@pytest.mark.parametrize("prepare", OPERATIONS, ids=lambda p: p.__name__.strip("_"))
@pytest.mark.parametrize("kind", ["memory", "asqlite", "apg", "apg_pool"])
async def test_a_cancelled_operation_is_done_or_undone_and_frees_its_lock(
    kind: str, prepare: Any, where: Where
) -> None:
    async with _desk(kind, where) as desk:
        inner = Scripted(desk.saver, ("put", "put_writes", "get_tuple"))
        counted = desk.scripted.effects
        inner.effects = counted  # One count of both, in order.
        at, cancelled = 0, True
        while cancelled:
            at += 1
            thread_id = str(uuid.uuid4())
            await desk.say("a", thread_id)
            parent = root(await desk.rows(thread_id))[-1]
            operation = await prepare(desk, thread_id)
            counted.clear()
            cancelled = await _cancelled_at(at, operation, desk.scripted, inner)
            rows = await desk.rows(thread_id)
            assert [] == dangling(rows)
            assert len(metadata_only(rows)) <= 1
            if cancelled:
                await asyncio.wait_for(operation(), 30)
            await asyncio.wait_for(desk.ours.aadmit(named(thread_id)), 30)
            rows = await desk.rows(thread_id)
            assert [] == dangling(rows)
            assert root(rows)[-1].checkpoint["id"] not in metadata_only(rows)
            assert {"one": 7} == await desk.durations(thread_id)
            kept = next(r for r in rows if r.checkpoint["id"] == parent.checkpoint["id"])
            assert parent.checkpoint == kept.checkpoint
    assert at > 2


@pytest.mark.parametrize("kind", ["sqlite", "pg"])
async def test_a_cancelled_operation_ends_with_its_effect(kind: str, where: Where) -> None:
    # The effect runs in another OS thread, and would outlive the lock of the conversation.
    async with _desk(kind, where) as desk:
        thread_id = str(uuid.uuid4())
        await desk.say("a", thread_id)
        await desk.leaf(thread_id, "one")
        lock: Any = desk.ours.lock
        with lock:  # The saver's own: the first effect waits for it.
            started = asyncio.Event()
            desk.scripted.script = lambda n, name: started.set()
            task = asyncio.ensure_future(desk.ours.aadmit(named(thread_id)))
            await started.wait()
            await asyncio.sleep(0.1)
            task.cancel()
            done, _ = await asyncio.wait((task,), timeout=0.3)
            assert set() == done
        with pytest.raises(asyncio.CancelledError):
            await task
        assert "reclaimed" == (await desk.ours.aadmit(named(thread_id))).outcome


async def _cancelled_at(
    at: int, operation: Callable[[], Awaitable[Any]], *scripts: Scripted
) -> bool:
    """Cancel the operation during its ``at``-th effect; false if it has fewer."""

    def script(n: int, name: str) -> None:
        if n == at:
            task.cancel()

    for scripted in scripts:
        scripted.script = script
    task = asyncio.ensure_future(operation())
    try:
        await task
    except asyncio.CancelledError:
        return True
    finally:
        for scripted in scripts:
            scripted.script = lambda n, name: None
    return False


@each_backend
async def test_a_hook_that_raises_is_logged_and_no_more(
    kind: str, where: Where, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(event: Event) -> None:
        raise Failed("hook")

    seen: list[Event] = []
    async with open_saver(kind, where) as saver:
        desk = Desk(face_of(kind), saver)
        desk.ours = RetainingSaver(saver, hooks=(broken, seen.append))
        desk.graph = graphs.chat_graph(desk.ours)
        with caplog.at_level(logging.ERROR, "retaining_saver"):
            thread_id = await _two_turns(desk)
        assert {"one": 7, "two": 7} == await desk.durations(thread_id)
    assert len(seen) == len([r for r in caplog.records if "hook" in r.getMessage()]) > 0


@each_backend
async def test_a_classifier_that_raises_recognises_nothing(
    kind: str, where: Where, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(metadata: Any) -> str | None:
        raise Failed("classifier")

    async with open_saver(kind, where) as saver:
        desk = Desk(face_of(kind), saver, classify=broken)
        thread_id = str(uuid.uuid4())
        with caplog.at_level(logging.ERROR, "retaining_saver"):
            await desk.say("a", thread_id)
            await desk.leaf(thread_id, "one")
            assert ["human-a", "human-b"] == await desk.say("b", thread_id)
        assert [] == dangling(await desk.rows(thread_id))
    assert "the classifier failed" in caplog.text


class BrokenCache(MemoryHistoryCache):
    """A cache that cannot be purged."""

    def delete_thread(self, thread_id: str) -> None:
        raise Failed("cache")

    async def adelete_thread(self, thread_id: str) -> None:
        raise Failed("cache")


@each_backend
async def test_a_leaf_stays_when_the_cache_cannot_be_purged(kind: str, where: Where) -> None:
    async with _desk(kind, where, history_cache=BrokenCache()) as desk:
        thread_id = str(uuid.uuid4())
        await desk.say("a", thread_id)
        await desk.leaf(thread_id, "one")
        before = ids(await desk.rows(thread_id))
        assert "cache_failed" == await desk.admit(thread_id)
        assert before == ids(await desk.rows(thread_id))
        assert ["cache_failed"] == [e.outcome for e in desk.events if isinstance(e, Refused)]
        assert ["human-a", "human-b"] == await desk.say("b", thread_id)
        assert {"one": 7} == await desk.durations(thread_id)


class BrokenPins:
    """A pin registry that cannot be reached."""

    ttl = None

    def __getattr__(self, name: str) -> Any:
        def refuse(*args: Any) -> Any:
            raise Failed("pins")

        async def arefuse(*args: Any) -> Any:
            raise Failed("pins")

        return arefuse if name.startswith("a") else refuse


@each_backend
async def test_without_its_pins_nothing_is_reclaimed_and_runs_go_on(
    kind: str, where: Where
) -> None:
    pins: Any = BrokenPins()
    async with _desk(kind, where, pins=pins) as desk:
        thread_id = str(uuid.uuid4())
        await desk.say("a", thread_id)
        put = await desk.leaf(thread_id, "one")
        before = ids(await desk.rows(thread_id))
        assert "delete_failed" == await desk.admit(thread_id)
        assert before == ids(await desk.rows(thread_id))
        named_id = put["configurable"]["checkpoint_id"]
        done = await desk.face(
            desk.graph.invoke, desk.graph.ainvoke, graphs.say("b"), named(thread_id, named_id)
        )
        assert 8 == len(done["messages"])
        assert named_id in ids(await desk.rows(thread_id))


@each_backend
async def test_an_id_given_to_admit_stays_even_if_it_could_not_be_pinned(
    kind: str, where: Where
) -> None:
    pins = MemoryPins(max_pins=1)
    async with _desk(kind, where, pins=pins) as desk:
        thread_id = str(uuid.uuid4())
        await desk.say("a", thread_id)
        await desk.face(desk.ours.pin, desk.ours.apin, named(thread_id), ttl=None)
        put = await desk.leaf(thread_id, "one")
        done = await desk.face(desk.ours.admit, desk.ours.aadmit, put)
        assert "pinned" == done.outcome
        assert ["PinsFullError"] == [e.error_type for e in desk.events if isinstance(e, PinFailed)]
        assert "reclaimed" == await desk.admit(thread_id)
