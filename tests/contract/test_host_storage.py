"""What the backends take for granted about LangGraph's storage. A red test here means: the host has
changed, so read its saver again before the backend is trusted.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import closing
from typing import Any

import pytest
from langgraph._internal import _constants
from langgraph.checkpoint.base import WRITES_IDX_MAP
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.pregel import _checkpoint

from retaining_saver.backends.base import Movable
from retaining_saver.backends.moves import input_task_id, moved_task_id
from retaining_saver.entries import NULL_TASK_ID
from tests.contract.stage import checkpoint, versions_of
from tests.support import releases

TASK = "6f8a2f0e-5c55-5d0f-9d7c-0f3a3b1f2c11"


def test_memory_keeps_three_dicts_of_these_shapes() -> None:
    saver = InMemorySaver()
    values = {"c": 1}
    stored = checkpoint(values)
    versions = versions_of(values)
    config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": "n", "checkpoint_id": "p"}}
    at = saver.put(config, stored, {"step": 1}, {**versions, "absent": "1"})
    saver.put_writes(at, [("c", 2), ("__error__", "e")], TASK, "path")

    ((kind, data), metadata, parent_id) = saver.storage["t"]["n"][stored["id"]]
    assert {k: v for k, v in stored.items() if k != "channel_values"} == saver.serde.loads_typed(
        (kind, data)
    )
    assert {"step": 1} == saver.serde.loads_typed(metadata)
    assert "p" == parent_id
    assert {
        ("t", "n", "c", versions["c"]): saver.serde.dumps_typed(1),
        ("t", "n", "absent", "1"): ("empty", b""),
    } == saver.blobs
    assert {
        ("t", "n", stored["id"]): {
            (TASK, 0): (TASK, "c", saver.serde.dumps_typed(2), "path"),
            (TASK, -1): (TASK, "__error__", saver.serde.dumps_typed("e"), "path"),
        }
    } == dict(saver.writes)


SQLITE_COLUMNS = {
    "checkpoints": [
        ("thread_id", "TEXT", 1),
        ("checkpoint_ns", "TEXT", 2),
        ("checkpoint_id", "TEXT", 3),
        ("parent_checkpoint_id", "TEXT", 0),
        ("type", "TEXT", 0),
        ("checkpoint", "BLOB", 0),
        ("metadata", "BLOB", 0),
    ],
    "writes": [
        ("thread_id", "TEXT", 1),
        ("checkpoint_ns", "TEXT", 2),
        ("checkpoint_id", "TEXT", 3),
        ("task_id", "TEXT", 4),
        *([("task_path", "TEXT", 0)] if releases.SQLITE_KEEPS_TASK_PATHS else []),
        ("idx", "INTEGER", 5),
        ("channel", "TEXT", 0),
        ("type", "TEXT", 0),
        ("value", "BLOB", 0),
    ],
}


def sqlite_columns(conn: sqlite3.Connection) -> dict[str, list[tuple[str, str, int]]]:
    tables = conn.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    return {
        table: [
            (name, kind, key)
            for _, name, kind, _, _, key in conn.execute(f"PRAGMA table_info({table})")
        ]
        for (table,) in tables
    }


def test_sqlite_has_two_tables_of_these_columns() -> None:
    with closing(sqlite3.connect(":memory:")) as conn:
        saver = SqliteSaver(conn)
        assert isinstance(saver.lock, type(threading.Lock()))
        saver.setup()
        saver.setup()
        assert SQLITE_COLUMNS == sqlite_columns(conn)
        assert saver.conn is conn
        assert not conn.in_transaction


async def test_the_async_sqlite_saver_has_the_same_tables_and_a_loop(tmp_path: Any) -> None:
    path = tmp_path / "checkpoints.sqlite"
    async with AsyncSqliteSaver.from_conn_string(str(path)) as saver:
        await saver.setup()
        assert isinstance(saver.lock, asyncio.Lock)
        assert saver.loop is asyncio.get_running_loop()
        assert not saver.conn.in_transaction
    with closing(sqlite3.connect(path)) as conn:
        assert SQLITE_COLUMNS == sqlite_columns(conn)


def test_sqlite_stores_the_whole_checkpoint_and_metadata_as_json() -> None:
    with closing(sqlite3.connect(":memory:")) as conn:
        saver = SqliteSaver(conn)
        stored = checkpoint({"c": 1})
        config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
        saver.put(config, stored, {"source": "loop"}, {"c": "1"})
        columns = "parent_checkpoint_id, type, checkpoint, metadata"
        parent_id, *typed, metadata = conn.execute(f"SELECT {columns} FROM checkpoints").fetchone()
    assert parent_id is None
    assert saver.serde.dumps_typed(stored) == tuple(typed)
    assert b'{"source": "loop"}' == metadata


def test_special_writes_have_negative_places() -> None:
    assert {"__error__", "__interrupt__", "__resume__"} <= set(WRITES_IDX_MAP)
    assert all(idx < 0 for idx in WRITES_IDX_MAP.values())


def test_the_input_task_id_is_derived_from_this_name() -> None:
    assert "__input__" == _constants.INPUT
    assert NULL_TASK_ID == _constants.NULL_TASK_ID
    assert input_task_id("not a uuid") is None


@pytest.mark.parametrize("task_id", [TASK, NULL_TASK_ID])
@pytest.mark.parametrize("step", [0, 7, 99_999])
def test_the_delta_writes_of_exiting_runs_have_ids_of_these_shapes(step: int, task_id: str) -> None:
    for made in _exit_ids(step, task_id):
        # Older releases take the null task's own id for its first step: such writes stay.
        moved = None if made == NULL_TASK_ID else made
        assert moved == moved_task_id(made, TASK, TASK, Movable(exits=True))
    assert NULL_TASK_ID not in _exit_ids(step, task_id) or not releases.MARKS_LATE_EXIT_WRITES


def test_a_step_that_no_thread_reaches_keeps_its_writes_where_they_are() -> None:
    made = _exit_ids(100_000, TASK)[0]
    assert moved_task_id(made, TASK, TASK, Movable(exits=True)) is None


def _exit_ids(step: int, task_id: str) -> list[str]:
    if releases.MARKS_LATE_EXIT_WRITES:
        made = (_checkpoint.exit_delta_task_id, _checkpoint.exit_delta_late_task_id)
        return [make(step, task_id) for make in made]
    # The first releases put the step before the whole task id, later ones into it.
    return [f"{step:08d}-{task_id}", f"{step:08d}{task_id[8:]}"]
