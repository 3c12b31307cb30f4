"""Whole threads of the SQLite savers: read for the planner, and the front of what rewrites them.

A checkpoint's blob holds its values, so it is read structurally and a page at a time; nothing
but a summary is kept of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from langgraph.checkpoint.serde.base import SerializerProtocol

from retaining_saver.backends import sqlite_plain as plain
from retaining_saver.backends.opaque import (
    DELTA_SNAPSHOT,
    Opaque,
    UnreadableCheckpoint,
    fingerprint_of,
    is_msgpack,
    read_checkpoint,
    stored_channels,
)
from retaining_saver.backends.retention import CHUNK, Applied
from retaining_saver.backends.sqlite_rewriting import (
    SIZE,
    THREAD,
    Undone,
    applied,
    copied,
    find_metadata,
)
from retaining_saver.backends.sqlite_statements import (
    READING,
    WRITING,
    Bounds,
    Statements,
    load_metadata,
)
from retaining_saver.entries import (
    OrphanWrites,
    StoredThread,
    ThreadRecords,
    Writes,
)
from retaining_saver.folds import adds_history
from retaining_saver.planned import RetentionPlan

T = TypeVar("T")
Key = tuple[str, str]  # checkpoint_ns, checkpoint_id
Matches = Callable[[Mapping[str, Any]], bool]

PAGE_BYTES = 256 * 1024
"""How much serialized state is read at once; a larger checkpoint is read alone."""

_IN_PAGE = "IN (SELECT value FROM json_each(:page))"
_SAME_CHECKPOINT = """w.thread_id = c.thread_id AND w.checkpoint_ns = c.checkpoint_ns
    AND w.checkpoint_id = c.checkpoint_id"""


def _stored(
    thread_id: str, serde: SerializerProtocol, matches: Matches
) -> Statements[StoredThread]:
    reading = _Reading(ThreadRecords(thread_id, matches=matches), serde)
    sizes = yield (
        f"SELECT rowid, {SIZE} FROM checkpoints WHERE {THREAD} ORDER BY rowid",
        {"thread_id": thread_id},
    )
    for page in _pages(sizes.rows):
        yield from _read_page(reading, thread_id, page)
    orphans = yield (
        f"""SELECT checkpoint_ns, checkpoint_id, COUNT(*) FROM writes AS w WHERE {THREAD}
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
            parents = yield from find_metadata(thread_id, [(ns, parent_id)])
            above = parents.get((ns, parent_id))
        summary = Writes.of(writes.get((ns, checkpoint_id), ()))
        reading.add((ns, checkpoint_id), parent_id, (kind, checkpoint), metadata, above, summary)


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
        thread = self.records.thread(orphan_writes=orphans, problems=self.problems)
        return replace(thread, problems=(*thread.problems, *self._unmovable(thread)))

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
            return self._write(applied(thread, plan, self._serde, dry_run), _bounds(plan))
        except Undone as undone:
            return undone.applied

    async def aapply(
        self, thread: StoredThread, plan: RetentionPlan, *, dry_run: bool = False
    ) -> Applied | None:
        try:
            return await self._finish(applied(thread, plan, self._serde, dry_run), _bounds(plan))
        except Undone as undone:
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
        return self._write(copied(source, target, latest, self._serde))

    async def acopy_thread(self, source: str, target: str, latest: RetentionPlan | None) -> bool:
        return await self._finish(copied(source, target, latest, self._serde))


def _bounds(plan: RetentionPlan) -> Bounds:
    # A plan that changes nothing needs no other writer to wait.
    return WRITING if plan.changes else READING
