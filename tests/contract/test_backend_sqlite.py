"""What the SQLite backend promises beyond the contract: the user's connection stays the user's."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any, cast

import aiosqlite
import pytest
from langgraph.checkpoint.base import Checkpoint
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

from retaining_saver._steps import Steps
from retaining_saver.backends.base import Row
from retaining_saver.backends.opaque import UnreadableCheckpoint
from tests.contract.stage import (
    Stage,
    backend_of,
    checkpoint,
    execute,
    in_transaction,
    lookup,
    open_stage,
    versions_of,
)
from tests.support import releases
from tests.support.faces import ASYNC, SYNC, Face
from tests.support.savers import Where

KINDS = ("sqlite", "asqlite")


@pytest.fixture(params=KINDS)
async def stage(
    request: pytest.FixtureRequest, where: Where, thread_id: str, face: Face
) -> AsyncIterator[Stage]:
    async with open_stage(request.param, where, thread_id, face) as opened:
        yield opened


def mine(stage: Stage) -> list[tuple[Any, ...]]:
    """Read the user's own table by another connection, which sees what was committed."""
    with closing(sqlite3.connect(stage.where.sqlite)) as other:
        return other.execute("SELECT x FROM mine").fetchall()


async def open_transaction(stage: Stage) -> None:
    await execute(stage, "CREATE TABLE mine (x)")
    await execute(stage, "INSERT INTO mine VALUES (1)")
    assert in_transaction(stage)


async def test_the_user_s_transaction_decides_about_our_work(stage: Stage) -> None:
    leaf, parent = await stage.leaf_and_parent()
    before = stage.dump()
    await open_transaction(stage)
    assert "reclaimed" == await stage.reclaim(leaf, parent)
    assert in_transaction(stage)
    assert ([], before) == (mine(stage), stage.dump())
    await execute(stage, "ROLLBACK")
    assert ([], before) == (mine(stage), stage.dump())

    await execute(stage, "INSERT INTO mine VALUES (1)")
    assert "reclaimed" == await stage.reclaim(leaf, parent)
    await execute(stage, "COMMIT")
    assert [(1,)] == mine(stage)
    assert await stage.call("exists", stage.ref(leaf.checkpoint_id)) is False


def _failing(_saver: Any) -> Steps[None]:
    raise KeyError("bad")


async def test_no_refusal_and_no_failure_takes_the_user_s_work_back(stage: Stage) -> None:
    leaf, parent = await stage.leaf_and_parent()
    await stage.put_copy(leaf.checkpoint_id)
    before = stage.dump()
    await open_transaction(stage)
    assert "superseded" == await stage.reclaim(leaf, parent)
    assert 0 == await stage.call("rescue", stage.ref(leaf.checkpoint_id), parent.checkpoint_id)
    with pytest.raises(TypeError, match="not JSON serializable"):
        await stage.call("fold", stage.ref(parent.checkpoint_id), None, {"bad": object()})
    assert (await stage.call("on_snapshot", lookup(stage.ref()))) is not None
    with pytest.raises(KeyError):
        await stage.call("on_snapshot", _failing)
    assert in_transaction(stage)
    await execute(stage, "COMMIT")
    assert ([(1,)], before) == (mine(stage), stage.dump())


async def test_a_failure_leaves_no_transaction_of_ours_open(stage: Stage) -> None:
    parent_id = await stage.talk()
    before = stage.dump()
    with pytest.raises(TypeError, match="not JSON serializable"):
        await stage.call("fold", stage.ref(parent_id), None, {"bad": object()})
    assert not in_transaction(stage)
    assert before == stage.dump()


async def test_reading_opens_no_transaction(stage: Stage) -> None:
    leaf, _ = await stage.leaf_and_parent()
    ref = stage.ref(leaf.checkpoint_id)
    for name in ("row", "metadata", "lineage", "has_writes", "surroundings", "reclaimed_into"):
        await stage.call(name, ref)
        assert not in_transaction(stage), name
    await stage.call("on_snapshot", lookup(ref))
    assert not in_transaction(stage)


CONNECTIONS: list[dict[str, Any]] = [
    {"isolation_level": level} for level in (None, "DEFERRED", "IMMEDIATE", "EXCLUSIVE")
]
if sys.version_info >= (3, 12):
    CONNECTIONS += [{"autocommit": True}]


@pytest.mark.parametrize("options", CONNECTIONS, ids=str)
async def test_every_way_to_connect_commits(
    options: dict[str, Any], face: Face, where: Where, thread_id: str
) -> None:
    with closing(sqlite3.connect(where.sqlite, check_same_thread=False, **options)) as conn:
        saver = SqliteSaver(conn)
        stage = Stage("sqlite", where, saver, backend_of(saver), thread_id, face)
        leaf, parent = await stage.leaf_and_parent()
        if conn.in_transaction:  # Without a transaction of its own, the saver's put opens none.
            conn.commit()
        assert "reclaimed" == await stage.reclaim(leaf, parent)
        assert not conn.in_transaction
        assert leaf.checkpoint_id not in {row[2] for row in stage.dump()["checkpoints"]}


if sys.version_info >= (3, 12):  # The argument ``autocommit`` is new there.

    async def test_a_connection_that_is_always_in_a_transaction_is_left_in_it(
        face: Face, where: Where, thread_id: str
    ) -> None:
        options: dict[str, Any] = {"autocommit": True}
        with closing(sqlite3.connect(where.sqlite, check_same_thread=False, **options)) as conn:
            saver = SqliteSaver(conn)
            saver.setup()
            stage = Stage("sqlite", where, saver, backend_of(saver), thread_id, face)
            leaf, parent = await stage.leaf_and_parent()
            cast(Any, conn).autocommit = False
            before = stage.dump()
            assert "reclaimed" == await stage.reclaim(leaf, parent)
            assert before == stage.dump()
            conn.commit()
            assert before != stage.dump()


def named_columns(cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> dict[str, Any]:
    return {column[0]: value for column, value in zip(cursor.description, row, strict=True)}


@pytest.mark.parametrize("factory", [sqlite3.Row, named_columns])
async def test_the_user_s_row_factory_is_neither_used_nor_removed(
    stage: Stage, factory: Any
) -> None:
    leaf, parent = await stage.leaf_and_parent()
    conn: Any = stage.saver.conn  # type: ignore[attr-defined]
    conn.row_factory = factory
    for name in ("row", "metadata", "lineage", "has_writes", "surroundings", "exists"):
        await stage.call(name, stage.ref(leaf.checkpoint_id))
    assert "reclaimed" == await stage.reclaim(leaf, parent)
    assert factory is conn.row_factory


async def test_a_locked_database_is_an_error_that_changes_nothing(stage: Stage) -> None:
    leaf, parent = await stage.leaf_and_parent()
    await execute(stage, "PRAGMA busy_timeout = 0")
    with closing(sqlite3.connect(stage.where.sqlite, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        before = stage.dump()
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            await stage.reclaim(leaf, parent)
        assert not in_transaction(stage)
        other.execute("ROLLBACK")
    assert before == stage.dump()
    assert "reclaimed" == await stage.reclaim(leaf, parent)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ticks", range(12))
async def test_a_cancelled_call_has_done_all_or_nothing(
    kind: str, ticks: int, where: Where, thread_id: str
) -> None:
    async with open_stage(kind, where, thread_id, ASYNC) as stage:
        leaf, parent = await stage.leaf_and_parent()
        task = asyncio.ensure_future(stage.reclaim(leaf, parent))
        for _ in range(ticks):
            await asyncio.sleep(0)
        # On a fast machine the call may have ended before a late cancellation.
        is_cancelled = task.cancel()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        assert is_cancelled == isinstance(ended, asyncio.CancelledError) or ended == "reclaimed"
        assert not in_transaction(stage)
        is_folded = "retention" in (await stage.stored(parent.checkpoint_id)).metadata
        assert is_folded != await stage.call("exists", stage.ref(leaf.checkpoint_id))


async def test_a_blocking_call_in_the_async_saver_s_own_loop_is_an_error(
    where: Where, thread_id: str
) -> None:
    async with open_stage("asqlite", where, thread_id, ASYNC) as stage:
        leaf, parent = await stage.leaf_and_parent()
        with pytest.raises(asyncio.InvalidStateError, match="prefix 'a'"):
            stage.backend.row(stage.ref())
        with pytest.raises(asyncio.InvalidStateError, match="prefix 'a'"):
            stage.backend.reclaim(thread_id, "", leaf, parent)


async def test_a_saver_that_was_never_used_is_set_up(where: Where, thread_id: str) -> None:
    with closing(sqlite3.connect(where.sqlite, check_same_thread=False)) as conn:
        saver = SqliteSaver(conn)
        stage = Stage("sqlite", where, saver, backend_of(saver), thread_id, SYNC)
        assert await stage.call("row", stage.ref()) is None
    async with aiosqlite.connect(where.directory / "other.sqlite") as aconn:
        asaver = AsyncSqliteSaver(aconn)
        stage = Stage("asqlite", where, asaver, backend_of(asaver), thread_id, ASYNC)
        assert 0 == await stage.call("rescue", stage.ref(str(uuid6())), str(uuid6()))


async def test_a_read_only_database_from_before_task_paths_is_read(
    where: Where, thread_id: str
) -> None:
    async with open_stage("sqlite", where, thread_id, SYNC) as stage:
        leaf, _ = await stage.leaf_and_parent()
    with closing(sqlite3.connect(where.sqlite)) as conn:
        if releases.SQLITE_KEEPS_TASK_PATHS:
            conn.execute("ALTER TABLE writes DROP COLUMN task_path")
    uri = f"file:{where.sqlite}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True, check_same_thread=False)) as conn:
        saver = SqliteSaver(conn)
        stage = Stage("sqlite", where, saver, backend_of(saver), thread_id, SYNC)
        assert leaf == await stage.stored()
        assert await stage.call("has_writes", stage.ref(leaf.checkpoint_id)) is False


@pytest.mark.parametrize(("stored", "read"), [(1, True), (1, 1.0), ({"n": 1}, {"n": "1"})])
async def test_a_copy_with_degraded_values_is_another_state(
    stage: Stage, stored: Any, read: Any
) -> None:
    values = {"c": stored}
    parent_id = await stage.put(checkpoint(values), new_versions=versions_of(values))
    parent = await stage.stored(parent_id)
    found = await stage.host("get_tuple", stage.ref().config())
    degraded = cast(Checkpoint, {**found.checkpoint, "channel_values": {"c": read}})
    assert stage.backend.same_values(parent, found.checkpoint) is True
    assert stage.backend.same_values(parent, degraded) is False

    leaf_id = await stage.put(cast(Checkpoint, {**degraded, "id": str(uuid6())}), parent_id)
    leaf = await stage.stored(leaf_id)
    before = stage.dump()
    assert parent.versions == leaf.versions
    assert "versions_differ" == await stage.reclaim(leaf, parent)
    assert before == stage.dump()


async def test_a_state_with_a_number_that_is_none_can_be_reclaimed(stage: Stage) -> None:
    values = {"c": float("nan")}
    parent_id = await stage.put(checkpoint(values), new_versions=versions_of(values))
    leaf_id = await stage.put_copy(parent_id)
    leaf, parent = await stage.stored(leaf_id), await stage.stored(parent_id)
    assert "reclaimed" == await stage.reclaim(leaf, parent)


async def test_values_changed_under_the_same_versions_are_seen(stage: Stage) -> None:
    values = {"c": 1}
    parent_id = await stage.put(checkpoint(values), new_versions=versions_of(values))
    leaf_id = await stage.put_copy(parent_id)
    leaf, parent = await stage.stored(leaf_id), await stage.stored(parent_id)
    await stage.put(checkpoint({"c": 2}, checkpoint_id=parent_id))
    before = stage.dump()
    assert "versions_differ" == await stage.reclaim(leaf, parent)
    assert before == stage.dump()


async def test_a_row_without_metadata_has_none(stage: Stage) -> None:
    row_id = await stage.put(checkpoint())
    with closing(sqlite3.connect(stage.where.sqlite)) as other, other:
        other.execute("UPDATE checkpoints SET metadata = NULL")
    row: Row = await stage.stored(row_id)
    assert {} == row.metadata
    assert [] == await stage.call("lineage", stage.ref(row_id))
    assert await stage.call("fold", stage.ref(row_id), None, {"title": "t"}) is True
    assert "t" == (await stage.stored(row_id)).metadata["title"]


class OwnSerializer(SerializerProtocol):
    """A user's serializer, whose bytes only it can read."""

    def __init__(self) -> None:
        self._inner = JsonPlusSerializer()

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        return "own", self._inner.dumps_typed(obj)[1]

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        return self._inner.loads_typed(("msgpack", data[1]))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_checkpoint_of_an_unknown_form_is_refused_by_name(
    kind: str, face: Face, where: Where, thread_id: str
) -> None:
    async with open_stage(kind, where, thread_id, face, serde=OwnSerializer()) as stage:
        row_id = await stage.put(checkpoint())
        with pytest.raises(UnreadableCheckpoint, match="'own'"):
            await stage.call("row", stage.ref())
        assert await stage.call("exists", stage.ref(row_id)) is True
        assert await stage.call("fold", stage.ref(row_id), None, {"title": "t"}) is True
