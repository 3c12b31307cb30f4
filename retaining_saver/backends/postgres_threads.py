"""Whole threads of a Postgres saver: read for the planner, and the front of what rewrites them.

What is read comes in a few streams, each through a cursor in the server. What stays in memory is a
small record of each checkpoint, and the keys of the blobs; no value is read. The server's estimate
of how many rows a thread has is worst for the largest threads, so nothing here joins two sets of
one thread's rows: single rows are looked up by their key, and `LIMIT 1` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from hashlib import blake2b
from json import JSONDecoder
from typing import Any, TypeVar, cast

from psycopg.errors import DeadlockDetected, SerializationFailure, UniqueViolation

from retaining_saver._steps import Steps, arun, call, run
from retaining_saver.backends import postgres_plain as plain
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

T = TypeVar("T")
Key = tuple[str, str]  # checkpoint_ns, checkpoint_id
Versions = dict[str, dict[str, set[str]]]  # By namespace and channel.
Matches = Callable[[Mapping[str, Any]], bool]
HoldsTasks = Callable[["str | None", "bytes | None"], bool]

ATTEMPTS = 4
"""How often a transaction is begun that the server refuses to serialize."""
SMALL = 256
"""The size up to which a list of sends is read: an empty one is smaller, also if encrypted."""
LONG = 4096
"""The size from which on only the digest of an inline value is read."""
_REFUSALS = (SerializationFailure, DeadlockDetected, UniqueViolation)

# The keys of what is stored apart. Of the sends only their type and their value if it is small.
_BLOBS = """
SELECT checkpoint_ns, channel, version FROM checkpoint_blobs
WHERE thread_id = %(thread)s AND type <> 'empty' AND channel <> %(sends)s
"""
_SENDS = """
SELECT checkpoint_ns, version, type, CASE WHEN octet_length(blob) <= %(small)s THEN blob END
FROM checkpoint_blobs
WHERE thread_id = %(thread)s AND type <> 'empty' AND channel = %(sends)s
"""

# A later checkpoint of the same version reads the snapshot without naming it.
_SNAPSHOTS = """
SELECT DISTINCT c.checkpoint_ns, i.key, c.checkpoint -> 'channel_versions' ->> i.key
FROM checkpoints AS c CROSS JOIN LATERAL jsonb_each(
    NULLIF(c.checkpoint -> 'channel_values', 'null')
) AS i
WHERE c.thread_id = %(thread)s AND i.value = 'true'
"""

_WRITES = """
SELECT checkpoint_ns, checkpoint_id, count(*), array_agg(DISTINCT channel),
    array_agg(DISTINCT task_id) FILTER (WHERE channel = %(interrupt)s),
    array_agg(DISTINCT task_id) FILTER (WHERE channel = %(error)s),
    bool_or(task_id = %(null_task)s)
FROM checkpoint_writes WHERE thread_id = %(thread)s
GROUP BY checkpoint_ns, checkpoint_id
"""

# Inline values that are long come as their digest: only whether two are equal counts. The parent's
# metadata is read only where a row records runs and does not say what it is.
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
    c.checkpoint ->> 'v', c.checkpoint ->> 'ts',
    (c.checkpoint -> 'channel_versions')::text,
    CASE WHEN octet_length((c.checkpoint -> 'channel_values')::text) > {LONG} THEN (
        SELECT jsonb_object_agg(i.key, CASE WHEN octet_length(i.value::text) > {LONG}
            THEN to_jsonb(md5(i.value::text)) ELSE i.value
        END)::text
        FROM jsonb_each(c.checkpoint -> 'channel_values') AS i
    ) ELSE (c.checkpoint -> 'channel_values')::text END,
    (c.checkpoint - '{{id,ts,channel_values,channel_versions}}'::text[])::text
FROM checkpoints AS c WHERE c.thread_id = %(thread)s
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

    def is_plain(self, thread_id: str) -> bool:
        return self._session.read(plain.head_of_plain(thread_id), snapshot=True) is not None

    async def ais_plain(self, thread_id: str) -> bool:
        head = await self._session.aread(plain.head_of_plain(thread_id), snapshot=True)
        return head is not None

    def cut_plain(self, thread_id: str) -> int | None:
        return run(_serialized(self._session, lambda: plain.cut(thread_id)))

    async def acut_plain(self, thread_id: str) -> int | None:
        return await arun(_serialized(self._session, lambda: plain.cut(thread_id)))

    def threads_of_runs(self, run_ids: Sequence[str]) -> list[str]:
        return self._session.read(_threads_of_runs(run_ids), snapshot=True)

    async def athreads_of_runs(self, run_ids: Sequence[str]) -> list[str]:
        return await self._session.aread(_threads_of_runs(run_ids), snapshot=True)

    def copy_thread(self, source: str, target: str, latest: RetentionPlan | None) -> bool:
        return run(_serialized(self._session, lambda: rewriting.copied(source, target, latest)))

    async def acopy_thread(self, source: str, target: str, latest: RetentionPlan | None) -> bool:
        steps = _serialized(self._session, lambda: rewriting.copied(source, target, latest))
        return await arun(steps)


def _serialized(session: Session, statements: Callable[[], Statements[T]]) -> Steps[T]:
    """Write on one snapshot; begin again where another transaction was in the way."""
    tried = 0
    while True:
        tried += 1
        try:
            done = yield from call(session.write, session.awrite, statements(), snapshot=True)
            return cast(T, done)  # The checker loses what a generic method returns.
        except _REFUSALS:
            if tried == ATTEMPTS:
                raise


def _stored(thread_id: str, matches: Matches, holds_tasks: HoldsTasks) -> Statements[StoredThread]:
    thread = _Thread(thread_id, matches, holds_tasks)
    yield from streamed(_WRITES, thread.parameters, thread.take_writes)
    yield from streamed(_BLOBS, thread.parameters, thread.take_blobs)
    yield from streamed(_SENDS, thread.parameters, thread.take_sends)
    yield from streamed(_SNAPSHOTS, thread.parameters, thread.take_snapshots)
    yield from streamed(_CHECKPOINTS, thread.parameters, thread.take_checkpoints)
    return thread.complete()


class _Thread:
    """Puts together what is read of one thread, the checkpoints last."""

    def __init__(self, thread_id: str, matches: Matches, holds_tasks: HoldsTasks) -> None:
        self.parameters = {
            "thread": thread_id,
            "sends": SENDS,
            "small": SMALL,
            "interrupt": INTERRUPT,
            "error": ERROR,
            "null_task": NULL_TASK_ID,
            "maps": list(HISTORY_MAPS),
        }
        self._records = ThreadRecords(thread_id, matches=matches)
        self._holds_tasks = holds_tasks
        self._writes: dict[Key, Writes] = {}
        self._written: set[Key] = set()
        self._blobs: Versions = {}
        self._snapshots: Versions = {}

    def take_writes(self, rows: Rows) -> None:
        known: dict[tuple[Any, ...], Writes] = {}
        for ns, checkpoint_id, count, *summary in rows:
            channels, asked, failed = (tuple(names or ()) for names in summary[:3])
            shape = (count, channels, asked, failed, summary[3])
            if shape not in known:
                known[shape] = Writes(count, frozenset(channels), asked, failed, summary[3])
            self._writes[ns, checkpoint_id] = known[shape]

    def take_blobs(self, rows: Rows) -> None:
        for ns, channel, version in rows:
            _add(self._blobs, ns, channel, version)

    def take_sends(self, rows: Rows) -> None:
        for ns, version, type_, blob in rows:
            if self._holds_tasks(type_, blob):
                _add(self._blobs, ns, SENDS, version)

    def take_snapshots(self, rows: Rows) -> None:
        for ns, channel, version in rows:
            _add(self._snapshots, ns, channel, version)

    def take_checkpoints(self, rows: Rows) -> None:
        for row in rows:
            self._take_checkpoint(row)

    def complete(self) -> StoredThread:
        orphans = self._writes.keys() - self._written
        return self._records.thread(
            orphan_writes=[OrphanWrites(*key, self._writes[key].rows) for key in sorted(orphans)]
        )

    def _take_checkpoint(self, row: tuple[Any, ...]) -> None:
        ns, checkpoint_id, parent_id, metadata, parent_metadata, v, ts, *texts = row
        versions = _decode(texts[0])
        inline = _decode(texts[1], _EXACT)
        held = _found(versions, self._blobs.get(ns, {}))
        snapshots = held & _found(versions, self._snapshots.get(ns, {}))
        # What is inline under the same name is the mark of a snapshot, or a copy's doing.
        own = {channel: value for channel, value in inline.items() if channel not in held}
        key = (ns, checkpoint_id)
        self._written.add(key)
        self._records.add(
            ns,
            checkpoint_id,
            parent_id,
            metadata=_decode(metadata),
            parent_metadata=lambda: None if parent_metadata is None else _decode(parent_metadata),
            body={"v": v, "channel_versions": versions},
            ts=ts,
            stored=held.union(
                (c for c, value in own.items() if _counts(c, value)),
                self._sent_by_parent(ns, parent_id, v),
            ),
            snapshots=snapshots,
            fingerprint=_digest(texts[2], texts[0], own),
            writes=self._writes.get(key, NO_WRITES),
        )

    def _sent_by_parent(self, ns: str, parent_id: str | None, v: str | None) -> tuple[str, ...]:
        # Before checkpoint format 4 the sends were writes on the parent.
        if int(v or 1) >= 4 or not parent_id:
            return ()
        return (SENDS,) if SENDS in self._writes.get((ns, parent_id), NO_WRITES).channels else ()


def _add(found: Versions, ns: str, channel: str, version: str) -> None:
    found.setdefault(ns, {}).setdefault(channel, set()).add(version)


def _found(versions: Mapping[str, Any], among: Mapping[str, Collection[str]]) -> set[str]:
    """Name the channels whose version is among those of the channel."""
    return {c for c, known in among.items() if c in versions and str(versions[c]) in known}


_PLAIN, _EXACT = JSONDecoder(), JSONDecoder(parse_float=Decimal)


def _decode(text: str | None, decoder: JSONDecoder = _PLAIN) -> dict[str, Any]:
    """Return a JSON object, an empty one for null. The server writes no white space around it."""
    return {} if text is None else decoder.raw_decode(text)[0] or {}


def _counts(channel: str, inline: object) -> bool:
    """Tell whether an inline value is one: null is where a node waits for it, else not."""
    return (
        (inline is not None and channel != SENDS)
        or channel == START
        or (channel.startswith(BRANCH))
    )


def _digest(rest: str, versions: str | None, inline: Mapping[str, Any]) -> bytes:
    # The server spells equal documents equally, whatever order they were stored in.
    digest = blake2b(rest.encode(), digest_size=16)
    digest.update(f"\0{versions}\0{inline}".encode("utf-8", "surrogatepass"))
    return digest.digest()


def _threads_of_runs(run_ids: Iterable[str]) -> Statements[list[str]]:
    found: dict[str, None] = {}
    wanted = list(dict.fromkeys(run_ids))
    for start in range(0, len(wanted), CHUNK):
        rows = yield _THREADS_OF_RUNS, {"runs": wanted[start : start + CHUNK]}
        found.update((row[0], None) for row in rows)
    return list(found)
