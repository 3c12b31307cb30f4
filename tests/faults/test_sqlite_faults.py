"""A SQLite file that is locked, full, read-only or closed: runs behave as on the bare saver."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.sqlite import SqliteSaver

from retaining_saver import DeleteFailed, Event, RetainingSaver
from tests.support import graphs
from tests.support.leaves import put_leaf
from tests.support.threads import dangling, ids, named

THREAD = "thread"
JOURNALS = ("wal", "delete")


@dataclass
class Desk:
    """A file with one turn and a leaf on it, opened by a wrapped saver."""

    path: Path
    connection: sqlite3.Connection
    events: list[Event] = field(default_factory=list)
    on_event: Callable[[Event], Any] = id

    def __post_init__(self) -> None:
        self.bare = SqliteSaver(self.connection)
        self.ours = RetainingSaver(self.bare, hooks=(self.events.append, self._told))
        self.graph = graphs.chat_graph(self.ours)

    def _told(self, event: Event) -> None:
        self.on_event(event)

    def say(self, text: str, saver: Any = None) -> list[str]:
        graph = self.graph if saver is None else graphs.chat_graph(saver)
        done = graph.invoke(graphs.say(text), named(THREAD))
        return [m.id for m in done["messages"] if m.id.startswith("human")]

    def everything(self) -> list[Any]:
        with closing(sqlite3.connect(self.path)) as other:
            rows = other.execute("SELECT * FROM checkpoints ORDER BY checkpoint_id").fetchall()
            return [*rows, *other.execute("SELECT * FROM writes").fetchall()]

    def failures(self) -> list[str]:
        return [e.error_type for e in self.events if isinstance(e, DeleteFailed)]


@pytest.fixture(params=JOURNALS)
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Desk]:
    path = tmp_path / "checkpoints.sqlite"
    with closing(sqlite3.connect(path, timeout=0.05, check_same_thread=False)) as connection:
        SqliteSaver(connection).setup()
        connection.execute(f"PRAGMA journal_mode = {request.param}")
        made = Desk(path, connection)
        made.say("a")
        put_leaf(made.bare, THREAD, run_id="one")
        yield made


@pytest.fixture
def other(desk: Desk) -> Iterator[sqlite3.Connection]:
    """Another process' connection."""
    with closing(sqlite3.connect(desk.path, isolation_level=None)) as connection:
        yield connection


def test_a_file_that_is_locked_during_admission_stops_no_run(
    desk: Desk, other: sqlite3.Connection
) -> None:
    def unlock(event: Event) -> None:
        if isinstance(event, DeleteFailed) and other.in_transaction:
            other.execute("ROLLBACK")

    other.execute("BEGIN IMMEDIATE")
    desk.on_event = unlock
    assert ["human-a", "human-b"] == desk.say("b")
    assert ["OperationalError"] == desk.failures()
    assert {"one": 7} == desk.ours.run_history(named(THREAD)).durations
    assert [] == dangling(desk.bare.list(named(THREAD)))


def test_a_file_that_stays_locked_fails_a_run_as_on_the_bare_saver(
    desk: Desk, other: sqlite3.Connection
) -> None:
    before = desk.everything()
    other.execute("BEGIN IMMEDIATE")
    for saver in (desk.bare, desk.ours):
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            desk.say("b", saver)
    assert "delete_failed" == desk.ours.admit(named(THREAD)).outcome
    other.execute("ROLLBACK")
    assert before == desk.everything()
    assert ["human-a", "human-c"] == desk.say("c")
    assert {"one": 7} == desk.ours.run_history(named(THREAD)).durations


@pytest.mark.parametrize("annotations", ["leaf", "fold"])
def test_what_cannot_be_recorded_in_a_locked_file_is_the_callers_error(
    desk: Desk, other: sqlite3.Connection, annotations: Any
) -> None:
    ours = RetainingSaver(desk.bare, annotations=annotations)
    before = desk.everything()
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        ours.record_run(named(THREAD), "two", duration=7)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        put_leaf(ours, THREAD, run_id="two")
    other.execute("ROLLBACK")
    assert before == desk.everything()
    ours.record_run(named(THREAD), "two", duration=7)
    assert {"one": 7, "two": 7} == ours.run_history(named(THREAD)).durations


def test_a_file_that_may_only_be_read_can_be_read(desk: Desk) -> None:
    desk.connection.execute("PRAGMA query_only = on")
    before = desk.everything()
    assert 4 == len(desk.graph.get_state(named(THREAD)).values["messages"])
    assert {"one": 7} == desk.ours.run_history(named(THREAD)).durations
    assert "delete_failed" == desk.ours.admit(named(THREAD)).outcome
    for saver in (desk.bare, desk.ours):
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            desk.say("b", saver)
    assert before == desk.everything()
    assert not desk.connection.in_transaction


def test_a_full_disk_refuses_what_does_not_fit_and_keeps_the_rest(desk: Desk) -> None:
    (pages,) = desk.connection.execute("PRAGMA page_count").fetchone()
    desk.connection.execute(f"PRAGMA max_page_count = {pages}")
    before = desk.everything()
    for config in (named(THREAD), named(THREAD, ids(desk.bare.list(named(THREAD)))[2])):
        with pytest.raises(sqlite3.OperationalError, match="full"):
            desk.ours.annotate(config, {"much": "x" * 200_000})
    assert before == desk.everything()
    assert not desk.connection.in_transaction
    desk.connection.execute("PRAGMA max_page_count = 100000")
    assert ["human-a", "human-b"] == desk.say("b")
    assert {"one": 7} == desk.ours.run_history(named(THREAD)).durations


def test_a_disk_that_is_full_during_the_fold_keeps_the_leaf(desk: Desk) -> None:
    # What the deletion frees is taken, and more, before the parent is written.
    desk.connection.execute("CREATE TABLE taken (bytes BLOB)")
    desk.connection.execute(
        "CREATE TRIGGER take AFTER DELETE ON checkpoints "
        "BEGIN INSERT INTO taken VALUES (zeroblob(200000)); END"
    )
    (pages,) = desk.connection.execute("PRAGMA page_count").fetchone()
    desk.connection.execute(f"PRAGMA max_page_count = {pages}")
    before = desk.everything()
    assert "delete_failed" == desk.ours.admit(named(THREAD)).outcome
    assert before == desk.everything()
    assert not desk.connection.in_transaction
    desk.connection.execute("PRAGMA max_page_count = 100000")
    assert "reclaimed" == desk.ours.admit(named(THREAD)).outcome
    assert {"one": 7} == desk.ours.run_history(named(THREAD)).durations


def test_a_connection_that_was_closed_fails_a_run_as_on_the_bare_saver(desk: Desk) -> None:
    desk.connection.close()
    for saver in (desk.bare, desk.ours):
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            desk.say("b", saver)
    assert "delete_failed" == desk.ours.admit(named(THREAD)).outcome
    assert ["ProgrammingError"] == desk.failures()
    assert 0 == len(desk.ours._locks)
