"""The statements that apply a plan to a thread of a Postgres saver, or to a copy of one.

Statements that name many rows name their smallest and largest id as well. The primary key is then
the cheapest way to them even where the server takes the thread for a small one, and all chunks
together pass over the thread once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from psycopg.types.json import Jsonb

from retaining_saver.backends import rewriting
from retaining_saver.backends.postgres_sessions import Command, Rows, Statements, Undo, streamed
from retaining_saver.backends.retention import CHUNK, TABLES, Applied, StorageStats
from retaining_saver.entries import StoredThread
from retaining_saver.errors import PlanRefused
from retaining_saver.planned import Carry, Entry, Graft, RetentionPlan, Rollback

Key = tuple[str, str]  # checkpoint_ns, checkpoint_id
Seed = tuple[str, str]  # channel, source

_LINKS = """
SELECT checkpoint_ns, checkpoint_id, parent_checkpoint_id FROM checkpoints
WHERE thread_id = %(thread)s
"""
_COUNTS = """
SELECT checkpoint_ns, checkpoint_id, count(*) FROM checkpoint_writes
WHERE thread_id = %(thread)s
GROUP BY checkpoint_ns, checkpoint_id
"""
_STATS = """
SELECT 'checkpoints', count(*), COALESCE(sum(
    octet_length(checkpoint::text) + octet_length(metadata::text)
), 0)::bigint FROM checkpoints WHERE thread_id = %(thread)s
UNION ALL
SELECT 'writes', count(*), COALESCE(sum(octet_length(blob)), 0)::bigint
FROM checkpoint_writes WHERE thread_id = %(thread)s
UNION ALL
SELECT 'blobs', count(*), COALESCE(sum(octet_length(blob)), 0)::bigint
FROM checkpoint_blobs WHERE thread_id = %(thread)s
"""

_IN_NAMESPACE = "thread_id = %(thread)s AND checkpoint_ns = %(ns)s"
_ONE = f"{_IN_NAMESPACE} AND checkpoint_id = %(id)s"


def _within(column: str, ids: str) -> str:
    """Bound a column by the least and the greatest of an array, as the server orders them."""
    return (
        f"{column} BETWEEN (SELECT min(i) FROM unnest({ids}) AS u (i)) "
        f"AND (SELECT max(i) FROM unnest({ids}) AS u (i))"
    )


_IDS = "%(ids)s::text[]"
_SEVERAL = f"{_IN_NAMESPACE} AND {_within('checkpoint_id', _IDS)} AND checkpoint_id = ANY({_IDS})"

# Locked in the order of ids, as everywhere.
_METADATA = f"""
SELECT checkpoint_id, metadata::text FROM checkpoints WHERE {_SEVERAL}
ORDER BY checkpoint_id FOR UPDATE
"""
_SET_METADATA = f"UPDATE checkpoints SET metadata = %(metadata)s WHERE {_ONE}"

_GRAFT = f"""
UPDATE checkpoints AS c SET parent_checkpoint_id = g.parent
FROM unnest({_IDS}, %(parents)s::text[]) AS g (id, parent)
WHERE {_IN_NAMESPACE} AND {_within("checkpoint_id", _IDS)} AND checkpoint_id = g.id
"""
_MOVE_WRITES = f"UPDATE checkpoint_writes SET checkpoint_id = %(to)s WHERE {_ONE}"

_TIMES = f"SELECT checkpoint_id, checkpoint ->> 'ts' FROM checkpoints WHERE {_SEVERAL}"
_SEEDS = f"""
SELECT s.id, s.channel, (c.checkpoint -> 'channel_versions' -> s.channel)::text,
    (c.checkpoint -> 'channel_values' -> s.channel)::text
FROM unnest(%(channels)s::text[], {_IDS}) AS s (channel, id)
CROSS JOIN LATERAL (
    SELECT checkpoint FROM checkpoints WHERE {_IN_NAMESPACE} AND checkpoint_id = s.id LIMIT 1
) AS c
"""
_TASKS = f"SELECT DISTINCT checkpoint_id, task_id, channel FROM checkpoint_writes WHERE {_SEVERAL}"
_PUT = f"""
INSERT INTO checkpoints
    (thread_id, checkpoint_ns, checkpoint_id, parent_checkpoint_id, checkpoint, metadata)
SELECT %(thread)s, %(ns)s, c.id, c.parent, c.checkpoint, c.metadata
FROM unnest(
    {_IDS}, %(parents)s::text[], %(checkpoints)s::jsonb[], %(metadata)s::jsonb[]
) AS c (id, parent, checkpoint, metadata)
"""
# `OFFSET 0` keeps the server from making a join of it.
_TAKE = f"""
INSERT INTO checkpoint_writes
    (thread_id, checkpoint_ns, checkpoint_id, task_id, task_path, idx, channel, type, blob)
SELECT %(thread)s, %(ns)s, t.carrier, t.becomes, t.prefix || w.task_path,
    w.idx, w.channel, w.type, w.blob
FROM unnest(
    %(carriers)s::text[], {_IDS}, %(was)s::text[], %(becomes)s::text[], %(prefixes)s::text[],
    %(channels)s::jsonb[]
) AS t (carrier, source, was, becomes, prefix, channels)
CROSS JOIN LATERAL (
    SELECT task_path, idx, channel, type, blob FROM checkpoint_writes
    WHERE {_IN_NAMESPACE} AND checkpoint_id = t.source AND task_id = t.was
    AND t.channels ? channel
    OFFSET 0
) AS w
"""

_ROWS = f"SELECT DISTINCT task_id, channel FROM checkpoint_writes WHERE {_ONE}"
_UNDO_WRITES = f"""
DELETE FROM checkpoint_writes WHERE {_ONE} AND (task_id, channel) IN (
    SELECT * FROM unnest(%(tasks)s::text[], %(channels)s::text[])
)
"""

_DELETE_THREAD = tuple(
    f"DELETE FROM {table} WHERE thread_id = %(thread)s"
    for table in ("checkpoints", "checkpoint_writes", "checkpoint_blobs")
)
_DELETE_WRITES = f"DELETE FROM checkpoint_writes WHERE {_SEVERAL}"
_DELETE_ORPHANS = f"""
DELETE FROM checkpoint_writes AS w WHERE {_SEVERAL} AND NOT EXISTS (
    SELECT 1 FROM checkpoints AS c
    WHERE c.thread_id = w.thread_id AND c.checkpoint_ns = w.checkpoint_ns
    AND c.checkpoint_id = w.checkpoint_id
)
"""
_DELETE_CHECKPOINTS = f"""
WITH gone AS (
    DELETE FROM checkpoints WHERE {_SEVERAL}
    RETURNING checkpoint -> 'channel_versions' AS versions
)
SELECT DISTINCT u.channel, gone.versions ->> u.channel
FROM gone CROSS JOIN unnest(%(channels)s::text[]) AS u (channel)
WHERE gone.versions ? u.channel
"""
_CHANNELS = "SELECT DISTINCT channel FROM checkpoint_blobs WHERE thread_id = %(thread)s"
_REFERENCES = f"""
SELECT DISTINCT u.channel, c.checkpoint -> 'channel_versions' ->> u.channel
FROM checkpoints AS c CROSS JOIN unnest(%(channels)s::text[]) AS u (channel)
WHERE {_IN_NAMESPACE} AND c.checkpoint -> 'channel_versions' ? u.channel
"""
_DELETE_BLOBS = f"""
DELETE FROM checkpoint_blobs WHERE {_IN_NAMESPACE} AND channel = %(channel)s
AND {_within("version", "%(versions)s::text[]")} AND version = ANY(%(versions)s::text[])
"""

# Of these namespaces nothing stays, so that a pair of one's name and another's id harms nobody.
_NAMESPACES = "%(namespaces)s::text[]"
_OF_EMPTIED = f"""
thread_id = %(thread)s AND {_within("checkpoint_ns", _NAMESPACES)}
AND checkpoint_ns = ANY({_NAMESPACES})
"""
_EMPTY = tuple(
    f"DELETE FROM {table} WHERE {_OF_EMPTIED} AND checkpoint_id = ANY({_IDS})"
    for table in ("checkpoint_writes", "checkpoints")
)
_EMPTY_BLOBS = f"""
DELETE FROM checkpoint_blobs AS b WHERE {_OF_EMPTIED} AND NOT EXISTS (
    SELECT 1 FROM checkpoints AS c
    WHERE c.thread_id = b.thread_id AND c.checkpoint_ns = b.checkpoint_ns
)
"""

_IS_EMPTY = """
SELECT NOT EXISTS (SELECT 1 FROM checkpoints WHERE thread_id = %(thread)s)
    AND NOT EXISTS (SELECT 1 FROM checkpoint_writes WHERE thread_id = %(thread)s)
    AND NOT EXISTS (SELECT 1 FROM checkpoint_blobs WHERE thread_id = %(thread)s)
"""
# Every column of the row but one, whichever columns a release of the saver has.
_COPY = tuple(
    f"""
    INSERT INTO {table} SELECT copied.* FROM {table} AS original
    CROSS JOIN LATERAL jsonb_populate_record(
        original, jsonb_build_object('thread_id', %(target)s::text)
    ) AS copied
    WHERE original.thread_id = %(thread)s
    """
    for table in ("checkpoint_blobs", "checkpoint_writes", "checkpoints")
)


def applied(thread: StoredThread, plan: RetentionPlan, dry_run: bool) -> Statements[Applied | None]:
    """Do what the plan says if the thread is still the one planned."""
    thread_id = thread.thread_id
    if not (yield from _is_still(thread)):
        raise Undo(None)
    before = yield from _stats(thread_id)
    if not plan.changes:
        return Applied(before, before)
    yield from _change(thread_id, plan)
    done = Applied(before, (yield from _stats(thread_id)))
    if dry_run:
        raise Undo(done)
    return done


def copied(source: str, target: str, latest: RetentionPlan | None) -> Statements[bool]:
    """Copy every row, and apply ``latest`` to the copy."""
    rows = yield _IS_EMPTY, {"thread": target}
    if not rows[0][0]:
        raise Undo(False)
    for sql in _COPY:
        yield Command(sql), {"thread": source, "target": target}
    if latest is not None:
        yield from _require(target, latest)
        yield from _change(target, latest)
    return True


# Looking.


def _is_still(thread: StoredThread) -> Statements[bool]:
    parameters = {"thread": thread.thread_id}
    counts: dict[Key, int] = {}

    def count(rows: Rows) -> None:
        counts.update(((ns, checkpoint_id), rows) for ns, checkpoint_id, rows in rows)

    yield from streamed(_COUNTS, parameters, count)
    planned = {(c.checkpoint_ns, c.checkpoint_id): c for c in thread.checkpoints}
    others: list[Key] = []

    def compare(rows: Rows) -> None:
        for ns, checkpoint_id, parent_id in rows:
            key = (ns, checkpoint_id)
            was = planned.pop(key, None)
            same = was is not None and was.parent_id == (parent_id or None)
            if was is None or not same or was.writes.rows != counts.get(key, 0):
                others.append(key)

    yield from streamed(_LINKS, parameters, compare)
    return not planned and not others


def _require(thread_id: str, plan: RetentionPlan) -> Statements[None]:
    """Refuse a plan for checkpoints that are gone by now."""
    missing = {(e.checkpoint_ns, e.checkpoint_id) for e in (*plan.keep, *plan.drop)}
    yield from streamed(
        _LINKS,
        {"thread": thread_id},
        lambda rows: missing.difference_update((ns, i) for ns, i, _ in rows),
    )
    if missing:
        raise PlanRefused(
            f"Thread {plan.thread_id} lost {len(missing)} checkpoints while it was to be copied. "
            "Nothing was copied; try again."
        )


def _stats(thread_id: str) -> Statements[StorageStats]:
    rows = yield _STATS, {"thread": thread_id}
    found = {table: (count, size) for table, count, size in rows}
    return StorageStats(
        {table: found[table][0] for table in TABLES}, {table: found[table][1] for table in TABLES}
    )


# Changing.


def _change(thread_id: str, plan: RetentionPlan) -> Statements[None]:
    if plan.delete_thread:
        for sql in _DELETE_THREAD:
            yield Command(sql), {"thread": thread_id}
        return
    yield from _fold(thread_id, plan)
    for ns, carries in groupby(plan.carry, key=_namespace):
        for some in _small_groups(carries):
            yield from _carry({"thread": thread_id, "ns": ns}, some)
    for ns, grafts in groupby(plan.graft, key=_namespace):
        for chunk in _chunks(list(grafts)):
            yield from _graft(thread_id, ns, chunk)
    for rollback in plan.rollback:
        yield from _roll_back(thread_id, rollback)
    yield from _delete(thread_id, plan)


def _namespace(entry: Entry) -> str:
    return entry.checkpoint_ns


def _chunks(items: Sequence[Any], size: int = CHUNK) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _fold(thread_id: str, plan: RetentionPlan) -> Statements[None]:
    # Run history is older or newer than its target's: one folding takes it all, chunk after chunk.
    foldings: dict[Key, rewriting.Folding] = {}
    for ns, folds in groupby(plan.fold, key=_namespace):
        for chunk in _chunks(list(folds), CHUNK // 2):  # Each names two.
            new = {fold.into for fold in chunk if (ns, fold.into) not in foldings}
            ids = new | {fold.checkpoint_id for fold in chunk}
            read = yield from _metadata(thread_id, ns, ids)
            for into in new:
                foldings[ns, into] = rewriting.Folding(into, read[ns, into], plan.keep_runs)
            for fold in chunk:
                foldings[ns, fold.into].add(fold, read[ns, fold.checkpoint_id])
    for (ns, into), folding in foldings.items():
        metadata = _json(folding.metadata())
        yield (
            Command(_SET_METADATA),
            {"thread": thread_id, "ns": ns, "id": into, "metadata": metadata},
        )


def _metadata(thread_id: str, ns: str, ids: Iterable[str]) -> Statements[dict[Key, dict[str, Any]]]:
    rows = yield _METADATA, {"thread": thread_id, "ns": ns, "ids": sorted(ids)}
    return {(ns, checkpoint_id): json.loads(metadata) for checkpoint_id, metadata in rows}


def _json(value: Mapping[str, Any]) -> Jsonb:
    # Our own dumps: the user may have given the connection others.
    return Jsonb(value, dumps=json.dumps)


def _small_groups(carries: Iterable[Carry]) -> Iterator[list[Carry]]:
    """Group carriers that together name no more than ``CHUNK`` sources, or single ones."""
    group: list[Carry] = []
    sources = 0
    for carry in carries:
        sources += len(carry.sources) + 1
        if group and sources > CHUNK:
            yield group
            group, sources = [], len(carry.sources) + 1
        group.append(carry)
    if group:
        yield group


def _carry(place: dict[str, Any], carries: Sequence[Carry]) -> Statements[None]:
    newest = {c.checkpoint_id: (*c.children[:1], *c.sources)[-1] for c in carries}
    rows = yield _TIMES, {**place, "ids": list(newest.values())}
    times = {row[0]: row[1] for row in rows}
    versions, values = yield from _seeds(place, carries)
    checkpoints = [
        rewriting.carrier_checkpoint(
            carry,
            times[newest[carry.checkpoint_id]],
            {seed[0]: versions[seed] for seed in carry.seeds.items()},
            {seed[0]: values[seed] for seed in carry.seeds.items() if seed in values},
        )
        for carry in carries
    ]
    yield (
        Command(_PUT),
        {
            **place,
            "ids": [carry.checkpoint_id for carry in carries],
            "parents": [carry.parent_id for carry in carries],
            "checkpoints": [json.dumps(checkpoint) for checkpoint in checkpoints],
            "metadata": [json.dumps(rewriting.carrier_metadata(carry)) for carry in carries],
        },
    )
    yield from _take_writes(place, carries)


def _seeds(
    place: dict[str, Any], carries: Iterable[Carry]
) -> Statements[tuple[dict[Seed, Any], dict[Seed, Any]]]:
    """Read the version of each seed and, where it is inline, its value or its mark."""
    versions: dict[Seed, Any] = {}
    values: dict[Seed, Any] = {}
    wanted = list(dict.fromkeys(seed for carry in carries for seed in carry.seeds.items()))
    for some in _chunks(wanted):
        channels, ids = [channel for channel, _ in some], [source for _, source in some]
        rows = yield _SEEDS, {**place, "channels": channels, "ids": ids}
        for source, channel, version, value in rows:
            versions[channel, source] = json.loads(version)
            if value is not None:
                values[channel, source] = json.loads(value)
    return versions, values


def _take_writes(place: dict[str, Any], carries: Sequence[Carry]) -> Statements[None]:
    tasks: dict[str, list[tuple[str, str]]] = {}
    for ids in _chunks(list(dict.fromkeys(i for carry in carries for i in carry.sources))):
        for source, task_id, channel in (yield _TASKS, {**place, "ids": list(ids)}):
            tasks.setdefault(source, []).append((task_id, channel))

    def tasks_at(source: str, channels: tuple[str, ...]) -> set[str]:
        return {task_id for task_id, channel in tasks.get(source, ()) if channel in channels}

    taken = [(c.checkpoint_id, t) for c in carries for t in rewriting.taken_rows(c, tasks_at)]
    for some in _chunks(taken):
        yield (
            Command(_TAKE),
            {
                **place,
                "carriers": [carrier for carrier, _ in some],
                "ids": [rows.source for _, rows in some],
                "was": [rows.task_id for _, rows in some],
                "becomes": [rows.new_task_id for _, rows in some],
                "prefixes": [rows.prefix for _, rows in some],
                "channels": [json.dumps(rows.channels) for _, rows in some],
            },
        )


def _graft(thread_id: str, ns: str, grafts: Sequence[Graft]) -> Statements[None]:
    place = {"thread": thread_id, "ns": ns}
    yield (
        Command(_GRAFT),
        {
            **place,
            "ids": [graft.checkpoint_id for graft in grafts],
            "parents": [graft.parent_id for graft in grafts],
        },
    )
    for graft in grafts:
        if graft.moves_writes and graft.parent_id:
            yield Command(_MOVE_WRITES), {**place, "id": graft.moves_writes, "to": graft.parent_id}


def _roll_back(thread_id: str, rollback: Rollback) -> Statements[None]:
    named = {
        "thread": thread_id,
        "ns": rollback.checkpoint_ns,
        "id": rollback.checkpoint_id,
    }
    rows = yield _ROWS, named
    gone = [
        (task, channel) for task, channel in rows if rewriting.is_undone(rollback, task, channel)
    ]
    tasks, channels = [task for task, _ in gone], [channel for _, channel in gone]
    yield Command(_UNDO_WRITES), {**named, "tasks": tasks, "channels": channels}


# Deleting.


def _delete(thread_id: str, plan: RetentionPlan) -> Statements[None]:
    kept = {entry.checkpoint_ns for entry in plan.keep}
    channels = yield from channels_of(thread_id)
    emptied: list[Entry] = []
    for ns, entries in groupby(plan.drop, key=_namespace):
        if ns in kept:
            yield from thin(thread_id, ns, [e.checkpoint_id for e in entries], channels)
        else:
            emptied += entries
    yield from _empty(thread_id, emptied)
    for ns, entries in groupby(plan.orphans, key=_namespace):
        for ids in _chunks([e.checkpoint_id for e in entries]):
            yield Command(_DELETE_ORPHANS), {"thread": thread_id, "ns": ns, "ids": ids}


def channels_of(thread_id: str) -> Statements[list[str]]:
    """Name the channels that have blobs."""
    rows = yield _CHANNELS, {"thread": thread_id}
    return [row[0] for row in rows]


def thin(thread_id: str, ns: str, ids: Sequence[str], channels: Sequence[str]) -> Statements[None]:
    """Delete some checkpoints of a namespace, with their writes and what only they refer to."""
    place = {"thread": thread_id, "ns": ns}
    freed: dict[str, set[str]] = {}
    for chunk in _chunks(sorted(ids)):
        named = {**place, "ids": chunk, "channels": channels}
        yield Command(_DELETE_WRITES), named
        for channel, version in (yield _DELETE_CHECKPOINTS, named):
            freed.setdefault(channel, set()).add(version)

    def spare(rows: Rows) -> None:
        for channel, version in rows:
            freed[channel].discard(version)

    if freed:
        yield from streamed(_REFERENCES, {**place, "channels": list(freed)}, spare)
    for channel, versions in freed.items():
        for some in _chunks(sorted(versions)):
            yield Command(_DELETE_BLOBS), {**place, "channel": channel, "versions": some}


def _empty(thread_id: str, entries: Sequence[Entry]) -> Statements[None]:
    """Delete namespaces of which nothing stays."""
    for chunk in _chunks(entries):
        named = {
            "thread": thread_id,
            "namespaces": list(dict.fromkeys(e.checkpoint_ns for e in chunk)),
            "ids": [e.checkpoint_id for e in chunk],
        }
        for sql in _EMPTY:
            yield Command(sql), named
    for chunk in _chunks(list(dict.fromkeys(e.checkpoint_ns for e in entries))):
        yield Command(_EMPTY_BLOBS), {"thread": thread_id, "namespaces": chunk}
