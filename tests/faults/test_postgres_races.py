"""Two connections at once, and connections that die, each brought about at a stated moment.

A trigger makes a worker's statement wait for an advisory lock that the test holds, so that the
test can act while that statement is in flight. Nothing here depends on who is faster.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from langgraph.checkpoint.base import BaseCheckpointSaver, copy_checkpoint
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from psycopg import AsyncConnection, Connection
from psycopg.rows import DictRow, dict_row
from psycopg_pool import ConnectionPool

from retaining_saver.backends.base import Movable, Row
from retaining_saver.backends.moves import input_task_id
from retaining_saver.backends.postgres import PostgresBackend
from retaining_saver.records import Ref
from tests.support.graphs import chat_graph, say
from tests.support.leaves import put_leaf

Saver = BaseCheckpointSaver[Any]

THREAD = "thread"
GATE = 7
PAUSES = """
CREATE FUNCTION pause() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('test.pause', true) = TG_OP || ' ' || TG_TABLE_NAME THEN
        PERFORM pg_advisory_lock_shared(7);
        PERFORM pg_advisory_unlock_shared(7);
    END IF;
    RETURN CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
END $$;
CREATE TRIGGER pause BEFORE INSERT OR UPDATE OR DELETE ON checkpoints
    FOR EACH ROW EXECUTE FUNCTION pause();
CREATE TRIGGER pause BEFORE INSERT OR UPDATE OR DELETE ON checkpoint_writes
    FOR EACH ROW EXECUTE FUNCTION pause();
"""
EVERYTHING = """
SELECT to_jsonb(c) FROM checkpoints AS c
UNION ALL SELECT to_jsonb(w) FROM checkpoint_writes AS w
UNION ALL SELECT to_jsonb(b) FROM checkpoint_blobs AS b
"""
WAITING_AT_GATE = """
SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
WAITING_FOR_ROWS = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
AND wait_event_type = 'Lock' AND wait_event <> 'advisory'
"""


@dataclass
class Arena:
    """A database with one thread, a leaf on its head, and a gate at which workers can be held."""

    url: str
    control: Connection[Any]
    saver: PostgresSaver
    stack: ExitStack
    threads: ThreadPoolExecutor
    backend: PostgresBackend = field(init=False)
    leaf: Row = field(init=False)
    parent: Row = field(init=False)

    def __post_init__(self) -> None:
        self.backend = PostgresBackend(self.saver)
        chat_graph(self.saver).invoke(say("hello"), Ref(THREAD).config())
        put_leaf(self.saver, THREAD)
        self.leaf, self.parent = self.row(None), self.row(self.row(None).parent_id)

    @property
    def leaf_ref(self) -> Ref:
        return Ref(THREAD, "", self.leaf.checkpoint_id)

    @property
    def parent_ref(self) -> Ref:
        return Ref(THREAD, "", self.parent.checkpoint_id)

    def row(self, checkpoint_id: str | None) -> Row:
        row = self.backend.row(Ref(THREAD, "", checkpoint_id))
        assert row is not None
        return row

    def worker(self, pause: str = "", isolation: str = "read committed") -> PostgresBackend:
        """Open another worker's saver; ``pause`` names the statement that the gate holds."""
        connection = self.stack.enter_context(connect(self.url, options_of(pause, isolation)))
        return PostgresBackend(PostgresSaver(connection))

    def start(self, work: Callable[[], Any]) -> Future[Any]:
        return self.threads.submit(work)

    def reclaim_by(self, worker: PostgresBackend, **options: Any) -> Future[Any]:
        return self.start(lambda: worker.reclaim(THREAD, "", self.leaf, self.parent, **options))

    @contextmanager
    def gate_closed(self) -> Iterator[None]:
        self.control.execute("SELECT pg_advisory_lock(%s)", (GATE,))
        try:
            yield
        finally:
            self.control.execute("SELECT pg_advisory_unlock(%s)", (GATE,))

    def wait_for(self, question: str, count: int = 1) -> None:
        """Wait until that many sessions wait; the limit only ends a test that has failed."""
        deadline = time.monotonic() + 60
        while self.control.execute(question.encode()).fetchone() != (count,):
            assert time.monotonic() < deadline, f"nobody came to wait: {question}"
            time.sleep(0.005)

    async def await_for(self, question: str) -> None:
        await asyncio.to_thread(self.wait_for, question)

    def kill_the_waiting(self) -> None:
        self.control.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_locks "
            "WHERE locktype = 'advisory' AND NOT granted"
        )

    def everything(self) -> list[str]:
        return sorted(str(row) for (row,) in self.control.execute(EVERYTHING).fetchall())

    def parent_of(self, checkpoint_id: str) -> str | None:
        return self.row(checkpoint_id).parent_id

    def writes(self, checkpoint_id: str) -> list[str]:
        rows = self.control.execute(
            "SELECT task_id FROM checkpoint_writes WHERE checkpoint_id = %s", (checkpoint_id,)
        )
        return [task_id for (task_id,) in rows.fetchall()]


def options_of(pause: str = "", isolation: str = "read committed") -> str:
    """Say to a new connection which statement of it the gate holds."""
    named = {"test.pause": pause, "default_transaction_isolation": isolation}
    escaped = {name: value.replace(" ", "\\ ") for name, value in named.items()}
    return " ".join(f"-c {name}={value}" for name, value in escaped.items())


def connect(url: str, options: str) -> Connection[DictRow]:
    return Connection[DictRow].connect(url, autocommit=True, options=options, row_factory=dict_row)


@pytest.fixture
def arena(empty_postgres_url: str) -> Iterator[Arena]:
    with ExitStack() as stack:
        control = stack.enter_context(Connection.connect(empty_postgres_url, autocommit=True))
        control.execute(PAUSES)
        saver = stack.enter_context(PostgresSaver.from_conn_string(empty_postgres_url))
        # Ends first: no thread may still wait when its connection is closed.
        threads = ThreadPoolExecutor(4)
        yield Arena(empty_postgres_url, control, saver, stack, threads)
        control.execute("SELECT pg_advisory_unlock_all()")
        threads.shutdown()


def put_child(saver: Saver, leaf: Ref) -> str:
    """Store a real next checkpoint as a writer does that has read the leaf."""
    read = saver.get_tuple(leaf.config())
    assert read is not None
    child = copy_checkpoint(read.checkpoint)
    child["id"] = str(uuid6())
    saver.put(leaf.config(), child, {"source": "loop", "step": 9}, {})
    return child["id"]


# Writers that the deleting statement cannot see


def test_a_child_that_commits_while_the_leaf_is_deleted_is_rescued(arena: Arena) -> None:
    worker = arena.worker(pause="DELETE checkpoints")
    with arena.gate_closed():
        reclaiming = arena.reclaim_by(worker)
        arena.wait_for(WAITING_AT_GATE)
        child_id = put_child(arena.saver, arena.leaf_ref)
    assert reclaiming.result() == "reclaimed"
    assert arena.parent_of(child_id) == arena.leaf.checkpoint_id  # Dangling, until now.
    assert worker.rescue(arena.leaf_ref, arena.parent.checkpoint_id) == 1
    assert arena.parent_of(child_id) == arena.parent.checkpoint_id
    assert worker.rescue(arena.leaf_ref, arena.parent.checkpoint_id) == 0


def test_writes_that_commit_while_the_leaf_is_deleted_are_rescued(arena: Arena) -> None:
    worker = arena.worker(pause="DELETE checkpoints")
    typed = input_task_id(arena.leaf.checkpoint_id)
    assert typed is not None
    with arena.gate_closed():
        reclaiming = arena.reclaim_by(worker)
        arena.wait_for(WAITING_AT_GATE)
        for task_id in ("task-1", typed):
            arena.saver.put_writes(arena.leaf_ref.config(), [("messages", "late")], task_id)
    assert reclaiming.result() == "reclaimed"
    assert worker.rescue(arena.leaf_ref, arena.parent.checkpoint_id) == 2
    assert arena.writes(arena.leaf.checkpoint_id) == []
    parents_own = input_task_id(arena.parent.checkpoint_id)
    assert sorted(arena.writes(arena.parent.checkpoint_id)) == sorted(["task-1", str(parents_own)])


def test_a_write_that_committed_before_keeps_the_leaf(arena: Arena) -> None:
    arena.saver.put_writes(arena.leaf_ref.config(), [("messages", "x")], "task-1")
    before = arena.everything()
    assert arena.backend.reclaim(THREAD, "", arena.leaf, arena.parent) == "has_writes"
    assert arena.everything() == before


@pytest.mark.parametrize("only_head", [True, False])
def test_a_child_that_committed_before_keeps_the_leaf(arena: Arena, only_head: bool) -> None:
    put_child(arena.saver, arena.leaf_ref)
    before = arena.everything()
    reclaiming = arena.reclaim_by(arena.worker(), only_head=only_head)
    assert reclaiming.result() == "superseded"
    assert arena.everything() == before


def test_a_child_that_commits_while_the_leaf_is_locked_keeps_it(arena: Arena) -> None:
    first, second = arena.worker(pause="UPDATE checkpoints"), arena.worker()
    with arena.gate_closed():
        folding = arena.start(lambda: first.fold(arena.parent_ref, "b", {"title": "b"}))
        arena.wait_for(WAITING_AT_GATE)
        reclaiming = arena.reclaim_by(second)
        arena.wait_for(WAITING_FOR_ROWS)
        child_id = put_child(arena.saver, arena.leaf_ref)
    assert (folding.result(), reclaiming.result()) == (True, "superseded")
    assert arena.parent_of(child_id) == arena.leaf.checkpoint_id


@pytest.mark.parametrize("who_looks_last", ["the deleter", "the writer"])
def test_one_of_deleter_and_writer_always_sees_the_other(arena: Arena, who_looks_last: str) -> None:
    worker, parent_id = arena.worker(), arena.parent.checkpoint_id
    with Connection[DictRow].connect(arena.url, row_factory=dict_row) as uncommitted:
        writing = PostgresSaver(uncommitted)
        child_id = put_child(writing, arena.leaf_ref)
        writing.put_writes(arena.leaf_ref.config(), [("messages", "late")], "task-1")
        assert arena.reclaim_by(worker).result() == "reclaimed"
        if who_looks_last == "the writer":
            assert worker.rescue(arena.leaf_ref, parent_id) == 0
        uncommitted.commit()
        if who_looks_last == "the writer":
            assert PostgresBackend(writing).exists(arena.leaf_ref) is False
            assert PostgresBackend(writing).rescue(arena.leaf_ref, parent_id) == 2
        else:
            assert worker.rescue(arena.leaf_ref, parent_id) == 2
    assert arena.parent_of(child_id) == parent_id
    assert arena.writes(parent_id) == ["task-1"]


def test_both_may_rescue_at_once(arena: Arena) -> None:
    assert arena.reclaim_by(arena.worker()).result() == "reclaimed"
    arena.saver.put_writes(arena.leaf_ref.config(), [("messages", "late")], "task-1")
    first, second = arena.worker(pause="INSERT checkpoint_writes"), arena.worker()
    with arena.gate_closed():
        rescuing = arena.start(lambda: first.rescue(arena.leaf_ref, arena.parent.checkpoint_id))
        arena.wait_for(WAITING_AT_GATE)
        again = arena.start(lambda: second.rescue(arena.leaf_ref, arena.parent.checkpoint_id))
        arena.wait_for(WAITING_FOR_ROWS)
    assert (rescuing.result(), again.result()) == (1, 0)
    assert arena.writes(arena.parent.checkpoint_id) == ["task-1"]


def test_a_write_that_arrives_while_writes_are_moved_is_moved_by_the_next_rescue(
    arena: Arena,
) -> None:
    assert arena.reclaim_by(arena.worker()).result() == "reclaimed"
    put = arena.saver.put_writes
    put(arena.leaf_ref.config(), [("messages", "late")], "task-1")
    worker = arena.worker(pause="INSERT checkpoint_writes")
    with arena.gate_closed():
        rescuing = arena.start(lambda: worker.rescue(arena.leaf_ref, arena.parent.checkpoint_id))
        arena.wait_for(WAITING_AT_GATE)
        put(arena.leaf_ref.config(), [("messages", "a"), ("messages", "later")], "task-2")
    assert rescuing.result() == 1
    assert arena.backend.rescue(arena.leaf_ref, arena.parent.checkpoint_id) == 2
    assert sorted(arena.writes(arena.parent.checkpoint_id)) == ["task-1", "task-2", "task-2"]


def test_a_write_that_the_parent_has_already_is_not_put_there_twice(arena: Arena) -> None:
    assert arena.reclaim_by(arena.worker()).result() == "reclaimed"
    for ref in (arena.parent_ref, arena.leaf_ref):
        arena.saver.put_writes(ref.config(), [("messages", "late")], "task-1")
    assert arena.backend.rescue(arena.leaf_ref, arena.parent.checkpoint_id) == 0
    assert arena.writes(arena.leaf.checkpoint_id) == []
    assert arena.writes(arena.parent.checkpoint_id) == ["task-1"]


# Two workers of ours


def test_two_workers_that_fold_into_one_parent_lose_nothing(arena: Arena) -> None:
    first, second = arena.worker(pause="UPDATE checkpoints"), arena.worker()
    with arena.gate_closed():
        one = arena.start(lambda: first.fold(arena.parent_ref, "a", {"run_durations": {"a": 1}}))
        arena.wait_for(WAITING_AT_GATE)
        two = arena.start(lambda: second.fold(arena.parent_ref, "b", {"run_durations": {"b": 2}}))
        arena.wait_for(WAITING_FOR_ROWS)
    assert (one.result(), two.result()) == (True, True)
    metadata = arena.row(arena.parent.checkpoint_id).metadata
    assert metadata["run_durations"] == {"a": 1, "b": 2}
    assert metadata["retention"]["reclaimed"] == ["a", "b"]


def test_a_fold_while_the_leaf_is_reclaimed_is_kept(arena: Arena) -> None:
    first, second = arena.worker(pause="DELETE checkpoints"), arena.worker()
    with arena.gate_closed():
        one = arena.reclaim_by(first)
        arena.wait_for(WAITING_AT_GATE)
        two = arena.start(lambda: second.fold(arena.parent_ref, "b", {"run_durations": {"b": 2}}))
        arena.wait_for(WAITING_FOR_ROWS)
    assert (one.result(), two.result()) == ("reclaimed", True)
    metadata = arena.row(None).metadata
    assert metadata["run_durations"] == {"run-1": 7, "b": 2}


def test_what_is_folded_into_a_leaf_that_is_about_to_go_goes_with_it(arena: Arena) -> None:
    first, second = arena.worker(pause="UPDATE checkpoints"), arena.worker()
    with arena.gate_closed():
        one = arena.start(lambda: first.fold(arena.leaf_ref, "b", {"run_durations": {"b": 2}}))
        arena.wait_for(WAITING_AT_GATE)
        two = arena.reclaim_by(second)
        arena.wait_for(WAITING_FOR_ROWS)
    assert (one.result(), two.result()) == (True, "reclaimed")
    assert arena.row(None).metadata["run_durations"] == {"run-1": 7, "b": 2}


@pytest.mark.parametrize("pause", ["DELETE checkpoints", "UPDATE checkpoints"])
def test_of_two_workers_that_reclaim_one_leaf_one_does(arena: Arena, pause: str) -> None:
    first, second = arena.worker(pause=pause), arena.worker()
    with arena.gate_closed():
        one = arena.reclaim_by(first)
        arena.wait_for(WAITING_AT_GATE)
        two = arena.reclaim_by(second)
        arena.wait_for(WAITING_FOR_ROWS)
    assert (one.result(), two.result()) == ("reclaimed", "superseded")
    assert arena.row(None).metadata["run_durations"] == {"run-1": 7}


def test_two_workers_on_stacked_leaves_do_not_wait_for_each_other(arena: Arena) -> None:
    put_leaf(arena.saver, THREAD, run_id="run-2")
    upper = arena.row(None)
    first, second = arena.worker(pause="DELETE checkpoints"), arena.worker()
    with arena.gate_closed():
        one = arena.start(lambda: first.reclaim(THREAD, "", upper, arena.leaf))
        arena.wait_for(WAITING_AT_GATE)
        two = arena.reclaim_by(second)
        arena.wait_for(WAITING_FOR_ROWS)
    assert (one.result(), two.result()) == ("reclaimed", "reclaimed")
    head = arena.row(None)
    assert head.checkpoint_id == arena.parent.checkpoint_id
    assert head.metadata["run_durations"] == {"run-1": 7, "run-2": 7}


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_a_stricter_isolation_level_refuses_the_second_worker_and_loses_nothing(
    arena: Arena, isolation: str
) -> None:
    first = arena.worker(pause="DELETE checkpoints", isolation=isolation)
    second = arena.worker(isolation=isolation)
    with arena.gate_closed():
        one = arena.reclaim_by(first)
        arena.wait_for(WAITING_AT_GATE)
        two = arena.start(lambda: second.fold(arena.parent_ref, "b", {"run_durations": {"b": 2}}))
        arena.wait_for(WAITING_FOR_ROWS)
    assert one.result() == "reclaimed"
    with pytest.raises(psycopg.errors.SerializationFailure):
        two.result()
    assert second.fold(arena.parent_ref, "b", {"run_durations": {"b": 2}})
    assert arena.row(None).metadata["run_durations"] == {"run-1": 7, "b": 2}


# Connections that die


MOVES = Movable(inputs=True, exits=True)


@pytest.mark.parametrize(
    "pause",
    [
        "DELETE checkpoints",
        "DELETE checkpoint_writes",
        "INSERT checkpoint_writes",
        "UPDATE checkpoints",
    ],
)
@pytest.mark.parametrize("kind", ["connection", "pool", "pipeline"])
def test_a_connection_that_dies_while_reclaiming_changes_nothing(
    arena: Arena, pause: str, kind: str
) -> None:
    typed = str(input_task_id(arena.leaf.checkpoint_id))
    arena.saver.put_writes(arena.leaf_ref.config(), [("messages", "typed")], typed)
    before = arena.everything()
    with dying(arena.url, pause, kind) as worker:
        with arena.gate_closed():
            reclaiming = arena.reclaim_by(worker, movable=MOVES)
            arena.wait_for(WAITING_AT_GATE)
            arena.kill_the_waiting()
            with pytest.raises(psycopg.OperationalError):
                reclaiming.result()
        assert arena.everything() == before
        if kind == "pool":  # A pool replaces the dead connection by itself.
            assert arena.reclaim_by(worker, movable=MOVES).result() == "reclaimed"
            return
    assert arena.reclaim_by(arena.worker(), movable=MOVES).result() == "reclaimed"


@pytest.mark.parametrize("pause", ["UPDATE checkpoints", "INSERT checkpoint_writes"])
def test_a_connection_that_dies_while_rescuing_changes_nothing(arena: Arena, pause: str) -> None:
    child_id = put_child(arena.saver, arena.leaf_ref)
    arena.control.execute(
        "DELETE FROM checkpoints WHERE checkpoint_id = %s", (arena.leaf.checkpoint_id,)
    )
    arena.saver.put_writes(arena.leaf_ref.config(), [("messages", "late")], "task-1")
    before = arena.everything()
    with dying(arena.url, pause, "connection") as worker, arena.gate_closed():
        rescuing = arena.start(lambda: worker.rescue(arena.leaf_ref, arena.parent.checkpoint_id))
        arena.wait_for(WAITING_AT_GATE)
        arena.kill_the_waiting()
        with pytest.raises(psycopg.OperationalError):
            rescuing.result()
    assert arena.everything() == before
    assert arena.backend.rescue(arena.leaf_ref, arena.parent.checkpoint_id) == 2
    assert arena.parent_of(child_id) == arena.parent.checkpoint_id


@contextmanager
def dying(url: str, pause: str, kind: str) -> Iterator[PostgresBackend]:
    """Open a saver on a connection that will be killed, and close it as its user would."""
    if kind == "pool":
        with ConnectionPool[Connection[DictRow]](
            url, min_size=1, max_size=1, kwargs={"autocommit": True, "options": options_of(pause)}
        ) as pool:
            yield PostgresBackend(PostgresSaver(pool))
        return
    connection = connect(url, options_of(pause))
    try:
        if kind == "pipeline":
            pipeline = connection.pipeline()
            yield PostgresBackend(PostgresSaver(connection, pipeline.__enter__()))
        else:
            yield PostgresBackend(PostgresSaver(connection))
    finally:
        connection.close()


@pytest.mark.parametrize("pause", ["DELETE checkpoints", "UPDATE checkpoints"])
async def test_a_cancelled_reclaim_changes_nothing(arena: Arena, pause: str) -> None:
    before = arena.everything()
    async with await AsyncConnection[DictRow].connect(
        arena.url, autocommit=True, options=options_of(pause), row_factory=dict_row
    ) as connection:
        worker = PostgresBackend(AsyncPostgresSaver(connection))
        with arena.gate_closed():
            reclaiming = asyncio.ensure_future(
                worker.areclaim(THREAD, "", arena.leaf, arena.parent)
            )
            await arena.await_for(WAITING_AT_GATE)
            reclaiming.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reclaiming
        assert arena.everything() == before
        assert await worker.areclaim(THREAD, "", arena.leaf, arena.parent) == "reclaimed"
