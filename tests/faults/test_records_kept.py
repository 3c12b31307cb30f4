"""What is recorded while another worker records, reclaims or is late is all in the history."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from retaining_saver import RetainingSaver
from retaining_saver.backends import find_backend
from tests.support import graphs
from tests.support.faces import Face
from tests.support.interjections import interject
from tests.support.leaves import aput_leaf, put_leaf
from tests.support.savers import ONE_PER_BACKEND, Saver, Where, open_saver
from tests.support.threads import face_of, ids, metadata_only, named, root, stored, story

each_backend = pytest.mark.parametrize("kind", ONE_PER_BACKEND)


class Worker:
    """A wrapped saver with a memory of its own, and the backend whose effects a test may join."""

    def __init__(self, face: Face, bare: Saver, **options: Any) -> None:
        found = find_backend(bare)
        assert found is not None
        self.face = face
        self.bare = bare
        self.backend = found(bare)
        self.ours = RetainingSaver(bare, backend=self.backend, **options)

    async def say(self, text: str, thread_id: str) -> None:
        graph = graphs.chat_graph(self.ours)
        await self.face(graph.invoke, graph.ainvoke, graphs.say(text), named(thread_id))

    async def record(self, thread_id: str, run_id: str, at: str | None = None) -> str:
        config = named(thread_id, at)
        ours = self.ours
        put = await self.face(ours.record_run, ours.arecord_run, config, run_id, duration=7)
        return str(put["configurable"]["checkpoint_id"])

    async def admit(self, thread_id: str) -> str:
        done = await self.face(self.ours.admit, self.ours.aadmit, named(thread_id))
        return str(done.outcome)

    async def durations(self, thread_id: str) -> dict[str, int]:
        ours = self.ours
        history = await self.face(ours.run_history, ours.arun_history, named(thread_id))
        return history.durations

    async def root_ids(self, thread_id: str) -> list[str]:
        return ids(root(await stored(self.face, self.bare, thread_id)))


@dataclass
class Desk:
    """Two workers on one database, and a thread of two turns."""

    a: Worker
    b: Worker
    thread_id: str


@asynccontextmanager
async def _desk(kind: str, where: Where, thread_id: str, **options: Any) -> AsyncIterator[Desk]:
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(open_saver(kind, where))
        other = one
        if kind != "memory":
            other = await stack.enter_async_context(open_saver(kind, where))
        face = face_of(kind)
        desk = Desk(Worker(face, one, **options), Worker(face, other, **options), thread_id)
        await desk.a.say("a", thread_id)
        await desk.a.say("b", thread_id)
        yield desk


@each_backend
async def test_two_runs_recorded_at_once_are_both_told(
    kind: str, where: Where, thread_id: str
) -> None:
    async with _desk(kind, where, thread_id) as desk:
        a, b = desk.a, desk.b
        done = interject(
            a.bare,
            "put",
            "before",
            lambda: b.ours.record_run(named(thread_id), "by b", duration=7),
            lambda: b.ours.arecord_run(named(thread_id), "by b", duration=7),
        )
        await a.record(thread_id, "by a")
        assert ["put"] == done
        assert {"by a": 7, "by b": 7} == await a.durations(thread_id)
        await b.admit(thread_id)
        assert {"by a": 7, "by b": 7} == await b.durations(thread_id)


@each_backend
async def test_a_leaf_tells_what_was_folded_under_it_while_it_was_made(
    kind: str, where: Where, thread_id: str
) -> None:
    async with _desk(kind, where, thread_id) as desk:
        a, b = desk.a, desk.b

        def come_and_go() -> None:
            b.ours.record_run(named(thread_id), "by b", duration=7)
            assert "reclaimed" == b.ours.admit(named(thread_id)).outcome

        async def acome_and_go() -> None:
            await b.ours.arecord_run(named(thread_id), "by b", duration=7)
            assert "reclaimed" == (await b.ours.aadmit(named(thread_id))).outcome

        done = interject(a.bare, "put", "before", come_and_go, acome_and_go)
        await a.record(thread_id, "by a")
        assert ["put"] == done
        assert {"by a": 7, "by b": 7} == await a.durations(thread_id)
        assert "reclaimed" == await b.admit(thread_id)
        assert {"by a": 7, "by b": 7} == await b.durations(thread_id)


@each_backend
async def test_recording_again_changes_nothing(kind: str, where: Where, thread_id: str) -> None:
    async with _desk(kind, where, thread_id) as desk:
        a, b = desk.a, desk.b
        put = await a.record(thread_id, "one")
        before = story(await stored(a.face, a.bare, thread_id))
        assert put == await b.record(thread_id, "one")
        assert before == story(await stored(a.face, a.bare, thread_id))


@pytest.mark.parametrize("kind", ["memory", "sqlite", "pg_pool"])
async def test_runs_recorded_at_once_by_eight_threads_of_two_workers_are_all_told(
    kind: str, where: Where, thread_id: str
) -> None:
    async with _desk(kind, where, thread_id) as desk:
        savers = [desk.a.ours, desk.b.ours]
        start = threading.Barrier(8)

        def record(n: int) -> None:
            start.wait(30)
            for i in range(n, 24, 8):
                savers[i % 2].record_run(named(thread_id), f"run-{i}", duration=i)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(record, range(8)))
        expected = {f"run-{i}": i for i in range(24)}
        assert expected == await desk.a.durations(thread_id)
        await desk.b.admit(thread_id)
        assert expected == await desk.b.durations(thread_id)
        rows = await stored(desk.a.face, desk.a.bare, thread_id)
        assert root(rows)[-1].checkpoint["id"] not in metadata_only(rows)


@pytest.mark.parametrize("back", [1, 2, 5])
@each_backend
async def test_a_run_recorded_under_a_leaf_is_told_by_the_head(
    kind: str, back: int, where: Where, thread_id: str
) -> None:
    async with _desk(kind, where, thread_id) as desk:
        older = (await desk.a.root_ids(thread_id))[-back]
        await desk.a.record(thread_id, "one")
        assert older == await desk.b.record(thread_id, "late", at=older)
        assert {"one": 7, "late": 7} == await desk.b.durations(thread_id)
        assert "reclaimed" == await desk.a.admit(thread_id)
        assert {"one": 7, "late": 7} == await desk.b.durations(thread_id)


@each_backend
async def test_a_leaf_put_under_a_leaf_is_told_by_the_head(
    kind: str, where: Where, thread_id: str
) -> None:
    async with _desk(kind, where, thread_id) as desk:
        b = desk.b
        older = (await desk.a.root_ids(thread_id))[-4]
        await desk.a.record(thread_id, "one")
        at = named(thread_id, older)
        await b.face(put_leaf, aput_leaf, b.ours, thread_id, run_id="late", at=at)
        assert {"one": 7, "late": 7} == await b.durations(thread_id)


@each_backend
async def test_a_run_recorded_on_another_branch_is_not_told_by_the_head(
    kind: str, where: Where, thread_id: str
) -> None:
    async with _desk(kind, where, thread_id) as desk:
        a = desk.a
        branch = (await a.root_ids(thread_id))[-1]
        older = (await a.root_ids(thread_id))[-6]
        graph = graphs.chat_graph(a.ours)
        at = named(thread_id, older)
        await a.face(graph.invoke, graph.ainvoke, graphs.say("fork"), at)
        await a.record(thread_id, "one")
        assert branch == await a.record(thread_id, "elsewhere", at=branch)
        assert {"one": 7} == await a.durations(thread_id)


@each_backend
async def test_what_is_annotated_on_an_older_checkpoint_stays_there(
    kind: str, where: Where, thread_id: str
) -> None:
    async with _desk(kind, where, thread_id) as desk:
        a = desk.a
        older = (await a.root_ids(thread_id))[-3]
        await a.record(thread_id, "one")
        at = named(thread_id, older)
        await a.face(a.ours.annotate, a.ours.aannotate, at, {"title": "of the older one"})
        head = await a.face(a.bare.get_tuple, a.bare.aget_tuple, named(thread_id))
        assert head is not None
        assert "title" not in head.metadata


@pytest.mark.parametrize("annotations", ["leaf", "fold"])
@each_backend
async def test_a_run_is_recorded_on_the_new_head_when_the_old_one_is_reclaimed_meanwhile(
    kind: str, annotations: str, where: Where, thread_id: str
) -> None:
    async with _desk(kind, where, thread_id, annotations=annotations) as desk:
        a, b = desk.a, desk.b
        await a.face(put_leaf, aput_leaf, a.bare, thread_id, run_id="one")
        done = interject(
            a.backend,
            "lineage",
            "after",
            lambda: b.ours.admit(named(thread_id)),
            lambda: b.ours.aadmit(named(thread_id)),
        )
        await a.record(thread_id, "two")
        assert ["lineage"] == done
        assert {"one": 7, "two": 7} == await a.durations(thread_id)


@each_backend
async def test_a_history_is_whole_when_its_leaf_is_reclaimed_while_it_is_read(
    kind: str, where: Where, thread_id: str
) -> None:
    async with _desk(kind, where, thread_id) as desk:
        a, b = desk.a, desk.b
        await a.record(thread_id, "one")
        await a.say("c", thread_id)
        await a.face(put_leaf, aput_leaf, a.bare, thread_id, run_id="two")
        done = interject(
            a.backend,
            "metadata",
            "after",
            lambda: b.ours.admit(named(thread_id)),
            lambda: b.ours.aadmit(named(thread_id)),
        )
        assert {"one": 7, "two": 7} == await a.durations(thread_id)
        assert ["metadata"] == done


@pytest.mark.parametrize("names", ["by pin", "by a run"])
async def test_a_checkpoint_is_not_reclaimed_between_its_pin_and_the_look(
    names: str, where: Where, thread_id: str
) -> None:
    """The admission has asked for pins, and found none, when the pin arrives."""
    async with open_saver("memory", where) as bare:
        worker = Worker(face_of("pg"), bare)
        await worker.say("a", thread_id)
        leaf = named(thread_id, await worker.record(thread_id, "one"))
        graph = graphs.chat_graph(worker.ours)
        pin = {
            "by pin": lambda: worker.ours.pin(leaf),
            "by a run": lambda: graph.invoke(graphs.say("b"), leaf),
        }[names]
        outcome: list[str] = []
        pinning = threading.Thread(target=lambda: outcome.append(_outcome(pin)), daemon=True)

        def start_to_pin() -> None:
            pinning.start()
            pinning.join(0.5)  # It waits for the lock; without one it is done by now.

        async def nothing() -> None:
            """The other face is not called."""

        interject(worker.backend, "reclaim", "before", start_to_pin, nothing)
        done = await worker.admit(thread_id)
        pinning.join(30)
        assert ("reclaimed", ["CheckpointReclaimedError"]) == (done, outcome)


def _outcome(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as error:
        return type(error).__name__
    return "done"
