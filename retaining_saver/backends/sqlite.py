"""Reach the rows of ``SqliteSaver`` and ``AsyncSqliteSaver``.

Each operation is a generator of statements. The two savers run them by an executor each; the
other face of each saver goes through its own executor from another thread.

The tables: ``checkpoints`` holds the whole checkpoint with its values as ``(type, checkpoint)``
and the metadata as JSON text; ``writes`` holds the pending writes. There are no blobs.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager
from typing import Any, ClassVar, cast

import aiosqlite
from langgraph.checkpoint.base import BaseCheckpointSaver, Checkpoint
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

from retaining_saver._steps import Steps, arun, call, run
from retaining_saver.backends import moves
from retaining_saver.backends.base import NEIGHBOURS, Movable, ReclaimOutcome, Row, Surroundings
from retaining_saver.backends.chains import along_parents
from retaining_saver.backends.clones import clone
from retaining_saver.backends.opaque import body_of, is_due, read_checkpoint, stored_channels
from retaining_saver.backends.sqlite_statements import (
    READING,
    WRITING,
    Bounds,
    Params,
    Statements,
    T,
    arun_statements,
    atransact,
    atransaction,
    dump_metadata,
    load_metadata,
    run_statements,
    transact,
    transaction,
)
from retaining_saver.backends.sqlite_threads import SqliteThreads
from retaining_saver.folds import HISTORY_MAPS, LEGACY_MARKER, folded_into, reclaimed_ids
from retaining_saver.records import Ref

_NAMESPACE = "thread_id = :thread_id AND checkpoint_ns = :ns"
_NAMED = f"{_NAMESPACE} AND checkpoint_id = :id"
_OLDER = f"{_NAMESPACE} AND checkpoint_id < :id ORDER BY checkpoint_id DESC LIMIT {NEIGHBOURS}"
_NEWER = f"{_NAMESPACE} AND checkpoint_id > :id ORDER BY checkpoint_id LIMIT {NEIGHBOURS}"
_COLUMNS = "checkpoint_id, parent_checkpoint_id, type, checkpoint, metadata"

# UNION without ALL ends a cycle; CROSS JOIN keeps each step one look-up by primary key.
_RECORDS_RUNS = " OR ".join(
    f"""instr(CAST(c.metadata AS TEXT), '"{name}"')""" for name in (*HISTORY_MAPS, LEGACY_MARKER)
)
_LINEAGE = f"""
WITH RECURSIVE line (id, parent) AS (
    SELECT checkpoint_id, parent_checkpoint_id FROM checkpoints WHERE {_NAMED}
    UNION
    SELECT c.checkpoint_id, c.parent_checkpoint_id
    FROM line CROSS JOIN checkpoints AS c ON c.checkpoint_id = line.parent
    WHERE {_NAMESPACE}
)
SELECT line.id, line.parent, CASE WHEN {_RECORDS_RUNS} THEN c.metadata END
FROM line CROSS JOIN checkpoints AS c ON c.checkpoint_id = line.id
WHERE {_NAMESPACE}
"""


def _no_child(side: str) -> str:
    # The subquery walks the primary key; parents have no index of their own.
    near = f"SELECT parent_checkpoint_id FROM checkpoints WHERE {side}"
    return f"NOT EXISTS (SELECT 1 FROM ({near}) WHERE parent_checkpoint_id = :id)"


# Why a leaf may go, in the order in which a refusal is explained. The deleting statement holds
# all of it.
_PROOF: tuple[tuple[ReclaimOutcome, str], ...] = (
    ("superseded", f"EXISTS (SELECT 1 FROM checkpoints WHERE {_NAMED})"),
    (
        "parent_missing",
        f"EXISTS (SELECT 1 FROM checkpoints WHERE {_NAMESPACE} AND checkpoint_id = :parent)",
    ),
    (
        "versions_differ",
        f"""EXISTS (SELECT 1 FROM checkpoints WHERE {_NAMED} AND parent_checkpoint_id = :parent
            AND type IS :type AND checkpoint IS :checkpoint)""",
    ),
    (
        "versions_differ",
        f"""EXISTS (SELECT 1 FROM checkpoints WHERE {_NAMESPACE} AND checkpoint_id = :parent
            AND type IS :parent_type AND checkpoint IS :parent_checkpoint)""",
    ),
    (
        "superseded",
        f"""(NOT :only_head OR NOT EXISTS (SELECT 1 FROM checkpoints WHERE {_NAMESPACE}
            AND checkpoint_id > :id))""",
    ),
    ("superseded", _no_child(_OLDER)),
    ("superseded", _no_child(_NEWER)),
    (
        "has_writes",
        f"""NOT EXISTS (SELECT 1 FROM writes WHERE {_NAMED}
            AND task_id NOT IN (SELECT value FROM json_each(:moving)))""",
    ),
    (
        "has_writes",
        f"""(:moving = '[]' OR NOT EXISTS (SELECT 1 FROM writes WHERE {_NAMESPACE}
            AND checkpoint_id = :parent))""",
    ),
)
_CONDITIONS = [condition for _, condition in _PROOF]
_DELETE = f"DELETE FROM checkpoints WHERE {_NAMED} AND {' AND '.join(_CONDITIONS)}"
_WHY = f"SELECT {', '.join(_CONDITIONS)}"


def _id(ref: Ref) -> str:
    return ref.checkpoint_id or ""


def _params(ref: Ref, **others: Any) -> Params:
    return {
        "thread_id": ref.thread_id,
        "ns": ref.checkpoint_ns,
        "id": ref.checkpoint_id,
        **others,
    }


def _find(columns: str, ref: Ref) -> Statements[tuple[Any, ...] | None]:
    which = _NAMED if ref.checkpoint_id else f"{_NAMESPACE} ORDER BY checkpoint_id DESC LIMIT 1"
    found = yield f"SELECT {columns} FROM checkpoints WHERE {which}", _params(ref)
    return found.rows[0] if found.rows else None


def _find_metadata(ref: Ref) -> Statements[tuple[str, dict[str, Any]] | None]:
    found = yield from _find("checkpoint_id, metadata", ref)
    return None if found is None else (found[0], load_metadata(found[1]))


def _follow_parents(ref: Ref) -> Statements[list[tuple[str, dict[str, Any]]]]:
    found = yield _LINEAGE, _params(ref)
    links = {
        checkpoint_id: (parent_id, metadata) for checkpoint_id, parent_id, metadata in found.rows
    }
    chain = along_parents(ref.checkpoint_id, links)
    return [(i, load_metadata(metadata)) for i, metadata in chain if metadata is not None]


def _probe(table: str, where: str, params: Params) -> Statements[bool]:
    found = yield f"SELECT EXISTS (SELECT 1 FROM {table} WHERE {where})", params
    return bool(found.rows[0][0])


def _look_around(ref: Ref, but: str | None) -> Statements[Surroundings]:
    newer = f"{_NAMESPACE} AND checkpoint_id > :id AND checkpoint_id IS NOT :but"
    found = yield (
        f"""SELECT EXISTS (SELECT 1 FROM writes WHERE {_NAMED}),
            EXISTS (SELECT 1 FROM checkpoints WHERE {newer})""",
        _params(ref, but=but),
    )
    has_writes, has_newer = found.rows[0]
    return Surroundings(bool(has_writes), bool(has_newer))


def _find_reclaimer(ref: Ref) -> Statements[str | None]:
    for side in (_OLDER, _NEWER):
        near = yield f"SELECT checkpoint_id, metadata FROM checkpoints WHERE {side}", _params(ref)
        for checkpoint_id, metadata in near.rows:
            if ref.checkpoint_id in reclaimed_ids(checkpoint_id, load_metadata(metadata)):
                return str(checkpoint_id)
    return None


def _fold(target: Ref, leaf_id: str | None, leaf: Mapping[str, Any]) -> Statements[bool]:
    stored = yield f"SELECT metadata FROM checkpoints WHERE {_NAMED}", _params(target)
    if not stored.rows:
        return False
    folded = folded_into(load_metadata(stored.rows[0][0]), _id(target), leaf, leaf_id)
    yield (
        f"UPDATE checkpoints SET metadata = :metadata WHERE {_NAMED}",
        _params(target, metadata=dump_metadata(folded)),
    )
    return True


def _reclaim(
    ref: Ref, leaf: Row, parent: Row, only_head: bool, movable: Movable
) -> Statements[ReclaimOutcome]:
    """Delete first, under the whole proof: then a refusal has nothing to take back."""
    if refused := moves.mismatch(leaf, parent):
        return refused
    stored = yield f"SELECT metadata FROM checkpoints WHERE {_NAMED}", _params(ref)
    tasks = yield f"SELECT DISTINCT task_id FROM writes WHERE {_NAMED}", _params(ref)
    moving = moves.planned_moves(
        (task_id for (task_id,) in tasks.rows), leaf.checkpoint_id, parent.checkpoint_id, movable
    )
    params = _params(
        ref,
        parent=parent.checkpoint_id,
        only_head=only_head,
        moving=json.dumps(list(moving)),
        type=leaf.token[0],
        checkpoint=leaf.token[1],
        parent_type=parent.token[0],
        parent_checkpoint=parent.token[1],
    )
    deleted = yield _DELETE, params
    if not deleted.changed:
        holds = yield _WHY, params
        return _first_refusal(holds.rows[0])
    for task_id, moved in moving.items():
        yield from _move_writes(ref, parent.checkpoint_id, task_id, moved)
    yield from _fold(
        ref.at(parent.checkpoint_id), leaf.checkpoint_id, load_metadata(stored.rows[0][0])
    )
    return "reclaimed"


def _first_refusal(holds: tuple[Any, ...]) -> ReclaimOutcome:
    for (why, _), held in zip(_PROOF, holds, strict=True):
        if not held:
            return why
    return "superseded"  # By something that has gone again between the two statements.


def _rescue(leaf: Ref, parent_id: str) -> Statements[int]:
    is_stored = yield from _probe("checkpoints", _NAMED, _params(leaf))
    has_parent = yield from _probe("checkpoints", _NAMED, _params(leaf.at(parent_id)))
    if is_stored or not has_parent:
        return 0
    children = yield (
        f"""UPDATE checkpoints SET parent_checkpoint_id = :parent WHERE {_NAMESPACE}
            AND checkpoint_id > :id AND parent_checkpoint_id = :id""",
        _params(leaf, parent=parent_id),
    )
    count = children.changed
    tasks = yield f"SELECT DISTINCT task_id FROM writes WHERE {_NAMED}", _params(leaf)
    for (task_id,) in tasks.rows:
        moved = moves.rescued_task_id(task_id, _id(leaf), parent_id)
        count += yield from _move_writes(leaf, parent_id, task_id, moved)
    return count


def _move_writes(ref: Ref, parent_id: str, task_id: str, moved: str) -> Statements[int]:
    """Move writes as ``put_writes`` would have stored them: an ordinary one never replaces."""
    params = _params(ref, parent=parent_id, task_id=task_id, moved=moved)
    which = f"{_NAMED} AND task_id = :task_id"
    change = f"writes SET checkpoint_id = :parent, task_id = :moved WHERE {which}"
    special = yield f"UPDATE OR REPLACE {change} AND idx < 0", params
    ordinary = yield f"UPDATE OR IGNORE {change}", params
    yield f"DELETE FROM writes WHERE {which}", params
    return special.changed + ordinary.changed


class _AnySqliteBackend(SqliteThreads):
    """Everything that the two savers share; a subclass runs the statements."""

    locks_listings: ClassVar[bool] = True

    def __init__(self, saver: BaseCheckpointSaver[Any]) -> None:
        self._serde = saver.serde

    def _read(self, statements: Statements[T]) -> T:
        raise NotImplementedError

    async def _aread(self, statements: Statements[T]) -> T:
        raise NotImplementedError

    def _write(self, statements: Statements[T], own: Bounds = WRITING) -> T:
        raise NotImplementedError

    async def _awrite(self, statements: Statements[T], own: Bounds = WRITING) -> T:
        raise NotImplementedError

    def row(self, ref: Ref) -> Row | None:
        return self._row(self._read(_find(_COLUMNS, ref)))

    async def arow(self, ref: Ref) -> Row | None:
        return self._row(await self._aread(_find(_COLUMNS, ref)))

    def metadata(self, ref: Ref) -> tuple[str, dict[str, Any]] | None:
        return self._read(_find_metadata(ref))

    async def ametadata(self, ref: Ref) -> tuple[str, dict[str, Any]] | None:
        return await self._aread(_find_metadata(ref))

    def lineage(self, ref: Ref) -> list[tuple[str, dict[str, Any]]]:
        return self._read(_follow_parents(ref))

    async def alineage(self, ref: Ref) -> list[tuple[str, dict[str, Any]]]:
        return await self._aread(_follow_parents(ref))

    def has_writes(self, ref: Ref) -> bool:
        return self._read(_probe("writes", _NAMED, _params(ref)))

    async def ahas_writes(self, ref: Ref) -> bool:
        return await self._aread(_probe("writes", _NAMED, _params(ref)))

    def surroundings(self, ref: Ref, *, but: str | None = None) -> Surroundings:
        return self._read(_look_around(ref, but))

    async def asurroundings(self, ref: Ref, *, but: str | None = None) -> Surroundings:
        return await self._aread(_look_around(ref, but))

    def exists(self, ref: Ref) -> bool:
        return self._read(_probe("checkpoints", _NAMED, _params(ref)))

    async def aexists(self, ref: Ref) -> bool:
        return await self._aread(_probe("checkpoints", _NAMED, _params(ref)))

    def reclaimed_into(self, ref: Ref) -> str | None:
        return self._read(_find_reclaimer(ref))

    async def areclaimed_into(self, ref: Ref) -> str | None:
        return await self._aread(_find_reclaimer(ref))

    def same_values(self, row: Row, checkpoint: Checkpoint) -> bool:
        stored = self._serde.dumps_typed(checkpoint)
        return body_of(read_checkpoint(stored, self._serde)) == row.body

    def fold(self, target: Ref, leaf_id: str | None, metadata: Mapping[str, Any]) -> bool:
        return self._write(_fold(target, leaf_id, metadata))

    async def afold(self, target: Ref, leaf_id: str | None, metadata: Mapping[str, Any]) -> bool:
        return await self._finish(_fold(target, leaf_id, metadata))

    def reclaim(
        self,
        thread_id: str,
        checkpoint_ns: str,
        leaf: Row,
        parent: Row,
        *,
        only_head: bool = True,
        movable: Movable = Movable(),
    ) -> ReclaimOutcome:
        ref = Ref(thread_id, checkpoint_ns, leaf.checkpoint_id)
        return self._write(_reclaim(ref, leaf, parent, only_head, movable))

    async def areclaim(
        self,
        thread_id: str,
        checkpoint_ns: str,
        leaf: Row,
        parent: Row,
        *,
        only_head: bool = True,
        movable: Movable = Movable(),
    ) -> ReclaimOutcome:
        ref = Ref(thread_id, checkpoint_ns, leaf.checkpoint_id)
        return await self._finish(_reclaim(ref, leaf, parent, only_head, movable))

    def rescue(self, leaf: Ref, parent_id: str) -> int:
        return self._write(_rescue(leaf, parent_id))

    async def arescue(self, leaf: Ref, parent_id: str) -> int:
        return await self._finish(_rescue(leaf, parent_id))

    async def _finish(self, statements: Statements[T], own: Bounds = WRITING) -> T:
        # A cancelled caller waits for the transaction's end: none may outlive its call.
        return await arun(call(self._write, self._awrite, statements, own))

    def _row(self, found: tuple[Any, ...] | None) -> Row | None:
        if found is None:
            return None
        checkpoint_id, parent_id, kind, checkpoint, stored = found
        body = body_of(read_checkpoint((kind, checkpoint), self._serde))
        is_waiting = is_due(stored_channels(body))
        metadata, token = load_metadata(stored), (kind, checkpoint)
        return Row(checkpoint_id, parent_id or None, metadata, body, is_waiting, token)


class SqliteBackend(_AnySqliteBackend):
    """The adapter to ``SqliteSaver``. Its async face runs in another thread."""

    def __init__(self, saver: BaseCheckpointSaver[Any]) -> None:
        super().__init__(saver)
        self._saver = cast(SqliteSaver, saver)

    def on_snapshot(self, operation: Callable[[BaseCheckpointSaver[Any]], Steps[T]]) -> T:
        with self._cursor() as cursor, transaction(cursor, READING):
            return run(operation(clone(self._saver, lock=threading.Lock())))

    async def aon_snapshot(self, operation: Callable[[BaseCheckpointSaver[Any]], Steps[T]]) -> T:
        return await asyncio.to_thread(self.on_snapshot, operation)

    def _read(self, statements: Statements[T]) -> T:
        with self._cursor() as cursor:
            return run_statements(cursor, statements)

    async def _aread(self, statements: Statements[T]) -> T:
        return await asyncio.to_thread(self._read, statements)

    def _write(self, statements: Statements[T], own: Bounds = WRITING) -> T:
        with self._cursor() as cursor:
            return transact(cursor, statements, own)

    async def _awrite(self, statements: Statements[T], own: Bounds = WRITING) -> T:
        return await asyncio.to_thread(self._write, statements, own)

    @contextmanager
    def _cursor(self) -> Iterator[sqlite3.Cursor]:
        # Not the saver's own cursor(): that one commits, also after an error.
        with self._saver.lock:
            self._saver.setup()
            with closing(self._saver.conn.cursor()) as cursor:
                cursor.row_factory = None  # The user's factory is for the user's rows.
                yield cursor


class AsyncSqliteBackend(_AnySqliteBackend):
    """The adapter to ``AsyncSqliteSaver``. Its sync face waits for the saver's loop."""

    def __init__(self, saver: BaseCheckpointSaver[Any]) -> None:
        super().__init__(saver)
        self._saver = cast(AsyncSqliteSaver, saver)

    def on_snapshot(self, operation: Callable[[BaseCheckpointSaver[Any]], Steps[T]]) -> T:
        return self._block(self.aon_snapshot(operation))

    async def aon_snapshot(self, operation: Callable[[BaseCheckpointSaver[Any]], Steps[T]]) -> T:
        async with self._cursor() as cursor, atransaction(self._saver.conn, cursor, READING):
            return await arun(operation(clone(self._saver, lock=asyncio.Lock())))

    def _read(self, statements: Statements[T]) -> T:
        return self._block(self._aread(statements))

    async def _aread(self, statements: Statements[T]) -> T:
        async with self._cursor() as cursor:
            return await arun_statements(cursor, statements)

    def _write(self, statements: Statements[T], own: Bounds = WRITING) -> T:
        return self._block(self._awrite(statements, own))

    async def _awrite(self, statements: Statements[T], own: Bounds = WRITING) -> T:
        async with self._cursor() as cursor:
            return await atransact(self._saver.conn, cursor, statements, own)

    @asynccontextmanager
    async def _cursor(self) -> AsyncIterator[aiosqlite.Cursor]:
        await self._saver.setup()  # Before the lock, which it takes itself.
        async with self._saver.lock, self._saver.conn.cursor() as cursor:
            cursor.row_factory = None  # The user's factory is for the user's rows.
            yield cursor

    def _block(self, work: Coroutine[Any, Any, T]) -> T:
        if _running_loop() is self._saver.loop:
            work.close()
            raise asyncio.InvalidStateError(
                "A blocking call was made in the loop of an AsyncSqliteSaver, which it would wait "
                "for without end. Await the method with the prefix 'a', or call from a thread."
            )
        return asyncio.run_coroutine_threadsafe(work, self._saver.loop).result()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
