"""Whole threads of an ``InMemorySaver``: read for the planner, rewritten by a plan, copied.

A plan is applied to a copy of the thread's dicts, and what differs is stored at the end. The
saver's own ``put`` takes no lock of ours and only ever adds, so that is all that may be stored.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from langgraph.checkpoint.memory import InMemorySaver

from retaining_saver.backends import rewriting
from retaining_saver.backends.opaque import (
    UnreadableCheckpoint,
    body_of,
    holds_value,
    is_snapshot,
)
from retaining_saver.backends.retention import Applied, StorageStats
from retaining_saver.entries import (
    OrphanWrites,
    StoredThread,
    ThreadRecords,
    Writes,
    fingerprint,
)
from retaining_saver.planned import Carry, RetentionPlan, Rollback

Typed = tuple[str, bytes]
Key = tuple[str, str]  # checkpoint_ns, checkpoint_id
Stored = tuple[Typed, Typed, "str | None"]  # checkpoint, metadata, parent id
WriteRow = tuple[str, str, Typed, str]  # task id, channel, value, task path
BlobKey = tuple[str, str, Any]  # checkpoint_ns, channel, version
Matches = Callable[[Mapping[str, Any]], bool]


@dataclass(slots=True)
class _Rows:
    """One thread's rows, apart from those of other threads."""

    checkpoints: dict[Key, Stored] = field(default_factory=dict)
    writes: dict[Key, dict[tuple[str, int], WriteRow]] = field(default_factory=dict)
    blobs: dict[BlobKey, Typed] = field(default_factory=dict)

    def copy(self) -> _Rows:
        writes = {key: dict(rows) for key, rows in self.writes.items()}
        return _Rows(dict(self.checkpoints), writes, dict(self.blobs))

    def is_still(self, thread: StoredThread) -> bool:
        """Tell whether these are the checkpoints that were planned."""
        now = {
            k: (p or None, len(self.writes.get(k, ()))) for k, (_, _, p) in self.checkpoints.items()
        }
        return now == {
            (c.checkpoint_ns, c.checkpoint_id): (c.parent_id, c.writes.rows)
            for c in thread.checkpoints
        }

    def stats(self) -> StorageStats:
        writes = [row for rows in self.writes.values() for row in rows.values()]
        return StorageStats(
            {"checkpoints": len(self.checkpoints), "writes": len(writes), "blobs": len(self.blobs)},
            {
                "checkpoints": sum(len(c[1]) + len(m[1]) for c, m, _ in self.checkpoints.values()),
                "writes": sum(len(value[1]) for _, _, value, _ in writes),
                "blobs": sum(len(value[1]) for value in self.blobs.values()),
            },
        )


class MemoryThreads:
    """The whole-thread half of the adapter to ``InMemorySaver``."""

    _saver: InMemorySaver
    _lock: threading.Lock

    def stored(self, thread_id: str, matches: Matches) -> StoredThread:
        with self._lock:
            rows = self._rows(thread_id)
        records = ThreadRecords(thread_id, matches=matches)
        problems = [text for key in rows.checkpoints for text in self._add(records, rows, key)]
        orphans = [
            OrphanWrites(*key, len(written))
            for key, written in rows.writes.items()
            if key not in rows.checkpoints
        ]
        return records.thread(orphan_writes=orphans, problems=problems)

    async def astored(self, thread_id: str, matches: Matches) -> StoredThread:
        return self.stored(thread_id, matches)

    def apply(
        self, thread: StoredThread, plan: RetentionPlan, *, dry_run: bool = False
    ) -> Applied | None:
        with self._lock:
            rows = self._rows(thread.thread_id)
            # What could not be read is not among the planned: a broken thread is only measured.
            if not (plan.refused or rows.is_still(thread)):
                return None
            changed = self._rewritten(rows, plan)
            if not dry_run:
                if not (plan.refused or self._rows(thread.thread_id).is_still(thread)):
                    return None
                self._store(thread.thread_id, rows, changed)
            return Applied(rows.stats(), changed.stats())

    async def aapply(
        self, thread: StoredThread, plan: RetentionPlan, *, dry_run: bool = False
    ) -> Applied | None:
        return self.apply(thread, plan, dry_run=dry_run)

    def threads_of_runs(self, run_ids: Sequence[str]) -> list[str]:
        wanted = set(run_ids)
        return [
            thread_id
            for thread_id in list(self._saver.storage)
            if any(
                str(self._load(stored[1]).get("run_id")) in wanted
                for stored in self._rows(thread_id).checkpoints.values()
            )
        ]

    async def athreads_of_runs(self, run_ids: Sequence[str]) -> list[str]:
        return self.threads_of_runs(run_ids)

    def copy_thread(self, source: str, target: str, latest: RetentionPlan | None) -> bool:
        with self._lock:
            there = self._rows(target)
            if there.checkpoints or there.writes or there.blobs:
                return False
            rows = self._rows(source)
            if latest is not None:
                rewriting.require(latest, rows.checkpoints)
            self._store(target, _Rows(), self._rewritten(rows, latest) if latest else rows)
            return True

    async def acopy_thread(self, source: str, target: str, latest: RetentionPlan | None) -> bool:
        return self.copy_thread(source, target, latest)

    # Reading.

    def _rows(self, thread_id: str) -> _Rows:
        saver, rows = self._saver, _Rows()
        for ns, entries in list((saver.storage.get(thread_id) or {}).items()):
            for checkpoint_id, entry in list(entries.items()):
                rows.checkpoints[ns, checkpoint_id] = entry
        for thread, ns, checkpoint_id in list(saver.writes):
            if thread == thread_id:
                written = saver.writes.get((thread, ns, checkpoint_id)) or {}
                if written:
                    rows.writes[ns, checkpoint_id] = dict(written)
        for key in list(saver.blobs):
            if key[0] == thread_id and key in saver.blobs:
                rows.blobs[key[1:]] = saver.blobs[key]
        return rows

    def _load(self, typed: Typed) -> dict[str, Any]:
        loaded: dict[str, Any] = self._saver.serde.loads_typed(typed)
        return loaded

    def _add(self, records: ThreadRecords, rows: _Rows, key: Key) -> Iterator[str]:
        """Add one record; give a sentence where that is not possible."""
        ns, checkpoint_id = key
        checkpoint, metadata, parent_id = rows.checkpoints[key]
        try:
            # The saver takes the values out before it serializes the checkpoint.
            body = self._load(checkpoint)
            stored, snapshots = self._stored_channels(rows, ns, body)
            print_of_body = fingerprint(body_of(body))
            recorded = self._load(metadata)
        except UnreadableCheckpoint as error:
            yield f"Checkpoint {checkpoint_id}: {error}"
            return

        def parent_metadata() -> Mapping[str, Any] | None:
            parent = rows.checkpoints.get((ns, parent_id or ""))
            return None if parent is None else self._load(parent[1])

        written = rows.writes.get(key, {}).values()
        records.add(
            ns,
            checkpoint_id,
            parent_id,
            metadata=recorded,
            parent_metadata=parent_metadata,
            body=body,
            ts=body.get("ts"),
            stored=stored,
            snapshots=snapshots,
            fingerprint=print_of_body,
            writes=Writes.of((task_id, channel) for task_id, channel, _, _ in written),
        )

    def _stored_channels(
        self, rows: _Rows, ns: str, body: Mapping[str, Any]
    ) -> tuple[set[str], set[str]]:
        serde = self._saver.serde
        stored, snapshots = set(), set()
        for channel, version in body["channel_versions"].items():
            blob = rows.blobs.get((ns, channel, version))
            if blob is not None and holds_value(channel, blob, serde):
                stored.add(channel)
                if is_snapshot(blob, serde):
                    snapshots.add(channel)
        return stored, snapshots

    # Rewriting a copy.

    def _rewritten(self, rows: _Rows, plan: RetentionPlan) -> _Rows:
        if plan.delete_thread:
            return _Rows()
        new = rows.copy()
        merged = rewriting.merged_metadata(plan, lambda key: self._load(rows.checkpoints[key][1]))
        for key, metadata in merged.items():
            checkpoint, _, parent_id = new.checkpoints[key]
            new.checkpoints[key] = (checkpoint, self._saver.serde.dumps_typed(metadata), parent_id)
        for carry in plan.carry:
            self._add_carrier(new, carry)
        for graft in plan.graft:
            key = (graft.checkpoint_ns, graft.checkpoint_id)
            new.checkpoints[key] = (*new.checkpoints[key][:2], graft.parent_id)
            if graft.moves_writes and graft.parent_id:
                moved = new.writes.pop((graft.checkpoint_ns, graft.moves_writes), {})
                new.writes.setdefault((graft.checkpoint_ns, graft.parent_id), {}).update(moved)
        for rollback in plan.rollback:
            _roll_back(new, rollback)
        self._delete(new, plan)
        return new

    def _add_carrier(self, new: _Rows, carry: Carry) -> None:
        ns = carry.checkpoint_ns
        bodies = {
            source: self._load(new.checkpoints[ns, source][0])
            for source in (*carry.sources, *carry.children[:1])
        }
        versions = {
            channel: bodies[source]["channel_versions"][channel]
            for channel, source in carry.seeds.items()
        }
        newest = (*carry.children[:1], *carry.sources)[-1]
        checkpoint = rewriting.carrier_checkpoint(carry, bodies[newest]["ts"], versions, {})
        checkpoint.pop("channel_values")
        dumps = self._saver.serde.dumps_typed
        new.checkpoints[ns, carry.checkpoint_id] = (
            dumps(checkpoint),
            dumps(rewriting.carrier_metadata(carry)),
            carry.parent_id,
        )

        def tasks_at(source: str, channels: tuple[str, ...]) -> set[str]:
            rows = new.writes.get((ns, source), {}).values()
            return {task_id for task_id, channel, _, _ in rows if channel in channels}

        carried: dict[tuple[str, int], WriteRow] = {}
        for taken in rewriting.taken_rows(carry, tasks_at):
            for (task_id, idx), row in new.writes[ns, taken.source].items():
                if task_id == taken.task_id and row[1] in taken.channels:
                    renamed = (taken.new_task_id, row[1], row[2], taken.prefix + row[3])
                    carried[taken.new_task_id, idx] = renamed
        if carried:
            new.writes[ns, carry.checkpoint_id] = carried

    def _delete(self, new: _Rows, plan: RetentionPlan) -> None:
        freed: set[BlobKey] = set()
        for entry in plan.drop:
            key = (entry.checkpoint_ns, entry.checkpoint_id)
            freed.update(self._references(key[0], new.checkpoints.pop(key)))
            new.writes.pop(key, None)
        for entry in plan.orphans:
            new.writes.pop((entry.checkpoint_ns, entry.checkpoint_id), None)
        for (ns, _), stored in new.checkpoints.items():
            freed.difference_update(self._references(ns, stored))
        for blob in freed:
            new.blobs.pop(blob, None)

    def _references(self, ns: str, stored: Stored) -> Iterator[BlobKey]:
        versions = self._load(stored[0])["channel_versions"]
        return ((ns, channel, version) for channel, version in versions.items())

    # Storing what differs.

    def _store(self, thread_id: str, old: _Rows, new: _Rows) -> None:
        saver = self._saver
        for ns, channel, version in new.blobs.keys() - old.blobs.keys():
            saver.blobs[thread_id, ns, channel, version] = new.blobs[ns, channel, version]
        for key, written in new.writes.items():
            if written != old.writes.get(key):
                saver.writes[thread_id, key[0], key[1]] = dict(written)
        for (ns, checkpoint_id), stored in new.checkpoints.items():
            if stored != old.checkpoints.get((ns, checkpoint_id)):
                saver.storage[thread_id][ns][checkpoint_id] = stored
        for ns, checkpoint_id in old.checkpoints.keys() - new.checkpoints.keys():
            del saver.storage[thread_id][ns][checkpoint_id]
        for key in old.writes.keys() - new.writes.keys():
            saver.writes.pop((thread_id, *key), None)
        for blob in old.blobs.keys() - new.blobs.keys():
            saver.blobs.pop((thread_id, *blob), None)
        self._drop_empty(thread_id)

    def _drop_empty(self, thread_id: str) -> None:
        namespaces = self._saver.storage.get(thread_id)
        if namespaces is not None:
            for ns in [ns for ns, entries in namespaces.items() if not entries]:
                del namespaces[ns]
            if not namespaces:
                del self._saver.storage[thread_id]


def _roll_back(new: _Rows, rollback: Rollback) -> None:
    key = (rollback.checkpoint_ns, rollback.checkpoint_id)
    rows = new.writes.pop(key, {})
    left = {k: row for k, row in rows.items() if not rewriting.is_undone(rollback, row[0], row[1])}
    if left:
        new.writes[key] = left
