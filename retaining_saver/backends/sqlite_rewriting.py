"""Rewrite a thread of a SQLite saver by a plan, in statements.

A carrier's seed is spliced from one blob into another without the value's class.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar

from langgraph.checkpoint.serde.base import SerializerProtocol

from retaining_saver.backends import rewriting
from retaining_saver.backends.opaque import Opaque, pack_checkpoint, read_checkpoint
from retaining_saver.backends.retention import CHUNK, Applied, StorageStats
from retaining_saver.backends.sqlite_statements import (
    Params,
    Statements,
    dump_metadata,
    load_metadata,
)
from retaining_saver.entries import StoredThread
from retaining_saver.planned import Carry, Graft, RetentionPlan, Rollback

T = TypeVar("T")
Key = tuple[str, str]  # checkpoint_ns, checkpoint_id

METADATA_AT_ONCE = 50
"""How many checkpoints' metadata are folded at once; each may hold a map of every run."""

THREAD = "thread_id = :thread_id"
NAMED = f"{THREAD} AND checkpoint_ns = :ns AND checkpoint_id = :id"
_LISTED = f"""{THREAD} AND checkpoint_ns = :ns
    AND checkpoint_id IN (SELECT value FROM json_each(:ids))"""
# The length of a metadata text would be its number of characters.
SIZE = "LENGTH(checkpoint) + LENGTH(CAST(metadata AS BLOB))"
# One of ``rewriting.Taken``, as a JSON array.
_TAKEN = [f"json_extract(t.value, '$[{n}]')" for n in range(5)]


class Undone(Exception):
    """Ends the transaction of a dry run; ``applied`` is what it would have done."""

    def __init__(self, applied: Applied) -> None:
        super().__init__("A dry run is undone")
        self.applied = applied


def applied(
    thread: StoredThread, plan: RetentionPlan, serde: SerializerProtocol, dry_run: bool
) -> Statements[Applied | None]:
    """Apply a plan to the thread that it was made for; see ``RetentionBackend.apply``.

    A dry run raises ``Undone``.
    """
    before = yield from _unchanged(thread, plan)
    if before is None:
        return None
    if not plan.changes:
        return Applied(before, before)
    yield from _rewrite(thread.thread_id, plan, serde)
    done = Applied(before, (yield from _stats(thread.thread_id)))
    if dry_run:
        raise Undone(done)
    return done


def _unchanged(thread: StoredThread, plan: RetentionPlan) -> Statements[StorageStats | None]:
    """Measure the thread if it is the planned one. A broken one is not compared."""
    params = {"thread_id": thread.thread_id}
    found = yield (
        f"""SELECT checkpoint_ns, checkpoint_id, parent_checkpoint_id, {SIZE}
            FROM checkpoints WHERE {THREAD}""",
        params,
    )
    written = yield (
        f"""SELECT checkpoint_ns, checkpoint_id, COUNT(*), SUM(LENGTH(value))
            FROM writes WHERE {THREAD} GROUP BY checkpoint_ns, checkpoint_id""",
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
    for table, size in (("checkpoints", SIZE), ("writes", "LENGTH(value)")):
        found = yield (
            f"SELECT COUNT(*), IFNULL(SUM({size}), 0) FROM {table} WHERE {THREAD}",
            {"thread_id": thread_id},
        )
        rows[table], sizes[table] = found.rows[0]
    return StorageStats(rows, sizes)


def _rewrite(thread_id: str, plan: RetentionPlan, serde: SerializerProtocol) -> Statements[None]:
    """Do what the plan says: what moves comes first, then what goes."""
    if plan.delete_thread:
        for table in ("checkpoints", "writes"):
            yield f"DELETE FROM {table} WHERE {THREAD}", {"thread_id": thread_id}
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
        found = yield from find_metadata(
            thread_id, {*new, *((fold.checkpoint_ns, fold.checkpoint_id) for fold in few)}
        )
        for ns, into in new:
            foldings[ns, into] = rewriting.Folding(into, found[ns, into], plan.keep_runs)
        for fold in few:
            dropped = found[fold.checkpoint_ns, fold.checkpoint_id]
            foldings[fold.checkpoint_ns, fold.into].add(fold, dropped)
    for key, folding in foldings.items():
        yield (
            f"UPDATE checkpoints SET metadata = :metadata WHERE {NAMED}",
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
        f"SELECT type, checkpoint FROM checkpoints WHERE {NAMED}",
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

    taken = rewriting.taken_rows(carry, tasks_at)
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
        f"UPDATE checkpoints SET parent_checkpoint_id = :parent WHERE {NAMED}",
        _params(thread_id, key, parent=graft.parent_id),
    )
    if graft.moves_writes and graft.parent_id:
        moved = (graft.checkpoint_ns, graft.moves_writes)
        yield (
            f"UPDATE writes SET checkpoint_id = :parent WHERE {NAMED}",
            _params(thread_id, moved, parent=graft.parent_id),
        )


def _roll_back(thread_id: str, rollback: Rollback) -> Statements[None]:
    key = (rollback.checkpoint_ns, rollback.checkpoint_id)
    found = yield (
        f"SELECT DISTINCT task_id, channel FROM writes WHERE {NAMED}",
        _params(thread_id, key),
    )
    gone = [
        [task, channel]
        for task, channel in found.rows
        if rewriting.is_undone(rollback, task, channel)
    ]
    yield (
        f"""DELETE FROM writes WHERE {NAMED} AND (task_id, channel) IN (
            SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]')
            FROM json_each(:gone))""",
        _params(thread_id, key, gone=json.dumps(gone)),
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


def find_metadata(thread_id: str, keys: Iterable[Key]) -> Statements[dict[Key, dict[str, Any]]]:
    """Read the metadata of those checkpoints that are stored."""
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


def copied(
    source: str, target: str, latest: RetentionPlan | None, serde: SerializerProtocol
) -> Statements[bool]:
    """Copy a thread's rows; see ``RetentionBackend.copy_thread``."""
    there = yield from _stats(target)
    if any(there.rows.values()):
        return False
    if latest is not None:
        ids = f"SELECT checkpoint_ns, checkpoint_id FROM checkpoints WHERE {THREAD}"
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
