"""Whole threads of a Postgres saver: read for the planner, and the front of what rewrites them.

What is read comes in a few streams, each through a cursor in the server: a whole thread is never
in memory, nor is any value. The planner's estimate of how many rows a thread has is worst for the
largest threads, so nothing here joins two sets of one thread's rows: single rows are looked up by
their key, and `LIMIT 1` says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from psycopg.errors import DeadlockDetected, SerializationFailure, UniqueViolation

from retaining_saver._steps import Steps, arun, call, run
from retaining_saver.backends import postgres_rewriting as rewriting
from retaining_saver.backends.postgres_sessions import Rows, Session, Statements, streamed
from retaining_saver.backends.retention import CHUNK, Applied
from retaining_saver.entries import (
    BRANCH,
    ERROR,
    INTERRUPT,
    NO_WRITES,
    NULL_TASK_ID,
    SENDS,
    START,
    OrphanWrites,
    StoredThread,
    ThreadRecords,
    Writes,
)
from retaining_saver.folds import HISTORY_MAPS, MARK
from retaining_saver.planned import RetentionPlan

Key = tuple[str, str]  # checkpoint_ns, checkpoint_id
Matches = Callable[[Mapping[str, Any]], bool]
HoldsTasks = Callable[["str | None", "bytes | None"], bool]

ATTEMPTS = 4
"""How often a transaction is begun that the server refuses to serialize."""
_REFUSALS = (SerializationFailure, DeadlockDetected, UniqueViolation)

_CHANNELS = """
SELECT DISTINCT channel FROM checkpoint_blobs
WHERE thread_id = %(thread)s AND type <> 'empty'
"""

_WRITES = """
SELECT checkpoint_ns, checkpoint_id, count(*), array_agg(DISTINCT channel),
    array_agg(DISTINCT task_id) FILTER (WHERE channel = %(interrupt)s),
    array_agg(DISTINCT task_id) FILTER (WHERE channel = %(error)s),
    bool_or(task_id = %(null_task)s)
FROM checkpoint_writes WHERE thread_id = %(thread)s
GROUP BY checkpoint_ns, checkpoint_id
"""

# `held` are the channels with a blob of their version. What is inline under the same name is the
# mark of a snapshot or a copy's doing, and no part of the state: the fingerprint is taken of what
# `row` calls the body. Null counts as a value only where a node waits for it. Before checkpoint
# format 4 the sends are writes on the parent. The parent's metadata is read only where a row
# records runs and does not say what it is.
_CHECKPOINTS = f"""
SELECT c.checkpoint_ns, c.checkpoint_id, c.parent_checkpoint_id, c.metadata::text,
    CASE WHEN c.metadata ->> 'source' = 'update' AND c.metadata ?| %(maps)s
        AND c.metadata -> '{MARK}' ->> 'id' IS DISTINCT FROM c.checkpoint_id
    THEN (
        SELECT p.metadata::text FROM checkpoints AS p
        WHERE p.thread_id = c.thread_id AND p.checkpoint_ns = c.checkpoint_ns
        AND p.checkpoint_id = c.parent_checkpoint_id
        LIMIT 1
    ) END,
    (c.checkpoint ->> 'v')::int, c.checkpoint ->> 'ts',
    part.versions ->> '{START}',
    ARRAY(SELECT jsonb_object_keys(part.versions)),
    blobs.held, inlined.held, inlined.true,
    (c.checkpoint ->> 'v')::int < 4 AND COALESCE((
        SELECT true FROM checkpoint_writes AS w
        WHERE w.thread_id = c.thread_id AND w.checkpoint_ns = c.checkpoint_ns
        AND w.checkpoint_id = c.parent_checkpoint_id AND w.channel = '{SENDS}'
        LIMIT 1
    ), false),
    tasks.type, tasks.blob,
    md5((CASE WHEN c.checkpoint -> 'channel_values' IS DISTINCT FROM part.values - blobs.held
        THEN jsonb_set(c.checkpoint, '{{channel_values}}', part.values - blobs.held)
        ELSE c.checkpoint
    END - '{{id,ts}}'::text[])::text)
FROM checkpoints AS c
CROSS JOIN LATERAL (
    SELECT COALESCE(NULLIF(c.checkpoint -> 'channel_versions', 'null'), '{{}}') AS versions,
        COALESCE(NULLIF(c.checkpoint -> 'channel_values', 'null'), '{{}}') AS values
) AS part
CROSS JOIN LATERAL (
    SELECT ARRAY(
        SELECT u.channel FROM unnest(%(channels)s::text[]) AS u (channel)
        WHERE (
            SELECT b.type FROM checkpoint_blobs AS b
            WHERE b.thread_id = c.thread_id AND b.checkpoint_ns = c.checkpoint_ns
            AND b.channel = u.channel AND b.version = part.versions ->> u.channel
            LIMIT 1
        ) <> 'empty'
    ) AS held
) AS blobs
CROSS JOIN LATERAL (
    SELECT array_agg(i.key) FILTER (
            WHERE i.value <> 'null' OR i.key = '{START}' OR starts_with(i.key, '{BRANCH}')
        ) AS held,
        array_agg(i.key) FILTER (WHERE i.value = 'true') AS true
    FROM jsonb_each(part.values) AS i
) AS inlined
LEFT JOIN LATERAL (
    SELECT b.type,
        CASE WHEN octet_length(b.blob) <= %(small)s THEN b.blob END AS blob
    FROM checkpoint_blobs AS b
    WHERE b.thread_id = c.thread_id AND b.checkpoint_ns = c.checkpoint_ns
    AND b.channel = '{SENDS}' AND b.version = part.versions ->> '{SENDS}'
    LIMIT 1
) AS tasks ON true
WHERE c.thread_id = %(thread)s
"""

_THREADS_OF_RUNS = """
SELECT DISTINCT thread_id FROM checkpoints WHERE metadata ->> 'run_id' = ANY(%(runs)s)
"""


class PostgresThreads:
    """The whole-thread half of the adapter to the Postgres savers.

    Everything is done on one snapshot (REPEATABLE READ), so what a run stores meanwhile is neither
    seen nor deleted; in a transaction that the user opened, the user's isolation level counts.
    What the server refuses to serialize ``ATTEMPTS`` times raises the driver's exception.
    """

    _session: Session
    _holds_tasks: HoldsTasks

    def stored(self, thread_id: str, matches: Matches) -> StoredThread:
        reading = _stored(thread_id, matches, self._holds_tasks)
        return self._session.read(reading, snapshot=True)

    async def astored(self, thread_id: str, matches: Matches) -> StoredThread:
        reading = _stored(thread_id, matches, self._holds_tasks)
        return await self._session.aread(reading, snapshot=True)

    def apply(
        self, thread: StoredThread, plan: RetentionPlan, *, dry_run: bool = False
    ) -> Applied | None:
        return run(_serialized(self._session, lambda: rewriting.applied(thread, plan, dry_run)))

    async def aapply(
        self, thread: StoredThread, plan: RetentionPlan, *, dry_run: bool = False
    ) -> Applied | None:
        steps = _serialized(self._session, lambda: rewriting.applied(thread, plan, dry_run))
        return await arun(steps)

    def threads_of_runs(self, run_ids: Sequence[str]) -> list[str]:
        return self._session.read(_threads_of_runs(run_ids), snapshot=True)

    async def athreads_of_runs(self, run_ids: Sequence[str]) -> list[str]:
        return await self._session.aread(_threads_of_runs(run_ids), snapshot=True)

    def copy_thread(self, source: str, target: str, latest: RetentionPlan | None) -> bool:
        return run(_serialized(self._session, lambda: rewriting.copied(source, target, latest)))

    async def acopy_thread(self, source: str, target: str, latest: RetentionPlan | None) -> bool:
        steps = _serialized(self._session, lambda: rewriting.copied(source, target, latest))
        return await arun(steps)


def _serialized(session: Session, statements: Callable[[], Statements[Any]]) -> Steps[Any]:
    """Write on one snapshot; begin again where another transaction was in the way."""
    for _ in range(ATTEMPTS - 1):
        try:
            return (yield from call(session.write, session.awrite, statements(), snapshot=True))
        except _REFUSALS:
            continue  # The next snapshot sees what was in the way.
    return (yield from call(session.write, session.awrite, statements(), snapshot=True))


def _stored(thread_id: str, matches: Matches, holds_tasks: HoldsTasks) -> Statements[StoredThread]:
    records = ThreadRecords(thread_id, matches=matches)
    writes = yield from _writes(thread_id)
    channels = [row[0] for row in (yield _CHANNELS, {"thread": thread_id})]

    def add(rows: Rows) -> None:
        for row in rows:
            _add(records, row, writes.pop((row[0], row[1]), NO_WRITES), holds_tasks)

    parameters = {
        "thread": thread_id,
        "channels": channels,
        "maps": list(HISTORY_MAPS),
        "small": SMALL,
    }
    yield from streamed(_CHECKPOINTS, parameters, add)
    # What no checkpoint has taken has none.
    return records.thread(orphan_writes=[OrphanWrites(*key, w.rows) for key, w in writes.items()])


SMALL = 256
"""The size up to which a list of sends is read: an empty one is smaller, also if encrypted."""


def _writes(thread_id: str) -> Statements[dict[Key, Writes]]:
    found: dict[Key, Writes] = {}
    known: dict[tuple[Any, ...], Writes] = {}

    def add(rows: Rows) -> None:
        for ns, checkpoint_id, *summary in rows:
            count, channels, asked, failed, null_task = summary
            shape = (count, *map(tuple, (channels, asked or (), failed or ())), null_task)
            if shape not in known:
                known[shape] = Writes(count, frozenset(channels), *shape[2:])
            found[ns, checkpoint_id] = known[shape]

    parameters = {
        "thread": thread_id,
        "interrupt": INTERRUPT,
        "error": ERROR,
        "null_task": NULL_TASK_ID,
    }
    yield from streamed(_WRITES, parameters, add)
    return found


def _add(
    records: ThreadRecords, row: tuple[Any, ...], writes: Writes, holds_tasks: HoldsTasks
) -> None:
    ns, checkpoint_id, parent_id, metadata, parent_metadata, v, ts, start, *channels = row
    versioned, held, inlined, true, sent, tasks_type, tasks, digest = channels
    stored = {*held, *(inlined or ())} - {SENDS}
    if sent or holds_tasks(tasks_type, tasks):
        stored.add(SENDS)
    versions = dict.fromkeys(versioned)
    if start is not None:
        versions[START] = start
    records.add(
        ns,
        checkpoint_id,
        parent_id,
        metadata=json.loads(metadata),
        parent_metadata=lambda: parent_metadata and json.loads(parent_metadata),
        body={"v": v, "channel_versions": versions},
        ts=ts,
        stored=stored,
        snapshots=set(true or ()).intersection(held),
        fingerprint=digest.encode(),
        writes=writes,
    )


def _threads_of_runs(run_ids: Iterable[str]) -> Statements[list[str]]:
    found: dict[str, None] = {}
    wanted = list(dict.fromkeys(run_ids))
    for start in range(0, len(wanted), CHUNK):
        rows = yield _THREADS_OF_RUNS, {"runs": wanted[start : start + CHUNK]}
        found.update((row[0], None) for row in rows)
    return list(found)
