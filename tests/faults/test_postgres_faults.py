"""A Postgres server that refuses, times out or hangs up: runs behave as on the bare saver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from langgraph.checkpoint.postgres import PostgresSaver
from psycopg import Connection
from psycopg.rows import DictRow, dict_row
from psycopg_pool import ConnectionPool, PoolTimeout

from retaining_saver import DeleteFailed, Event, RetainingSaver
from retaining_saver.backends.postgres import PostgresBackend
from tests.support import graphs
from tests.support.interjections import Scripted
from tests.support.leaves import put_leaf
from tests.support.threads import dangling, ids, named

EFFECTS_OF_ADMISSION = ("row", "has_writes", "reclaim", "rescue")
EVERYTHING = """
SELECT to_jsonb(c) FROM checkpoints AS c
UNION ALL SELECT to_jsonb(w) FROM checkpoint_writes AS w
UNION ALL SELECT to_jsonb(b) FROM checkpoint_blobs AS b
"""


def _connect(url: str, options: str = "") -> Connection[DictRow]:
    return Connection[DictRow].connect(
        url, autocommit=True, prepare_threshold=0, row_factory=dict_row, options=options
    )


@dataclass
class Server:
    """A database with one thread, a turn and a leaf on it, and a connection to act as others."""

    url: str
    thread_id: str
    control: Connection[Any]
    stack: ExitStack

    def __post_init__(self) -> None:
        bare = PostgresSaver(self.control)
        self.say("a", bare)
        put_leaf(bare, self.thread_id, run_id="one")

    def say(self, text: str, saver: Any, **options: Any) -> list[str]:
        graph = graphs.chat_graph(saver)
        done = graph.invoke(graphs.say(text), named(self.thread_id), **options)
        return [m.id for m in done["messages"] if m.id.startswith("human")]

    def connect(self, options: str = "") -> Connection[DictRow]:
        return self.stack.enter_context(closing(_connect(self.url, options)))

    def everything(self) -> list[str]:
        return sorted(str(row) for row in self.control.execute(EVERYTHING).fetchall())

    def lock_the_parent(self) -> Connection[Any]:
        """Hold the parent's row in another session, until that rolls back."""
        locker = psycopg.connect(self.url)
        self.stack.callback(locker.close)
        newest = ids(PostgresSaver(self.control).list(named(self.thread_id)))
        locker.execute(
            "SELECT 1 FROM checkpoints WHERE checkpoint_id = %s FOR UPDATE", (newest[1],)
        )
        return locker


@pytest.fixture
def server(postgres_url: str, thread_id: str) -> Iterator[Server]:
    with ExitStack() as stack:
        control = stack.enter_context(closing(_connect(postgres_url)))
        yield Server(postgres_url, thread_id, control, stack)


def _watched(bare: PostgresSaver, **options: Any) -> tuple[RetainingSaver, list[Event]]:
    events: list[Event] = []
    return RetainingSaver(bare, hooks=(events.append,), **options), events


def _failures(events: list[Event]) -> list[str]:
    return [e.error_type for e in events if isinstance(e, DeleteFailed)]


def test_a_row_that_another_session_locks_stops_no_run(server: Server) -> None:
    locker = server.lock_the_parent()
    bare = PostgresSaver(server.connect("-c lock_timeout=50"))
    ours, events = _watched(bare)
    assert "delete_failed" == ours.admit(named(server.thread_id)).outcome
    assert ["human-a", "human-b"] == server.say("b", ours)
    assert {"LockNotAvailable"} == set(_failures(events))
    locker.rollback()
    assert [] == dangling(bare.list(named(server.thread_id)))
    assert {"one": 7} == ours.run_history(named(server.thread_id)).durations
    assert ["human-a", "human-b", "human-c"] == server.say("c", ours)


def test_a_statement_that_takes_too_long_stops_no_run(server: Server) -> None:
    locker = server.lock_the_parent()
    bare = PostgresSaver(server.connect("-c statement_timeout=200"))
    ours, events = _watched(bare)
    assert ["human-a", "human-b"] == server.say("b", ours)
    assert "QueryCanceled" in _failures(events)
    locker.rollback()
    assert {"one": 7} == ours.run_history(named(server.thread_id)).durations
    assert [] == dangling(bare.list(named(server.thread_id)))


def test_a_pipeline_goes_on_after_an_admission_that_failed(server: Server) -> None:
    locker = server.lock_the_parent()
    connection = server.connect("-c lock_timeout=50")
    with connection.pipeline() as pipeline:
        ours, events = _watched(PostgresSaver(connection, pipeline))
        assert "delete_failed" == ours.admit(named(server.thread_id)).outcome
        assert ["human-a", "human-b"] == server.say("b", ours)
        locker.rollback()
        assert ["human-a", "human-b", "human-c"] == server.say("c", ours)
        assert {"one": 7} == ours.run_history(named(server.thread_id)).durations
    assert "LockNotAvailable" in _failures(events)


def test_what_may_only_be_read_can_be_read(server: Server) -> None:
    bare = PostgresSaver(server.connect("-c default_transaction_read_only=on"))
    ours, events = _watched(bare)
    config = named(server.thread_id)
    before = server.everything()
    assert "delete_failed" == ours.admit(config).outcome
    assert ["ReadOnlySqlTransaction"] == _failures(events)
    assert 4 == len(graphs.chat_graph(ours).get_state(config).values["messages"])
    assert {"one": 7} == ours.run_history(config).durations
    for saver in (bare, ours):
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            server.say("b", saver)
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        ours.record_run(config, "two", duration=7)
    assert before == server.everything()


def test_an_empty_pool_fails_a_run_as_on_the_bare_saver(server: Server) -> None:
    settings: dict[str, Any] = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}
    config = named(server.thread_id)
    with ConnectionPool[Connection[DictRow]](
        server.url, min_size=1, max_size=1, timeout=0.3, kwargs=settings
    ) as pool:
        pool.wait(30)
        bare = PostgresSaver(pool)
        ours, events = _watched(bare)
        with pool.connection():
            assert "delete_failed" == ours.admit(config).outcome
            assert ["PoolTimeout"] == _failures(events)
            for saver in (bare, ours):
                with pytest.raises(PoolTimeout):
                    server.say("b", saver)
        assert 0 == len(ours._locks)
        # One connection is enough for a run that reclaims.
        assert ["human-a", "human-c"] == server.say("c", ours, durability="sync")
        assert {"one": 7} == ours.run_history(config).durations


@pytest.mark.parametrize("at", range(1, 7))
def test_a_connection_that_is_cut_between_two_effects_loses_nothing(
    server: Server, at: int
) -> None:
    config = named(server.thread_id)
    connection = server.connect()
    bare = PostgresSaver(connection)
    backend = PostgresBackend(bare)
    ours, events = _watched(bare, backend=backend)
    scripted = Scripted(backend, EFFECTS_OF_ADMISSION)
    scripted.script = _cutting(server, connection, at)
    outcome = ours.admit(config).outcome
    assert ("delete_failed" if at < 5 else "reclaimed") == outcome
    assert (at <= 5) == bool(_failures(events))
    again, _ = _watched(PostgresSaver(server.control))
    assert ("reclaimed" if at < 5 else "no_leaf") == again.admit(config).outcome
    assert {"one": 7} == again.run_history(config).durations
    assert ["human-a", "human-b"] == server.say("b", again)
    assert [] == dangling(again.list(config))


def _cutting(server: Server, connection: Connection[Any], at: int) -> Callable[[int, str], None]:
    pid = connection.info.backend_pid

    def script(n: int, name: str) -> None:
        if n == at:
            server.control.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))

    return script


def test_a_connection_that_is_cut_before_a_run_fails_it_as_on_the_bare_saver(
    server: Server,
) -> None:
    for wrap in (lambda saver: saver, RetainingSaver):
        connection = server.connect()
        saver = wrap(PostgresSaver(connection))
        _cutting(server, connection, 1)(1, "")
        with pytest.raises(psycopg.OperationalError):
            server.say("b", saver)
