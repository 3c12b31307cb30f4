"""Whole threads of the SQLite savers: read for the planner, rewritten by a plan, copied.

A checkpoint's blob holds its values, so it is read structurally and a page at a time; nothing
but a summary is kept of it. A carrier's seed is spliced from one blob into another without the
value's class.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

from langgraph.checkpoint.serde.base import SerializerProtocol

from retaining_saver.backends import rewriting
from retaining_saver.backends import sqlite_plain as plain
from retaining_saver.backends.opaque import (
    DELTA_SNAPSHOT,
    Opaque,
    UnreadableCheckpoint,
    fingerprint_of,
    is_msgpack,
    pack_checkpoint,
    read_checkpoint,
    stored_channels,
)
from retaining_saver.backends.retention import CHUNK, Applied, StorageStats
from retaining_saver.backends.sqlite_statements import (
    READING,
    WRITING,
    Bounds,
    Params,
    Statements,
    dump_metadata,
    load_metadata,
)
from retaining_saver.entries import (
    ERROR,
    INTERRUPT,
    NULL_TASK_ID,
    RESUME,
    OrphanWrites,
    StoredThread,
    ThreadRecords,
    Writes,
)
from retaining_saver.folds import adds_history
from retaining_saver.planned import Carry, Graft, RetentionPlan, Rollback

T = TypeVar("T")
Key = tuple[str, str]  # checkpoint_ns, checkpoint_id
Matches = Callable[[Mapping[str, Any]], bool]

PAGE_BYTES = 256 * 1024
"""How much serialized state is read at once; a larger checkpoint is read alone."""
METADATA_AT_ONCE = 50
"""How many checkpoints' metadata are folded at once; each may hold a map of every run."""

_THREAD = "thread_id = :thread_id"
_NAMED = f"{_THREAD} AND checkpoint_ns = :ns AND checkpoint_id = :id"
_LISTED = f"""{_THREAD} AND checkpoint_ns = :ns
    AND checkpoint_id IN (SELECT value FROM json_each(:ids))"""
# The length of a metadata text would be its number of characters.
_SIZE = "LENGTH(checkpoint) + LENGTH(CAST(metadata AS BLOB))"
_IN_PAGE = "IN (SELECT value FROM json_each(:page))"
# One of ``rewriting.Taken``, as a JSON array.
_TAKEN = [f"json_extract(t.value, '$[{n}]')" for n in range(5)]
_SAME_CHECKPOINT = """w.thread_id = c.thread_id AND w.checkpoint_ns = c.checkpoint_ns
    AND w.checkpoint_id = c.checkpoint_id"""


# Reading.


def _stored(
    thread_id: str, serde: SerializerProtocol, matches: Matches
) -> Statements[StoredThread]:
    reading = _Reading(ThreadRecords(thread_id, matches=matches), serde)
    sizes = yield (
        f"SELECT rowid, {_SIZE} FROM checkpoints WHERE {_THREAD} ORDER BY rowid",
        {"thread_id": thread_id},
    )
    for page in _pages(sizes.rows):
        yield from _read_page(reading, thread_id, page)
    orphans = yield (
        f"""SELECT checkpoint_ns, checkpoint_id, COUNT(*) FROM writes AS w WHERE {_THREAD}
            AND NOT EXISTS (SELECT 1 FROM checkpoints AS c WHERE {_SAME_CHECKPOINT})
            GROUP BY checkpoint_ns, checkpoint_id""",
        {"thread_id": thread_id},
    )
    return reading.thread([OrphanWrites(*row) for row in orphans.rows])


def _pages(sizes: Iterable[tuple[int, int | None]]) -> Iterator[str]:
    page: list[int] = []
    total = 0
    for rowid, size in sizes:
        if page and (total + (size or 0) > PAGE_BYTES or len(page) == CHUNK):
            yield json.dumps(page)
            page, total = [], 0
        page.append(rowid)
        total += size or 0
    if page:
        yield json.dumps(page)


def _read_page(reading: _Reading, thread_id: str, page: str) -> Statements[None]:
    written = yield (
        f"""SELECT w.checkpoint_ns, w.checkpoint_id, w.task_id, w.channel
            FROM checkpoints AS c CROSS JOIN writes AS w ON {_SAME_CHECKPOINT}
            WHERE c.rowid {_IN_PAGE} ORDER BY w.rowid""",
        {"page": page},
    )
    writes: dict[Key, list[tuple[str, str]]] = {}
    for ns, checkpoint_id, task_id, channel in written.rows:
        writes.setdefault((ns, checkpoint_id), []).append((task_id, channel))
    found = yield (
        f"""SELECT checkpoint_ns, checkpoint_id, parent_checkpoint_id, type, checkpoint, metadata
            FROM checkpoints WHERE rowid {_IN_PAGE}""",
        {"page": page},
    )
    for ns, checkpoint_id, parent_id, kind, checkpoint, stored in found.rows:
        metadata = load_metadata(stored)
        above = None
        if (
            parent_id
            and metadata.get("source") == "update"
            and adds_history(checkpoint_id, metadata)
        ):
            parents = yield from _find_metadata(thread_id, [(ns, parent_id)])
            above = parents.get((ns, parent_id))
        summary = Writes.of(writes.get((ns, checkpoint_id), ()))
        reading.add((ns, checkpoint_id), parent_id, (kind, checkpoint), metadata, above, summary)


def _find_metadata(thread_id: str, keys: Iterable[Key]) -> Statements[dict[Key, dict[str, Any]]]:
    by_ns: dict[str, list[str]] = {}
    for ns, checkpoint_id in keys:
        by_ns.setdefault(ns, []).append(checkpoint_id)
    metadata: dict[Key, dict[str, Any]] = {}
    for ns, ids in by_ns.items():
        found = yield (
            f"SELECT checkpoint_id, metadata FROM checkpoints WHERE {_LISTED}",
            {"thread_id": thread_id, "ns": ns, "ids": json.dumps(ids)},
        )
        metadata.update({(ns, checkpoint_id): load_metadata(m) for checkpoint_id, m in found.rows})
    return metadata


def _params(thread_id: str, key: Key, **others: Any) -> Params:
    return {"thread_id": thread_id, "ns": key[0], "id": key[1], **others}


@dataclass(slots=True)
class _Reading:
    """A thread as far as it has been read.

    ``fixed`` are the checkpoints whose values could not be spliced into a carrier.
    """

    records: ThreadRecords
    serde: SerializerProtocol
    problems: list[str] = field(default_factory=list)
    fixed: dict[Key, str] = field(default_factory=dict)

    def add(
        self,
        key: Key,
        parent_id: str | None,
        stored: tuple[str, bytes],
        metadata: Mapping[str, Any],
        parent_metadata: Mapping[str, Any] | None,
        writes: Writes,
    ) -> None:
        """Add one checkpoint, or a sentence on why it cannot be read."""
        try:
            body = read_checkpoint(stored, self.serde)
            same_state = fingerprint_of(body)
        except UnreadableCheckpoint as error:
            self.problems.append(f"Checkpoint {key[1]}: {error}")
            return
        values: Mapping[str, Opaque] = body.get("channel_values") or {}
        if not is_msgpack(stored[0]):
            self.fixed[key] = stored[0]
        self.records.add(
            *key,
            parent_id,
            metadata=metadata,
            parent_metadata=lambda: parent_metadata,
            body=body,
            ts=body.get("ts"),
            stored=stored_channels(body),
            snapshots=[c for c, value in values.items() if value.code == DELTA_SNAPSHOT],
            fingerprint=same_state,
            writes=writes,
        )

    def thread(self, orphans: Iterable[OrphanWrites]) -> StoredThread:
        """Return everything that was read."""
        thread = self.records.thread(orphan_writes=orphans)
        return replace(thread, problems=(*self.problems, *self._unmovable(thread)))

    def _unmovable(self, thread: StoredThread) -> Iterator[str]:
        if not self.fixed:
            return
        delta: dict[str, set[str]] = {}
        for c in thread.checkpoints:
            delta.setdefault(c.checkpoint_ns, set()).update(c.counted, c.snapshots)
        for c in thread.checkpoints:
            kind = self.fixed.get((c.checkpoint_ns, c.checkpoint_id))
            if kind and c.stored & delta[c.checkpoint_ns]:
                yield (
                    f"Checkpoint {c.checkpoint_id} stores a delta channel's value as {kind!r}, "
                    f"which cannot be moved to another checkpoint without the value's class."
                )


# Applying.


class _Undone(Exception):
    """Ends the transaction of a dry run."""

    def __init__(self, applied: Applied) -> None:
        super().__init__("A dry run is undone")
        self.applied = applied


def _apply(
    thread: StoredThread, plan: RetentionPlan, serde: SerializerProtocol, dry_run: bool
) -> Statements[Applied | None]:
    before = yield from _unchanged(thread, plan)
    if before is None:
        return None
    if not plan.changes:
        return Applied(before, before)
    yield from _rewrite(thread.thread_id, plan, serde)
    applied = Applied(before, (yield from _stats(thread.thread_id)))
    if dry_run:
        raise _Undone(applied)
    return applied


def _unchanged(thread: StoredThread, plan: RetentionPlan) -> Statements[StorageStats | None]:
    """Measure the thread if it is the planned one. A broken one is not compared."""
    params = {"thread_id": thread.thread_id}
    found = yield (
        f"""SELECT checkpoint_ns, checkpoint_id, parent_checkpoint_id, {_SIZE}
            FROM checkpoints WHERE {_THREAD}""",
        params,
    )
    written = yield (
        f"""SELECT checkpoint_ns, checkpoint_id, COUNT(*), SUM(LENGTH(value))
            FROM writes WHERE {_THREAD} GROUP BY checkpoint_ns, checkpoint_id""",
        params,
    )
    counts = {(ns, checkpoint_id): rows for ns, checkpoint_id, rows, _ in written.rows}
    stored = {
        (ns, checkpoint_id): (parent_id or None, counts.get((ns, checkpoint_id), 0))
        for ns, checkpoint_id, parent_id, _ in found.rows
    }
    planned = {
        (c.checkpoint_ns, c.checkpoint_id): (c.parent_id, c.writes.rows) for c in thread.checkpoints
    }
    if stored != planned and not plan.refused:
        return None
    return StorageStats(
        {"checkpoints": len(stored), "writes": sum(counts.values()), "blobs": 0},
        {
            "checkpoints": sum(size or 0 for *_, size in found.rows),
            "writes": sum(size or 0 for *_, size in written.rows),
            "blobs": 0,
        },
    )


def _stats(thread_id: str) -> Statements[StorageStats]:
    rows, sizes = {"blobs": 0}, {"blobs": 0}
    for table, size in (("checkpoints", _SIZE), ("writes", "LENGTH(value)")):
        found = yield (
            f"SELECT COUNT(*), IFNULL(SUM({size}), 0) FROM {table} WHERE {_THREAD}",
            {"thread_id": thread_id},
        )
        rows[table], sizes[table] = found.rows[0]
    return StorageStats(rows, sizes)


def _rewrite(thread_id: str, plan: RetentionPlan, serde: SerializerProtocol) -> Statements[None]:
    """Do what the plan says: what moves comes first, then what goes."""
    if plan.delete_thread:
        for table in ("checkpoints", "writes"):
            yield f"DELETE FROM {table} WHERE {_THREAD}", {"thread_id": thread_id}
        return
    yield from _fold(thread_id, plan)
    has_paths = bool(plan.carry) and (yield from _has_task_paths())
    for carry in plan.carry:
        yield from _add_carrier(thread_id, carry, serde, has_paths)
    for graft in plan.graft:
        yield from _graft(thread_id, graft)
    for rollback in plan.rollback:
        yield from _roll_back(thread_id, rollback)
    yield from _delete(thread_id, "checkpoints", plan.drop)
    yield from _delete(thread_id, "writes", (*plan.drop, *plan.orphans))


def _fold(thread_id: str, plan: RetentionPlan) -> Statements[None]:
    """Fold a few at a time: a thread's history maps together may be large."""
    foldings: dict[Key, rewriting.Folding] = {}
    for few in _chunks(plan.fold, METADATA_AT_ONCE):
        new = {(fold.checkpoint_ns, fold.into) for fold in few} - foldings.keys()
        found = yield from _find_metadata(
            thread_id, {*new, *((fold.checkpoint_ns, fold.checkpoint_id) for fold in few)}
        )
        for ns, into in new:
            foldings[ns, into] = rewriting.Folding(into, found[ns, into], plan.keep_runs)
        for fold in few:
            dropped = found[fold.checkpoint_ns, fold.checkpoint_id]
            foldings[fold.checkpoint_ns, fold.into].add(fold, dropped)
    for key, folding in foldings.items():
        yield (
            f"UPDATE checkpoints SET metadata = :metadata WHERE {_NAMED}",
            _params(thread_id, key, metadata=dump_metadata(folding.metadata())),
        )


def _has_task_paths() -> Statements[bool]:
    # Tables made before langgraph-checkpoint-sqlite 3.1.2 lack it until such a saver sets up.
    found = yield "SELECT 1 FROM pragma_table_info('writes') WHERE name = 'task_path'", {}
    return bool(found.rows)


def _add_carrier(
    thread_id: str, carry: Carry, serde: SerializerProtocol, has_paths: bool
) -> Statements[None]:
    ns = carry.checkpoint_ns
    versions: dict[str, Any] = {}
    values: dict[str, Opaque] = {}
    newest = (*carry.children[:1], *carry.sources)[-1]
    ts = ""
    for source in dict.fromkeys((*carry.seeds.values(), newest)):
        body = yield from _find_body(thread_id, (ns, source), serde)
        for channel in (c for c, seeding in carry.seeds.items() if seeding == source):
            versions[channel] = body["channel_versions"][channel]
            values[channel] = body["channel_values"][channel]
        if source == newest:
            ts = body["ts"]
    checkpoint = rewriting.carrier_checkpoint(carry, ts, versions, values)
    # Without a seed nothing stored tells that the saver's serializer reads msgpack.
    pack = pack_checkpoint if values else _dumped
    kind, packed = pack(checkpoint, serde)
    yield (
        """INSERT INTO checkpoints (thread_id, checkpoint_ns, checkpoint_id,
            parent_checkpoint_id, type, checkpoint, metadata)
            VALUES (:thread_id, :ns, :id, :parent, :type, :checkpoint, :metadata)""",
        _params(
            thread_id,
            (ns, carry.checkpoint_id),
            parent=carry.parent_id,
            type=kind,
            checkpoint=packed,
            metadata=dump_metadata(rewriting.carrier_metadata(carry)),
        ),
    )
    yield from _take_writes(thread_id, carry, has_paths)


def _dumped(checkpoint: Mapping[str, Any], serde: SerializerProtocol) -> tuple[str, bytes]:
    return serde.dumps_typed(dict(checkpoint))


def _find_body(thread_id: str, key: Key, serde: SerializerProtocol) -> Statements[dict[str, Any]]:
    found = yield (
        f"SELECT type, checkpoint FROM checkpoints WHERE {_NAMED}",
        _params(thread_id, key),
    )
    return read_checkpoint(found.rows[0], serde)


def _take_writes(thread_id: str, carry: Carry, has_paths: bool) -> Statements[None]:
    tasks: dict[str, set[tuple[str, str]]] = {}
    for ids in _chunks(carry.sources):
        found = yield (
            f"SELECT DISTINCT checkpoint_id, task_id, channel FROM writes WHERE {_LISTED}",
            {"thread_id": thread_id, "ns": carry.checkpoint_ns, "ids": json.dumps(ids)},
        )
        for source, task_id, channel in found.rows:
            tasks.setdefault(source, set()).add((task_id, channel))

    def tasks_at(source: str, channels: tuple[str, ...]) -> set[str]:
        return {task_id for task_id, channel in tasks.get(source, ()) if channel in channels}

    taken = list(rewriting.taken_rows(carry, tasks_at))
    if not has_paths:
        taken = rewriting.ordered_by_task(taken)
    name, value = (", task_path", f", {_TAKEN[4]} || w.task_path") if has_paths else ("", "")
    rows = [[t.source, t.task_id, t.new_task_id, t.channels, t.prefix] for t in taken]
    for chunk in _chunks(rows):
        yield (
            f"""INSERT INTO writes (thread_id, checkpoint_ns, checkpoint_id, task_id, idx,
                    channel, type, value{name})
                SELECT w.thread_id, w.checkpoint_ns, :id, {_TAKEN[2]}, w.idx,
                    w.channel, w.type, w.value{value}
                FROM json_each(:taken) AS t CROSS JOIN writes AS w
                    ON w.thread_id = :thread_id AND w.checkpoint_ns = :ns
                    AND w.checkpoint_id = {_TAKEN[0]}
                    AND w.task_id = {_TAKEN[1]}
                WHERE w.channel IN (SELECT value FROM json_each(t.value, '$[3]'))""",
            _params(thread_id, (carry.checkpoint_ns, carry.checkpoint_id), taken=json.dumps(chunk)),
        )


def _graft(thread_id: str, graft: Graft) -> Statements[None]:
    key = (graft.checkpoint_ns, graft.checkpoint_id)
    yield (
        f"UPDATE checkpoints SET parent_checkpoint_id = :parent WHERE {_NAMED}",
        _params(thread_id, key, parent=graft.parent_id),
    )
    if graft.moves_writes and graft.parent_id:
        moved = (graft.checkpoint_ns, graft.moves_writes)
        yield (
            f"UPDATE writes SET checkpoint_id = :parent WHERE {_NAMED}",
            _params(thread_id, moved, parent=graft.parent_id),
        )


def _roll_back(thread_id: str, rollback: Rollback) -> Statements[None]:
    key = (rollback.checkpoint_ns, rollback.checkpoint_id)
    yield (
        f"""DELETE FROM writes WHERE {_NAMED} AND (:tasks IS NULL OR channel = :resume
            OR task_id = :null_task OR (channel NOT IN (:interrupt, :error)
                AND task_id IN (SELECT value FROM json_each(:tasks))))""",
        _params(
            thread_id,
            key,
            tasks=None if rollback.tasks is None else json.dumps(rollback.tasks),
            resume=RESUME,
            null_task=NULL_TASK_ID,
            interrupt=INTERRUPT,
            error=ERROR,
        ),
    )


def _delete(thread_id: str, table: str, entries: Iterable[Any]) -> Statements[None]:
    by_ns: dict[str, list[str]] = {}
    for entry in entries:
        by_ns.setdefault(entry.checkpoint_ns, []).append(entry.checkpoint_id)
    for ns, ids in by_ns.items():
        for chunk in _chunks(ids):
            yield (
                f"DELETE FROM {table} WHERE {_LISTED}",
                {"thread_id": thread_id, "ns": ns, "ids": json.dumps(chunk)},
            )


def _chunks(items: Iterable[T], size: int = CHUNK) -> Iterator[list[T]]:
    remaining = iter(items)
    while chunk := list(islice(remaining, size)):
        yield chunk


# Other whole threads.


def _threads_of_runs(run_ids: Sequence[str]) -> Statements[list[str]]:
    """Look for the names as text, then into the metadata: a name may stand elsewhere in it."""
    wanted, found = set(run_ids), dict[str, None]()
    texts = [json.dumps(run_id, ensure_ascii=False)[1:-1] for run_id in wanted]
    params = {"texts": json.dumps(texts), "after": -(1 << 63)}
    while texts:
        page = yield (
            """SELECT rowid, thread_id, metadata FROM checkpoints WHERE rowid > :after
                AND EXISTS (SELECT 1 FROM json_each(:texts)
                    WHERE instr(CAST(metadata AS TEXT), value))
                ORDER BY rowid LIMIT 50""",
            params,
        )
        if not page.rows:
            break
        for rowid, thread_id, metadata in page.rows:
            params["after"] = rowid
            run_id = load_metadata(metadata).get("run_id")
            if run_id is not None and str(run_id) in wanted:
                found[thread_id] = None
    return list(found)


def _copy(
    source: str, target: str, latest: RetentionPlan | None, serde: SerializerProtocol
) -> Statements[bool]:
    there = yield from _stats(target)
    if any(there.rows.values()):
        return False
    if latest is not None:
        ids = f"SELECT checkpoint_ns, checkpoint_id FROM checkpoints WHERE {_THREAD}"
        stored = yield ids, {"thread_id": source}
        rewriting.require(latest, stored.rows)
    for table in ("checkpoints", "writes"):
        columns = yield f"SELECT name FROM pragma_table_info('{table}')", {}
        others = ", ".join(_quoted(name) for (name,) in columns.rows if name != "thread_id")
        yield (
            f"""INSERT INTO {table} (thread_id, {others})
                SELECT :target, {others} FROM {table} WHERE thread_id = :source ORDER BY rowid""",
            {"source": source, "target": target},
        )
    if latest is not None:
        yield from _rewrite(target, latest, serde)
    return True


def _quoted(name: str) -> str:
    doubled = name.replace('"', '""')
    return f'"{doubled}"'


class SqliteThreads:
    """The whole-thread half of the adapter to the SQLite savers."""

    _serde: SerializerProtocol

    def _write(self, statements: Statements[T], own: Bounds = WRITING) -> T:
        raise NotImplementedError

    async def _finish(self, statements: Statements[T], own: Bounds = WRITING) -> T:
        raise NotImplementedError

    def stored(self, thread_id: str, matches: Matches) -> StoredThread:
        return self._write(_stored(thread_id, self._serde, matches), READING)

    async def astored(self, thread_id: str, matches: Matches) -> StoredThread:
        return await self._finish(_stored(thread_id, self._serde, matches), READING)

    def apply(
        self, thread: StoredThread, plan: RetentionPlan, *, dry_run: bool = False
    ) -> Applied | None:
        try:
            return self._write(_apply(thread, plan, self._serde, dry_run), _bounds(plan))
        except _Undone as undone:
            return undone.applied

    async def aapply(
        self, thread: StoredThread, plan: RetentionPlan, *, dry_run: bool = False
    ) -> Applied | None:
        try:
            return await self._finish(_apply(thread, plan, self._serde, dry_run), _bounds(plan))
        except _Undone as undone:
            return undone.applied

    def is_plain(self, thread_id: str) -> bool:
        return self._write(plain.head_of_plain(thread_id, self._serde), READING) is not None

    async def ais_plain(self, thread_id: str) -> bool:
        head = await self._finish(plain.head_of_plain(thread_id, self._serde), READING)
        return head is not None

    def cut_plain(self, thread_id: str) -> int | None:
        return self._write(plain.cut(thread_id, self._serde))

    async def acut_plain(self, thread_id: str) -> int | None:
        return await self._finish(plain.cut(thread_id, self._serde))

    def threads_of_runs(self, run_ids: Sequence[str]) -> list[str]:
        return self._write(_threads_of_runs(run_ids), READING)

    async def athreads_of_runs(self, run_ids: Sequence[str]) -> list[str]:
        return await self._finish(_threads_of_runs(run_ids), READING)

    def copy_thread(self, source: str, target: str, latest: RetentionPlan | None) -> bool:
        return self._write(_copy(source, target, latest, self._serde))

    async def acopy_thread(self, source: str, target: str, latest: RetentionPlan | None) -> bool:
        return await self._finish(_copy(source, target, latest, self._serde))


def _bounds(plan: RetentionPlan) -> Bounds:
    # A plan that changes nothing needs no other writer to wait.
    return WRITING if plan.changes else READING
