"""Leaves and writers that come too late, and two workers on one database in both orders."""

from __future__ import annotations

import copy
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.checkpoint.base.id import uuid6

from retaining_saver import RetainingSaver
from retaining_saver.backends import find_backend
from tests.support import graphs, releases
from tests.support.faces import Face
from tests.support.interjections import When, interject
from tests.support.leaves import aput_leaf, put_leaf
from tests.support.savers import ONE_PER_BACKEND, Saver, Where, open_saver
from tests.support.threads import (
    dangling,
    face_of,
    ids,
    metadata_only,
    named,
    parent_id,
    root,
    stored,
    story,
)

TASK = "11111111-2222-3333-4444-555555555555"


class Worker:
    """A wrapped saver in a process of its own, as far as what it remembers goes."""

    def __init__(self, face: Face, bare: Saver, **options: Any) -> None:
        self.face = face
        self.bare = bare
        found = find_backend(bare)
        assert found is not None
        self.backend = found(bare)
        self.ours = RetainingSaver(bare, backend=self.backend, **options)

    async def admit(self, thread_id: str) -> str:
        done = await self.face(self.ours.admit, self.ours.aadmit, named(thread_id))
        return str(done.outcome)

    async def head(self, thread_id: str) -> CheckpointTuple:
        found = await self.face(self.ours.get_tuple, self.ours.aget_tuple, named(thread_id))
        assert found is not None
        return found

    async def leaf(
        self, thread_id: str, run_id: str, at: RunnableConfig | None = None
    ) -> tuple[str | None, str]:
        """Put a leaf; return the id that ``put`` returned and the one that was given."""
        config, leaf_id = await self.face(
            put_leaf, aput_leaf, self.ours, thread_id, run_id=run_id, at=at
        )
        return config["configurable"]["checkpoint_id"], leaf_id

    async def bare_leaf(self, thread_id: str, run_id: str) -> str:
        _, leaf_id = await self.face(put_leaf, aput_leaf, self.bare, thread_id, run_id=run_id)
        return leaf_id

    async def run(self, graph: Any, given: Any, thread_id: str, **options: Any) -> Any:
        config = named(thread_id)
        return await self.face(graph.invoke, graph.ainvoke, given, config, **options)

    async def put_child(
        self, on: CheckpointTuple, checkpoint_id: str | None = None, *, bare: bool = False
    ) -> str:
        """Put a checkpoint with other state onto ``on``, as a run does."""
        saver = self.bare if bare else self.ours
        args = _child(on, checkpoint_id)
        await self.face(saver.put, saver.aput, *args)
        return str(args[1]["id"])

    async def asks(self, on: CheckpointTuple, *, bare: bool = False) -> None:
        saver = self.bare if bare else self.ours
        writes = [("__interrupt__", "which?")]
        await self.face(saver.put_writes, saver.aput_writes, on.config, writes, TASK)

    async def rows(self, thread_id: str) -> list[CheckpointTuple]:
        return await stored(self.face, self.bare, thread_id)

    async def durations(self, thread_id: str) -> dict[str, int]:
        ours = self.ours
        history = await self.face(ours.run_history, ours.arun_history, named(thread_id))
        return history.durations

    def count(self, name: str) -> list[str]:
        """Return a list that names a method of the bare saver as soon as it was called."""

        async def nothing() -> None: ...

        return interject(self.bare, name, "before", lambda: None, nothing)

    def meanwhile(self, target: Any, name: str, when: When, thread_id: str) -> list[str]:
        """Let this worker admit, once, right before or after an effect of another one."""
        config = named(thread_id)
        return interject(
            target,
            name,
            when,
            lambda: self.ours.admit(config),
            lambda: self.ours.aadmit(config),
        )


def _child(on: CheckpointTuple, checkpoint_id: str | None = None) -> tuple[Any, ...]:
    checkpoint = copy.deepcopy(on.checkpoint)
    checkpoint["id"] = checkpoint_id or str(uuid6())
    version = "00000000000000000000000000000099.0.5"
    checkpoint["channel_versions"]["other"] = version
    checkpoint["channel_values"]["other"] = "o"
    metadata = {"source": "loop", "step": 99, "parents": {}}
    config = copy.deepcopy(on.config)
    return config, checkpoint, metadata, {"other": version}


@dataclass
class Desk:
    """Two workers on one database, and a thread that had one turn."""

    a: Worker
    b: Worker
    thread_id: str
    parent: CheckpointTuple


@asynccontextmanager
async def _desk(kind: str, where: Where, **options_of_a: Any) -> AsyncIterator[Desk]:
    face = face_of(kind)
    thread_id = str(uuid.uuid4())
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(open_saver(kind, where))
        other = one
        if kind != "memory":
            other = await stack.enter_async_context(open_saver(kind, where))
        a, b = Worker(face, one, **options_of_a), Worker(face, other)
        graph = graphs.chat_graph(one)
        await a.run(graph, graphs.say("a"), thread_id)
        yield Desk(a, b, thread_id, await a.head(thread_id))


each_backend = pytest.mark.parametrize("kind", ONE_PER_BACKEND)
both_workers = pytest.mark.parametrize("other", [False, True], ids=["same", "other"])


@each_backend
async def test_a_leaf_on_an_older_checkpoint_is_folded_into_it(kind: str, where: Where) -> None:
    async with _desk(kind, where) as desk:
        await desk.a.run(graphs.chat_graph(desk.a.ours), graphs.say("b"), desk.thread_id)
        head = await desk.a.head(desk.thread_id)
        puts = desk.a.count("put")
        returned, _ = await desk.a.leaf(desk.thread_id, "late", at=desk.parent.config)
        assert desk.parent.checkpoint["id"] == returned
        assert [] == puts
        rows = await desk.a.rows(desk.thread_id)
        assert [] == metadata_only(rows)
        assert head.checkpoint["id"] == root(rows)[-1].checkpoint["id"]
        assert {"late": 7} == await desk.a.durations(desk.thread_id)


@each_backend
async def test_a_leaf_on_a_checkpoint_that_asks_is_folded_into_it(kind: str, where: Where) -> None:
    async with _desk(kind, where) as desk:
        await desk.a.asks(desk.parent)
        puts = desk.a.count("put")
        returned, _ = await desk.a.leaf(desk.thread_id, "late")
        assert desk.parent.checkpoint["id"] == returned
        # It is never written: a leaf that is taken back hid the question for a while.
        assert [] == puts
        head = await desk.a.head(desk.thread_id)
        assert [(TASK, "__interrupt__", "which?")] == head.pending_writes
        assert {"late": 7} == await desk.a.durations(desk.thread_id)


@each_backend
async def test_a_question_that_arrives_while_a_leaf_is_stored_takes_it_back(
    kind: str, where: Where
) -> None:
    async with _desk(kind, where) as desk:
        writes = [("__interrupt__", "which?")]
        done = interject(
            desk.a.bare,
            "put",
            "before",
            lambda: desk.b.bare.put_writes(desk.parent.config, writes, TASK),
            lambda: desk.b.bare.aput_writes(desk.parent.config, writes, TASK),
        )
        returned, _ = await desk.a.leaf(desk.thread_id, "late")
        assert ["put"] == done
        assert desk.parent.checkpoint["id"] == returned
        head = await desk.b.head(desk.thread_id)
        assert [(TASK, "__interrupt__", "which?")] == head.pending_writes
        assert {"late": 7} == await desk.b.durations(desk.thread_id)


@each_backend
async def test_a_child_that_arrives_while_a_leaf_is_stored_is_not_hidden(
    kind: str, where: Where
) -> None:
    async with _desk(kind, where) as desk:
        child = _child(desk.parent)
        saver = desk.b.bare
        interject(
            desk.a.bare, "put", "before", lambda: saver.put(*child), lambda: saver.aput(*child)
        )
        returned, _ = await desk.a.leaf(desk.thread_id, "late", at=desk.parent.config)
        assert desk.parent.checkpoint["id"] == returned
        rows = await desk.b.rows(desk.thread_id)
        assert child[1]["id"] == root(rows)[-1].checkpoint["id"]
        assert [] == metadata_only(rows)
        assert {"late": 7} == await desk.b.durations(desk.thread_id)


@each_backend
async def test_a_question_under_a_known_leaf_takes_the_leaf_away(kind: str, where: Where) -> None:
    async with _desk(kind, where) as desk:
        await desk.a.leaf(desk.thread_id, "one")
        await desk.a.asks(desk.parent)
        head = await desk.a.head(desk.thread_id)
        assert desk.parent.checkpoint["id"] == head.checkpoint["id"]
        assert [(TASK, "__interrupt__", "which?")] == head.pending_writes
        assert {"one": 7} == await desk.a.durations(desk.thread_id)


@each_backend
async def test_a_child_beside_a_known_leaf_takes_the_leaf_away(kind: str, where: Where) -> None:
    # Its id was made before the leaf's: under the leaf nobody would find it.
    async with _desk(kind, where) as desk:
        older = str(uuid6())
        await desk.a.leaf(desk.thread_id, "one")
        await desk.a.put_child(desk.parent, older)
        assert older == (await desk.a.head(desk.thread_id)).checkpoint["id"]
        assert [] == metadata_only(await desk.a.rows(desk.thread_id))
        assert {"one": 7} == await desk.a.durations(desk.thread_id)


@each_backend
async def test_a_leaf_of_a_bare_writer_over_a_later_child_is_found_by_the_next_run(
    kind: str, where: Where
) -> None:
    async with _desk(kind, where) as desk:
        older = str(uuid6())
        leaf_id = await desk.a.bare_leaf(desk.thread_id, "one")
        await desk.b.put_child(desk.parent, older, bare=True)
        assert leaf_id == (await desk.b.head(desk.thread_id)).checkpoint["id"]
        assert "reclaimed" == await desk.b.admit(desk.thread_id)
        assert older == (await desk.b.head(desk.thread_id)).checkpoint["id"]
        assert {"one": 7} == await desk.b.durations(desk.thread_id)


@both_workers
@each_backend
async def test_leaves_do_not_pile_up(kind: str, other: bool, where: Where) -> None:
    async with _desk(kind, where) as desk:
        _, leaf_id = await desk.a.leaf(desk.thread_id, "one")
        second = desk.b if other else desk.a
        for run_id in ("two", "three"):
            returned, _ = await second.leaf(desk.thread_id, run_id)
            assert leaf_id == returned
        rows = await desk.a.rows(desk.thread_id)
        assert [leaf_id] == metadata_only(rows)
        head = await second.head(desk.thread_id)
        assert {"one": 7, "two": 7, "three": 7} == head.metadata["run_durations"]  # type: ignore[typeddict-item]  # Not the host's key.
        assert "reclaimed" == await desk.b.admit(desk.thread_id)
        expected = {"one": 7, "two": 7, "three": 7}
        assert expected == await desk.a.durations(desk.thread_id)


@each_backend
async def test_leaves_stacked_by_bare_writers_go_one_after_the_other(
    kind: str, where: Where
) -> None:
    async with _desk(kind, where) as desk:
        runs = [f"run-{n}" for n in range(8)]
        for run_id in runs:
            await desk.a.bare_leaf(desk.thread_id, run_id)
        assert 8 == len(metadata_only(await desk.a.rows(desk.thread_id)))
        assert "reclaimed" == await desk.b.admit(desk.thread_id)
        rows = await desk.b.rows(desk.thread_id)
        assert desk.parent.checkpoint["id"] == root(rows)[-1].checkpoint["id"]
        assert dict.fromkeys(runs, 7) == await desk.b.durations(desk.thread_id)


@pytest.mark.parametrize("marked", [True, False], ids=["our leaf", "a bare writer's leaf"])
@pytest.mark.parametrize("point", ["between", "row", "surroundings", "put", "fold"])
@each_backend
async def test_a_leaf_on_a_leaf_that_another_worker_reclaims(
    kind: str, point: str, marked: bool, where: Where
) -> None:
    async with _desk(kind, where) as desk:
        if marked:
            await desk.a.leaf(desk.thread_id, "one")
        else:
            await desk.a.bare_leaf(desk.thread_id, "one")
        on = (await desk.a.head(desk.thread_id)).config
        if point == "between":
            assert "reclaimed" == await desk.b.admit(desk.thread_id)
            await _leaf_on(desk.a, on, desk.parent, "two")
        else:
            target = desk.a.bare if point == "put" else desk.a.backend
            desk.b.meanwhile(target, point, "after" if point == "row" else "before", desk.thread_id)
            await desk.a.leaf(desk.thread_id, "two", at=on)
        rows = await desk.b.rows(desk.thread_id)
        assert [] == dangling(rows)
        assert not marked or len(metadata_only(rows)) <= 1
        await desk.b.admit(desk.thread_id)
        rows = await desk.b.rows(desk.thread_id)
        assert desk.parent.checkpoint["id"] == root(rows)[-1].checkpoint["id"]
        assert {"one": 7, "two": 7} == await desk.b.durations(desk.thread_id)


async def _leaf_on(
    worker: Worker, on: RunnableConfig, parent: CheckpointTuple, run_id: str
) -> None:
    """Put a leaf onto one that is gone by now: its writer read it in time."""
    checkpoint = copy.deepcopy(parent.checkpoint)
    checkpoint["id"] = str(uuid6())
    metadata: Any = {
        **parent.metadata,
        "source": "update",
        "run_durations": {"one": 7, run_id: 7},
        "writes": {"runtime_run_duration": {"run_id": run_id, "duration": 7}},
    }
    await worker.face(worker.ours.put, worker.ours.aput, on, checkpoint, metadata, {})


POINTS: list[tuple[str, When]] = [
    ("put", "before"),
    ("put", "after"),
    ("put_writes", "before"),
    ("put_writes", "after"),
]


@pytest.mark.parametrize("admission", ["manual", "put"])
@pytest.mark.parametrize(("name", "when"), POINTS)
@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
@pytest.mark.parametrize("build", [*graphs.MODES, "raw"])
@pytest.mark.parametrize("kind", ["memory", "asqlite", "pg"])
async def test_a_run_loses_nothing_when_another_worker_reclaims_the_leaf_under_it(
    kind: str,
    build: Any,
    durability: Any,
    name: str,
    when: When,
    admission: Any,
    where: Where,
) -> None:
    async with _desk(kind, where, admission=admission) as desk:
        worker, thread_id, bare_id = desk.a, str(uuid.uuid4()), str(uuid.uuid4())

        def graph(saver: Any) -> Any:
            return graphs.raw_pregel(saver) if build == "raw" else graphs.chat_graph(saver, build)

        def given(text: str) -> Any:
            return [text] if build == "raw" else graphs.say(text)

        for text in ("a", "b", "c"):
            await worker.run(graph(worker.bare), given(text), bare_id, durability=durability)
        await worker.run(graph(worker.bare), given("a"), thread_id, durability=durability)
        under = (await worker.head(thread_id)).checkpoint["id"]
        leaf_id = await worker.bare_leaf(thread_id, "one")
        desk.b.meanwhile(worker.bare, name, when, thread_id)
        await worker.run(graph(worker.ours), given("b"), thread_id, durability=durability)
        rows = await desk.b.rows(thread_id)
        assert [] == dangling(rows)
        await desk.b.run(graph(desk.b.ours), given("c"), thread_id, durability=durability)
        rows = await desk.b.rows(thread_id)
        expected = await desk.b.rows(bare_id)
        durations = await desk.b.durations(thread_id)
        repeated = set(metadata_only(rows))
        if build == "raw" and not releases.KEEPS_RAW_INPUT and leaf_id in ids(rows):
            # The input has become the leaf's own state, which its parent lacks.
            repeated = {under}
        assert await _states(desk.b, bare_id, graph, set()) == await _states(
            desk.b, thread_id, graph, repeated
        )
    assert [] == dangling(rows)
    assert {"one": 7} == durations
    if leaf_id not in ids(rows):
        assert story(expected) == story(rows, aliases={leaf_id: under})


async def _states(
    worker: Worker, thread_id: str, graph: Callable[[Any], Any], but: set[str]
) -> list[Any]:
    """List what every checkpoint holds, but for the ids ``but``."""
    compiled = graph(worker.bare)

    def blocking() -> list[Any]:
        return list(compiled.get_state_history(named(thread_id)))

    async def awaitable() -> list[Any]:
        return [state async for state in compiled.aget_state_history(named(thread_id))]

    return [
        (state.values, state.next)
        for state in await worker.face(blocking, awaitable)
        if state.config["configurable"]["checkpoint_id"] not in but
    ]


@each_backend
async def test_late_writes_on_a_reclaimed_leaf_go_to_its_parent(kind: str, where: Where) -> None:
    async with _desk(kind, where) as desk:
        leaf_id = await desk.a.bare_leaf(desk.thread_id, "one")
        leaf = await desk.a.head(desk.thread_id)
        assert leaf_id == leaf.checkpoint["id"]
        assert "reclaimed" == await desk.b.admit(desk.thread_id)
        saver = desk.a.ours
        for channel in ("first", "second"):
            writes = [(channel, "late")]
            task_id = str(uuid.uuid5(uuid.UUID(TASK), channel))
            await desk.a.face(saver.put_writes, saver.aput_writes, leaf.config, writes, task_id)
        head = await desk.b.head(desk.thread_id)
        assert desk.parent.checkpoint["id"] == head.checkpoint["id"]
        assert ["first", "second"] == sorted(w[1] for w in head.pending_writes or ())


@each_backend
async def test_a_late_child_of_a_reclaimed_leaf_goes_to_its_parent(kind: str, where: Where) -> None:
    async with _desk(kind, where) as desk:
        await desk.a.bare_leaf(desk.thread_id, "one")
        leaf = await desk.a.head(desk.thread_id)
        assert "reclaimed" == await desk.b.admit(desk.thread_id)
        for _ in range(2):
            child = await desk.a.put_child(leaf)
            rows = await desk.b.rows(desk.thread_id)
            found = next(row for row in rows if row.checkpoint["id"] == child)
            assert desk.parent.checkpoint["id"] == parent_id(found)


@pytest.mark.parametrize("by", ["hand", "run"])
@pytest.mark.parametrize("kind", ["pg", "apg_pool"])
async def test_a_child_that_commits_after_the_deletion_is_re_addressed(
    kind: str, by: str, where: Where
) -> None:
    # Under READ COMMITTED the deleting statement cannot see a child that is not committed yet.
    async with _desk(kind, where) as desk:
        leaf_id = await desk.a.bare_leaf(desk.thread_id, "one")
        child_id = str(uuid6())
        with psycopg.connect(where.postgres) as late:
            late.execute(
                """INSERT INTO checkpoints
                SELECT thread_id, checkpoint_ns, %s, %s, type,
                    checkpoint || jsonb_build_object('id', %s::text),
                    '{"source": "loop", "step": 9}'
                FROM checkpoints WHERE thread_id = %s AND checkpoint_id = %s""",
                (child_id, leaf_id, child_id, desk.thread_id, leaf_id),
            )
            assert "reclaimed" == await desk.b.admit(desk.thread_id)
            late.commit()
        assert [child_id] == dangling(await desk.b.rows(desk.thread_id))
        if by == "hand":
            await desk.b.admit(desk.thread_id)
        else:
            await desk.b.run(graphs.chat_graph(desk.b.ours), graphs.say("b"), desk.thread_id)
        rows = await desk.b.rows(desk.thread_id)
        assert [] == dangling(rows)
        found = next(row for row in rows if row.checkpoint["id"] == child_id)
        assert desk.parent.checkpoint["id"] == parent_id(found)


@each_backend
async def test_two_workers_that_fold_into_one_checkpoint_lose_nothing(
    kind: str, where: Where
) -> None:
    async with _desk(kind, where) as desk:
        await desk.a.asks(desk.parent)
        ours, config = desk.b.ours, desk.parent.config
        interject(
            desk.a.backend,
            "fold",
            "before",
            lambda: put_leaf(ours, desk.thread_id, run_id="theirs", at=config),
            lambda: aput_leaf(ours, desk.thread_id, run_id="theirs", at=config),
        )
        await desk.a.leaf(desk.thread_id, "ours")
        assert {"ours": 7, "theirs": 7} == await desk.a.durations(desk.thread_id)
        assert [] == metadata_only(await desk.a.rows(desk.thread_id))


@each_backend
async def test_a_leaf_with_writes_stays(kind: str, where: Where) -> None:
    async with _desk(kind, where) as desk:
        leaf_id = await desk.a.bare_leaf(desk.thread_id, "one")
        leaf = await desk.a.head(desk.thread_id)
        saver = desk.b.bare
        writes = [("messages", "w")]
        await desk.a.face(saver.put_writes, saver.aput_writes, leaf.config, writes, TASK)
        assert "has_writes" == await desk.b.admit(desk.thread_id)
        assert leaf_id in ids(await desk.b.rows(desk.thread_id))
