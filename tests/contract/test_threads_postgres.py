"""What whole-thread retention promises on Postgres beyond the contract of all backends.

A cut full thread is what the saver's own ``prune`` leaves. Chunks, schemas, transactions of the
user, poolers, connections that die and other writers make no difference. Nothing here depends on
who is faster: a worker waits at a gate, or for a lock, that the test holds.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.graph import START, StateGraph
from langgraph.types import Send
from psycopg import Connection
from psycopg.errors import SerializationFailure
from psycopg.pq import TransactionStatus
from psycopg.rows import DictRow, dict_row
from typing_extensions import TypedDict

from retaining_saver import RetainingSaver
from retaining_saver.backends import postgres_rewriting, postgres_sessions, postgres_threads
from retaining_saver.backends.postgres import PostgresBackend
from retaining_saver.backends.postgres_sessions import Rows
from retaining_saver.backends.retention import Applied
from retaining_saver.entries import StoredThread
from retaining_saver.errors import PlanRefused
from retaining_saver.events import ThreadRetained
from retaining_saver.plan import plan, plan_prune
from retaining_saver.planned import RetentionPlan
from retaining_saver.policy import RetentionPolicy
from retaining_saver.records import Ref
from tests.contract.stage import Stage, checkpoint, open_stage
from tests.support import releases
from tests.support.faces import SYNC, Face
from tests.support.graphs import chat_graph, say
from tests.support.histories import BY_NAME, Talk
from tests.support.leaves import put_leaf
from tests.support.savers import Where

LATER = timedelta(hours=5)
PG_KINDS = ("pg", "pg_pool", "pg_pipeline", "apg", "apg_pool", "apg_pipeline")
WITHOUT_LEAVES_OR_DELTA = [name for name in BY_NAME if "delta" not in name and "leaves" not in name]


def connected(url: str, **settings: Any) -> Connection[DictRow]:
    return Connection[DictRow].connect(url, autocommit=True, row_factory=dict_row, **settings)


def nothing(_metadata: object) -> bool:
    return False


def heads(thread: StoredThread) -> RetentionPlan:
    return plan_prune(thread, (), datetime.now(timezone.utc) + LATER)


@pytest.fixture
async def stage(where: Where, thread_id: str) -> AsyncIterator[Stage]:
    async with open_stage("pg", where, thread_id, SYNC) as opened:
        yield opened


async def lived(stage: Stage, name: str) -> Talk:
    """Let a thread have a history."""
    history = BY_NAME[name]
    talk = Talk(stage.kind, stage.saver, history.graph(stage.saver), stage.thread_id)
    await history.live(talk)
    return talk


async def copied(stage: Stage, suffix: str) -> Stage:
    copy = replace(stage, thread_id=f"{stage.thread_id}-{suffix}")
    assert await stage.call("copy_thread", stage.thread_id, copy.thread_id, None)
    return copy


async def pruned(stage: Stage) -> Applied:
    thread = await stage.call("stored", stage.thread_id, nothing)
    applied = await stage.call("apply", thread, heads(thread))
    assert isinstance(applied, Applied)
    return applied


def rows_of(stage: Stage) -> dict[str, list[tuple[Any, ...]]]:
    """Every row but for the thread's name."""
    dump = stage.dump()
    assert {stage.thread_id} >= {row[0] for rows in dump.values() for row in rows}
    return {table: [row[1:] for row in rows] for table, rows in dump.items()}


# What the saver itself leaves


def prunes_itself(stage: Stage, expected: dict[str, list[tuple[Any, ...]]]) -> None:
    if releases.POSTGRES_PRUNES:
        stage.saver.prune([stage.thread_id])
        assert expected == rows_of(stage)
    else:
        with pytest.raises(NotImplementedError):
            stage.saver.prune([stage.thread_id])


@pytest.mark.parametrize("name", WITHOUT_LEAVES_OR_DELTA)
async def test_a_full_thread_is_cut_to_what_the_savers_own_prune_leaves(
    stage: Stage, name: str
) -> None:
    await lived(stage, name)
    ours, theirs = await copied(stage, "ours"), await copied(stage, "theirs")
    await pruned(ours)
    prunes_itself(theirs, rows_of(ours))
    assert len(rows_of(ours)["checkpoints"]) < len(rows_of(stage)["checkpoints"])


async def test_pending_sends_of_an_old_format_are_kept_as_the_savers_own_prune_does(
    stage: Stage,
) -> None:
    await old_sends(stage)
    ours, theirs = await copied(stage, "ours"), await copied(stage, "theirs")
    await pruned(ours)
    prunes_itself(theirs, rows_of(ours))
    assert 2 == len(rows_of(ours)["checkpoints"])


async def old_sends(stage: Stage) -> tuple[str, str]:
    """Store what savers did before checkpoint format 4: the sends are writes on the parent."""
    first, parent, child = (checkpoint({"x": n}) for n in range(3))
    above: str | None = None
    for made in (first, parent, child):
        made["v"] = 3
        above = await stage.put(made, above)
    await stage.put_write(parent["id"], "task", channel="__pregel_tasks")
    return parent["id"], child["id"]


# Every way to reach a server


@pytest.mark.parametrize("kind", PG_KINDS)
@pytest.mark.parametrize("name", ["leaves-delta", "calls-full", "forks-delta"])
async def test_every_kind_of_connection_leaves_the_same_rows(
    stage: Stage, kind: str, name: str, face: Face
) -> None:
    await lived(stage, name)
    ours, theirs = await copied(stage, "ours"), await copied(stage, "theirs")
    async with open_stage(kind, stage.where, theirs.thread_id, face) as other:
        assert await pruned(ours) == await pruned(other)
        assert rows_of(ours) == rows_of(other)
        again = await copied(other, "again")
        assert rows_of(ours) == rows_of(again)


async def test_tables_are_found_by_the_search_path(stage: Stage, where: Where) -> None:
    schema = f"of_{stage.thread_id.replace('-', '_')}"
    await lived(stage, "leaves-delta")
    before = stage.dump()
    options = f"-c search_path={schema}"
    with connected(where.postgres, options=options) as connection:
        connection.execute(f"CREATE SCHEMA {schema}".encode())
        saver = PostgresSaver(connection)
        saver.setup()
        backend = PostgresBackend(saver)
        history = BY_NAME["leaves-delta"]
        await history.live(Talk("pg", saver, history.graph(saver), stage.thread_id))
        thread = backend.stored(stage.thread_id, nothing)
        assert backend.apply(thread, heads(thread))
        assert backend.copy_thread(stage.thread_id, "copy", None)
        counted = connection.execute("SELECT count(*) AS n FROM checkpoints").fetchall()
        assert [{"n": 4}] == counted
    assert before == stage.dump()


async def test_nothing_is_prepared_because_a_pooler_may_switch_connections(
    stage: Stage, where: Where
) -> None:
    await lived(stage, "leaves-delta")
    with connected(where.postgres, prepare_threshold=0) as connection:
        backend = PostgresBackend(PostgresSaver(connection))
        thread = backend.stored(stage.thread_id, nothing)
        assert backend.apply(thread, heads(thread))
        assert backend.copy_thread(stage.thread_id, f"{stage.thread_id}-copy", None)
        prepared = connection.execute("SELECT statement FROM pg_prepared_statements", prepare=False)
        assert [] == prepared.fetchall()


@pytest.mark.parametrize("name", ["two-deltas", "leaves-delta", "calls-delta", "calls-full"])
async def test_chunks_and_pages_of_any_size_leave_the_same_rows(
    stage: Stage, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await lived(stage, name)
    await stage.put_write(str(uuid6()), "orphan")
    ours, small = await copied(stage, "ours"), await copied(stage, "small")
    expected = await stage.call("stored", stage.thread_id, nothing)
    in_one = await pruned(ours)
    monkeypatch.setattr(postgres_rewriting, "CHUNK", 2)
    monkeypatch.setattr(postgres_sessions, "PAGE", 3)
    assert expected == await stage.call("stored", stage.thread_id, nothing)
    assert in_one == await pruned(small)
    assert rows_of(ours) == rows_of(small)


async def test_the_oldest_runs_are_forgotten_whatever_the_size_of_a_chunk(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await lived(stage, "leaves-full")
    monkeypatch.setattr(postgres_rewriting, "CHUNK", 2)
    thread = await stage.call("stored", stage.thread_id, nothing)
    decided = plan_prune(thread, (), datetime.now(timezone.utc) + LATER, keep_runs=2)
    assert await stage.call("apply", thread, decided)
    (left,) = rows_of(stage)["checkpoints"]
    # The newest run's own leaf is folded whole, beside the two of turns that go.
    assert {"run-1": 7, "run-2": 7, "run-3": 7} == left[-1]["run_durations"]


# Reading


async def test_a_long_inline_value_is_compared_and_does_not_travel(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "x" * 50_000
    first = await stage.put(checkpoint({"text": long, "flag": True, "float": 1.0}))
    copy = await stage.put_copy(first)
    other = await stage.put(
        checkpoint({"text": long[:-1] + "y", "flag": True, "float": 1.0}), first
    )
    rest = await stage.put(checkpoint({"text": "short", "flag": True, "float": 1}), first)
    sizes: list[int] = []
    take = postgres_threads._Thread.take_checkpoints

    def take_and_weigh(thread: postgres_threads._Thread, rows: Rows) -> None:
        sizes.append(len(repr(rows)))
        take(thread, rows)

    monkeypatch.setattr(postgres_threads._Thread, "take_checkpoints", take_and_weigh)
    thread = await stage.call("stored", stage.thread_id, nothing)
    digest = {c.checkpoint_id: c.fingerprint for c in thread.checkpoints}
    assert digest[first] == digest[copy]
    assert 3 == len({digest[first], digest[other], digest[rest]})
    assert {frozenset({"text", "flag", "float"})} == {c.stored for c in thread.checkpoints}
    assert sum(sizes) < len(long)


async def test_one_and_one_point_nought_are_different_states(stage: Stage) -> None:
    ids = [await stage.put(checkpoint({"x": value})) for value in (1, 1.0, True, "1", None)]
    thread = await stage.call("stored", stage.thread_id, nothing)
    assert len(ids) == len({c.fingerprint for c in thread.checkpoints})
    stored = {c.checkpoint_id: c.stored for c in thread.checkpoints}
    assert [{"x"}] * 4 + [set()] == [set(stored[i]) for i in ids]


async def test_numbers_that_are_alike_only_as_floats_are_different_states(
    stage: Stage, where: Where
) -> None:
    ids = [await stage.put(checkpoint({"x": 0.1})) for _ in range(3)]
    with connected(where.postgres) as connection:
        connection.execute(
            "UPDATE checkpoints SET checkpoint = jsonb_set(checkpoint, "
            "'{channel_values,x}', '0.1000000000000000000001') "
            "WHERE thread_id = %s AND checkpoint_id = %s",
            (stage.thread_id, ids[1]),
        )
    thread = await stage.call("stored", stage.thread_id, nothing)
    first, second, third = (c.fingerprint for c in thread.checkpoints)
    assert first == third
    assert first != second


async def test_sends_of_an_old_format_are_due_on_the_child(stage: Stage) -> None:
    _, child = await old_sends(stage)
    thread = await stage.call("stored", stage.thread_id, nothing)
    due = {c.checkpoint_id: c.due for c in thread.checkpoints}
    assert {i: (await stage.stored(i)).due for i in due} == due
    assert [child] == [i for i, is_due in due.items() if is_due]


class Log(TypedDict):
    log: list[str]


@pytest.mark.parametrize("encrypted", [False, True])
async def test_sends_that_rest_are_told_from_sends_that_wait(
    where: Where, thread_id: str, encrypted: bool
) -> None:
    serde = EncryptedSerializer.from_pycryptodome_aes(key=b"0" * 16) if encrypted else None
    builder = StateGraph(Log)
    builder.add_node("plans", lambda state: {})
    builder.add_node("works", lambda state: {"log": ["done"]})
    builder.add_edge(START, "plans")
    builder.add_conditional_edges("plans", lambda state: [Send("works", {"log": []})], ["works"])
    async with open_stage("pg", where, thread_id, SYNC, serde=serde) as stage:
        graph = builder.compile(checkpointer=stage.saver, interrupt_before=["works"])
        await stage.invoke(graph, {"log": []})
        await stage.invoke(graph, None)
        thread = await stage.call("stored", thread_id, nothing)
        due = {c.checkpoint_id: "__pregel_tasks" in c.stored for c in thread.checkpoints}
        assert [False, False, True, False] == list(due.values())
        assert [(await stage.stored(i)).due for i in due] == [c.due for c in thread.checkpoints]


async def test_empty_blobs_of_older_savers_are_no_values(stage: Stage, where: Where) -> None:
    made = checkpoint({"x": [1]})
    await stage.put(made, new_versions=made["channel_versions"])
    with psycopg.connect(where.postgres) as connection:
        connection.execute(
            "UPDATE checkpoint_blobs SET type = 'empty', blob = NULL WHERE thread_id = %s",
            (stage.thread_id,),
        )
    (found,) = (await stage.call("stored", stage.thread_id, nothing)).checkpoints
    assert (frozenset({"x"}), frozenset()) == (found.versioned, found.stored)


# One snapshot, one transaction


@dataclass
class Arena:
    """A database of its own with one thread, and workers that can be held at a gate."""

    url: str
    control: Connection[Any]
    saver: PostgresSaver
    stack: ExitStack
    threads: ThreadPoolExecutor

    def worker(self, pause: str = "", *, pipeline: bool = False) -> PostgresBackend:
        """Open another worker's saver; ``pause`` names the statement that the gate holds."""
        escaped = pause.replace(" ", "\\ ")
        options = f"-c test.pause={escaped}"
        connection = self.stack.enter_context(connected(self.url, options=options))
        pipe = self.stack.enter_context(connection.pipeline()) if pipeline else None
        return PostgresBackend(PostgresSaver(connection, pipe))

    def start(self, work: Callable[[], Any]) -> Future[Any]:
        return self.threads.submit(work)

    @contextmanager
    def gate_closed(self) -> Iterator[None]:
        self.control.execute("SELECT pg_advisory_lock(7)")
        try:
            yield
        finally:
            self.control.execute("SELECT pg_advisory_unlock(7)")

    def wait_for(self, event: str) -> int:
        """Wait until a session waits, and return its process id; the limit only ends a failure."""
        deadline = time.monotonic() + 60
        while True:
            found = self.control.execute(
                "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
                "AND wait_event_type = 'Lock' AND wait_event = %s",
                (event,),
            ).fetchone()
            if found:
                return int(found[0])
            assert time.monotonic() < deadline, "nobody came to wait"
            time.sleep(0.005)

    def everything(self) -> list[str]:
        rows = self.control.execute(
            "SELECT to_jsonb(c) FROM checkpoints AS c "
            "UNION ALL SELECT to_jsonb(w) FROM checkpoint_writes AS w "
            "UNION ALL SELECT to_jsonb(b) FROM checkpoint_blobs AS b"
        )
        return sorted(str(row) for (row,) in rows.fetchall())


PAUSES = """
CREATE FUNCTION pause() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('test.pause', true) = TG_OP || ' ' || TG_TABLE_NAME THEN
        PERFORM pg_advisory_lock_shared(7);
        PERFORM pg_advisory_unlock_shared(7);
    END IF;
    RETURN CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
END $$;
"""
TABLES = ("checkpoints", "checkpoint_writes", "checkpoint_blobs")
STATEMENTS = [
    "INSERT checkpoints",
    "INSERT checkpoint_writes",
    "UPDATE checkpoints",
    "DELETE checkpoints",
    "DELETE checkpoint_writes",
    "DELETE checkpoint_blobs",
]
THREAD = "thread"
CHAT_ROWS = 5


@pytest.fixture
def arena(empty_postgres_url: str) -> Iterator[Arena]:
    with ExitStack() as stack:
        control = stack.enter_context(Connection.connect(empty_postgres_url, autocommit=True))
        control.execute(PAUSES)
        for table in TABLES:
            control.execute(
                f"CREATE TRIGGER pause BEFORE INSERT OR UPDATE OR DELETE ON {table} "
                "FOR EACH ROW EXECUTE FUNCTION pause()".encode()
            )
        saver = stack.enter_context(PostgresSaver.from_conn_string(empty_postgres_url))
        graph = chat_graph(saver, "delta")
        for n in range(4):
            graph.invoke(say(f"turn-{n}"), Ref(THREAD).config())
            put_leaf(saver, THREAD, run_id=f"run-{n}")
        # Ends first: no thread may still wait when its connection is closed.
        threads = ThreadPoolExecutor(4)
        yield Arena(empty_postgres_url, control, saver, stack, threads)
        control.execute("SELECT pg_advisory_unlock_all()")
        threads.shutdown()


def planned(backend: PostgresBackend) -> tuple[StoredThread, RetentionPlan]:
    """Plan a cut that folds, carries, grafts and deletes in every table."""
    thread = backend.stored(THREAD, nothing)
    policy = RetentionPolicy(keep_last_turns=1)
    decided = plan(thread, policy, (), datetime.now(timezone.utc) + LATER)
    assert decided.fold
    assert decided.carry
    assert decided.graft
    assert decided.drop
    return thread, decided


@pytest.mark.parametrize("statement", STATEMENTS)
def test_a_connection_that_dies_at_any_statement_leaves_everything_as_it_was(
    arena: Arena, statement: str
) -> None:
    worker = arena.worker(statement)
    thread, decided = planned(worker)
    before = arena.everything()
    with arena.gate_closed():
        applying = arena.start(lambda: worker.apply(thread, decided))
        pid = arena.wait_for("advisory")
        arena.control.execute("SELECT pg_terminate_backend(%s)", (pid,))
        with pytest.raises(psycopg.OperationalError):
            applying.result()
    assert before == arena.everything()
    assert arena.worker().apply(thread, decided)
    assert before != arena.everything()


@pytest.mark.parametrize("statement", STATEMENTS)
def test_what_a_run_stores_meanwhile_is_neither_deleted_nor_hidden(
    arena: Arena, statement: str
) -> None:
    twin = "twin"
    PostgresBackend(arena.saver).copy_thread(THREAD, twin, None)
    graph = chat_graph(arena.saver, "delta")
    expected = graph.invoke(say("meanwhile"), Ref(twin).config())
    worker = arena.worker(statement)
    thread, decided = planned(worker)
    dropped = {e.checkpoint_id for e in decided.drop}
    with arena.gate_closed():
        applying = arena.start(lambda: worker.apply(thread, decided))
        arena.wait_for("advisory")
        assert expected == graph.invoke(say("meanwhile"), Ref(THREAD).config())
    assert applying.result()
    # The run began from a leaf that went; what is next in the order of effects mends that.
    for fold in decided.fold:
        if fold.whole:
            worker.rescue(Ref(THREAD, "", fold.checkpoint_id), fold.into)
    left = worker.stored(THREAD, nothing).checkpoints
    new = {c.checkpoint_id for c in left} - {c.checkpoint_id for c in thread.checkpoints}
    assert CHAT_ROWS == len(new) - len(decided.carry)
    assert not dropped & {c.checkpoint_id for c in left}
    assert {c.parent_id for c in left if c.parent_id} <= {c.checkpoint_id for c in left}
    assert expected == graph.get_state(Ref(THREAD).config()).values
    later = graph.invoke(say("later"), Ref(twin).config())
    assert later == graph.invoke(say("later"), Ref(THREAD).config())


def test_a_thread_that_another_worker_cut_meanwhile_is_left_alone(arena: Arena) -> None:
    first, second = arena.worker("DELETE checkpoints"), arena.worker()
    thread, decided = planned(first)
    with arena.gate_closed():
        applying = arena.start(lambda: first.apply(thread, decided))
        arena.wait_for("advisory")
        waiting = arena.start(lambda: second.apply(thread, decided))
        arena.wait_for("transactionid")
    assert applying.result()
    once = arena.everything()
    assert waiting.result() is None
    assert once == arena.everything()


def test_a_fold_of_another_worker_meanwhile_is_not_lost(arena: Arena) -> None:
    first, second = arena.worker("DELETE checkpoint_writes"), arena.worker()
    thread, decided = planned(second)
    into = next(fold.into for fold in decided.fold if fold.whole)
    ref = Ref(THREAD, "", into)
    with arena.gate_closed():
        applying = arena.start(lambda: first.apply(thread, decided))
        arena.wait_for("advisory")
        folding = arena.start(lambda: second.fold(ref, None, {"run_durations": {"late": 1}}))
        arena.wait_for("transactionid")
    assert applying.result()
    assert folding.result() is True
    found = second.metadata(ref)
    assert found is not None
    assert 1 == found[1]["run_durations"]["late"]


def test_a_fold_meanwhile_is_not_lost_in_the_users_own_transaction(arena: Arena) -> None:
    first, second = arena.worker("UPDATE checkpoints"), arena.worker()
    thread = second.stored(THREAD, nothing)
    decided = plan(thread, RetentionPolicy(), (), datetime.now(timezone.utc) + LATER)
    ref = Ref(THREAD, "", max(fold.into for fold in decided.fold))
    connection = first._saver.conn  # type: ignore[attr-defined]  # The saver is a PostgresSaver.
    connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
    with arena.gate_closed():
        applying = arena.start(lambda: first.apply(thread, decided))
        arena.wait_for("advisory")  # With another fold's target, all of which are locked by then.
        folding = arena.start(lambda: second.fold(ref, None, {"run_durations": {"late": 1}}))
        arena.wait_for("transactionid")
    assert applying.result()
    connection.execute("COMMIT")
    assert folding.result() is True
    found = second.metadata(ref)
    assert found is not None
    assert {"run-3": 7, "late": 1} == found[1]["run_durations"]


@pytest.mark.parametrize("pipeline", [False, True])
@pytest.mark.parametrize("table", TABLES)
def test_what_the_server_refuses_each_time_is_raised_and_changes_nothing(
    arena: Arena, table: str, pipeline: bool
) -> None:
    worker = arena.worker(pipeline=pipeline)
    thread, decided = planned(worker)
    arena.control.execute("CREATE SEQUENCE refusals")
    arena.control.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "PERFORM nextval('refusals'); RAISE serialization_failure; END $$"
    )
    arena.control.execute(
        f"CREATE TRIGGER refuse BEFORE DELETE ON {table} "
        "FOR EACH ROW EXECUTE FUNCTION refuse()".encode()
    )
    before = arena.everything()
    with pytest.raises(SerializationFailure):
        worker.apply(thread, decided)
    assert before == arena.everything()
    assert [(postgres_threads.ATTEMPTS,)] == arena.control.execute(
        "SELECT last_value FROM refusals"
    ).fetchall()


def test_a_thread_is_read_on_one_snapshot(arena: Arena) -> None:
    worker = arena.worker()
    expected = worker.stored(THREAD, nothing)
    with arena.control.transaction():
        arena.control.execute("LOCK TABLE checkpoint_blobs IN ACCESS EXCLUSIVE MODE")
        reading = arena.start(lambda: worker.stored(THREAD, nothing))
        arena.wait_for("relation")
        # Its writes have been read by then, its checkpoints have not.
        head = expected.checkpoints[-1].checkpoint_id
        arena.control.execute(
            "INSERT INTO checkpoints SELECT thread_id, checkpoint_ns, checkpoint_id || 'x', "
            "checkpoint_id, type, checkpoint, metadata FROM checkpoints WHERE checkpoint_id = %s",
            (head,),
        )
    assert expected == reading.result()
    assert len(expected.checkpoints) + 1 == len(worker.stored(THREAD, nothing).checkpoints)


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_the_users_open_transaction_is_neither_committed_nor_rolled_back(
    arena: Arena, level: str
) -> None:
    worker = arena.worker()
    before = arena.everything()
    connection = worker._saver.conn  # type: ignore[attr-defined]  # The saver is a PostgresSaver.
    connection.execute(f"BEGIN ISOLATION LEVEL {level}")
    thread, decided = planned(worker)
    dry = worker.apply(thread, decided, dry_run=True)
    assert thread == worker.stored(THREAD, nothing)
    assert dry == worker.apply(thread, decided)
    assert worker.apply(thread, decided) is None
    assert worker.copy_thread(THREAD, "copy", None)
    assert not worker.copy_thread(THREAD, "copy", None)
    assert TransactionStatus.INTRANS == connection.info.transaction_status
    assert before == arena.everything()
    connection.execute("ROLLBACK")
    assert thread == worker.stored(THREAD, nothing)
    assert before == arena.everything()


def test_two_copies_onto_one_thread_leave_one(arena: Arena) -> None:
    first, second = arena.worker("INSERT checkpoints"), arena.worker()
    source = PostgresBackend(arena.saver)
    graph = chat_graph(arena.saver)
    graph.invoke(say("other"), Ref("other").config())
    expected = source.stored(THREAD, nothing)
    with arena.gate_closed():
        copying = arena.start(lambda: first.copy_thread(THREAD, "target", None))
        arena.wait_for("advisory")
        waiting = arena.start(lambda: second.copy_thread(THREAD, "target", None))
        arena.wait_for("transactionid")
    assert (True, False) == (copying.result(), waiting.result())
    assert expected.checkpoints == source.stored("target", nothing).checkpoints


async def test_a_copy_is_refused_that_was_planned_for_rows_that_are_gone(stage: Stage) -> None:
    await lived(stage, "two-deltas")
    thread = await stage.call("stored", stage.thread_id, nothing)
    latest = heads(thread)
    await pruned(stage)
    target = replace(stage, thread_id=f"{stage.thread_id}-copy")
    with pytest.raises(PlanRefused, match="lost"):
        await stage.call("copy_thread", stage.thread_id, target.thread_id, latest)
    assert [] == [row for rows in target.dump().values() for row in rows]


# Plain threads

PLAIN = ["turns-full", "exit-full", "questions-full"]


@pytest.mark.parametrize("name", list(BY_NAME))
async def test_a_plain_thread_is_cut_as_its_plan_says_and_no_other_is(
    stage: Stage, face: Face, name: str
) -> None:
    await lived(stage, name)
    quick, planned_for = await copied(stage, "quick"), await copied(stage, "planned")
    quick = replace(quick, face=face)
    assert (name in PLAIN) == await quick.call("is_plain", quick.thread_id)
    count = await quick.call("cut_plain", quick.thread_id)
    if name in PLAIN:
        await pruned(planned_for)
        assert rows_of(planned_for) == rows_of(quick)
        assert len(rows_of(stage)["checkpoints"]) - 1 == count
        assert not await quick.call("is_plain", quick.thread_id)
    else:
        assert count is None
        assert rows_of(stage) == rows_of(quick)


async def _fork(stage: Stage) -> None:
    thread = await stage.call("stored", stage.thread_id, nothing)
    await stage.put_copy(thread.checkpoints[1].checkpoint_id)


async def _hole(stage: Stage) -> None:
    thread = await stage.call("stored", stage.thread_id, nothing)
    stage.delete_row(thread.checkpoints[1].checkpoint_id)


async def _missing_root(stage: Stage) -> None:
    thread = await stage.call("stored", stage.thread_id, nothing)
    stage.delete_row(thread.checkpoints[0].checkpoint_id)


async def _second_root(stage: Stage) -> None:
    await stage.put(checkpoint({"x": 1}))


async def _subgraph(stage: Stage) -> None:
    await stage.put(checkpoint({"x": 1}), ns="sub")


async def _orphan(stage: Stage) -> None:
    await stage.put_write(str(uuid6()), "task")


async def _old_format(stage: Stage) -> None:
    head = await stage.stored()
    old = checkpoint({"x": 1})
    old["v"] = 3
    await stage.put(old, head.checkpoint_id)


async def _inline_true(stage: Stage) -> None:
    head = await stage.stored()
    await stage.put(checkpoint({"x": True}), head.checkpoint_id)


async def _metadata(stage: Stage, **metadata: Any) -> None:
    head = await stage.stored()
    await stage.put(checkpoint({"x": 1}), head.checkpoint_id, metadata=metadata)


async def _record(stage: Stage) -> None:
    await _metadata(stage, run_durations={})


async def _mark(stage: Stage) -> None:
    await _metadata(stage, retention={})


async def _counters(stage: Stage) -> None:
    await _metadata(stage, counters_since_delta_snapshot={})


@pytest.mark.parametrize(
    "spoil",
    [
        _fork,
        _hole,
        _missing_root,
        _second_root,
        _subgraph,
        _orphan,
        _old_format,
        _inline_true,
        _record,
        _mark,
        _counters,
    ],
)
async def test_whatever_is_to_be_decided_is_left_to_a_plan(
    stage: Stage, spoil: Callable[[Stage], Any]
) -> None:
    await lived(stage, "turns-full")
    assert await stage.call("is_plain", stage.thread_id)
    await spoil(stage)
    before = stage.dump()
    assert not await stage.call("is_plain", stage.thread_id)
    assert await stage.call("cut_plain", stage.thread_id) is None
    assert before == stage.dump()


async def test_a_thread_of_one_checkpoint_is_left_alone(stage: Stage) -> None:
    assert not await stage.call("is_plain", stage.thread_id)
    await stage.put(checkpoint({"x": 1}))
    assert not await stage.call("is_plain", stage.thread_id)
    assert await stage.call("cut_plain", stage.thread_id) is None


def plain_thread(arena: Arena) -> Any:
    graph = chat_graph(arena.saver)
    for n in range(3):
        graph.invoke(say(f"turn-{n}"), Ref("plain").config())
    return graph


DELETES = ["UPDATE checkpoints", *STATEMENTS[3:]]


@pytest.mark.parametrize("statement", DELETES)
def test_a_connection_that_dies_while_a_plain_thread_is_cut_leaves_everything_as_it_was(
    arena: Arena, statement: str
) -> None:
    plain_thread(arena)
    worker = arena.worker(statement)
    before = arena.everything()
    with arena.gate_closed():
        cutting = arena.start(lambda: worker.cut_plain("plain"))
        pid = arena.wait_for("advisory")
        arena.control.execute("SELECT pg_terminate_backend(%s)", (pid,))
        with pytest.raises(psycopg.OperationalError):
            cutting.result()
    assert before == arena.everything()
    assert 3 * CHAT_ROWS - 1 == arena.worker().cut_plain("plain")


@pytest.mark.parametrize("statement", DELETES)
def test_what_a_run_stores_while_a_plain_thread_is_cut_stays(arena: Arena, statement: str) -> None:
    graph = plain_thread(arena)
    PostgresBackend(arena.saver).copy_thread("plain", "twin", None)
    expected = graph.invoke(say("meanwhile"), Ref("twin").config())
    worker = arena.worker(statement)
    with arena.gate_closed():
        cutting = arena.start(lambda: worker.cut_plain("plain"))
        arena.wait_for("advisory")
        assert expected == graph.invoke(say("meanwhile"), Ref("plain").config())
    assert 3 * CHAT_ROWS - 1 == cutting.result()
    assert CHAT_ROWS + 1 == len(worker.stored("plain", nothing).checkpoints)
    assert expected == graph.get_state(Ref("plain").config()).values
    later = graph.invoke(say("later"), Ref("twin").config())
    assert later == graph.invoke(say("later"), Ref("plain").config())


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
def test_a_plain_thread_is_cut_in_the_users_transaction_only_on_one_snapshot(
    arena: Arena, level: str
) -> None:
    plain_thread(arena)
    before = arena.everything()
    worker = arena.worker()
    connection = worker._saver.conn  # type: ignore[attr-defined]  # The saver is a PostgresSaver.
    connection.execute(f"BEGIN ISOLATION LEVEL {level}")
    expected = None if level == "READ COMMITTED" else 3 * CHAT_ROWS - 1
    assert expected == worker.cut_plain("plain")
    assert TransactionStatus.INTRANS == connection.info.transaction_status
    connection.execute("ROLLBACK")
    assert before == arena.everything()


async def test_pruning_a_plain_thread_spares_pins_and_says_what_it_did(stage: Stage) -> None:
    await lived(stage, "turns-full")
    copy = await copied(stage, "copy")
    events: list[object] = []
    saver = RetainingSaver(stage.saver, hooks=[events.append])
    pinned = (await stage.call("stored", stage.thread_id, nothing)).checkpoints[7].checkpoint_id
    saver.pin(stage.ref(pinned).config())
    saver.prune([stage.thread_id, copy.thread_id])
    left = (await stage.call("stored", stage.thread_id, nothing)).checkpoints
    assert [pinned, left[-1].checkpoint_id] == [c.checkpoint_id for c in left]
    assert 1 == len(rows_of(copy)["checkpoints"])
    said = [(e.thread_id, e.count) for e in events if isinstance(e, ThreadRetained)]
    assert [(stage.thread_id, 28), (copy.thread_id, 29)] == said
