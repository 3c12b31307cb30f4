"""Reach the rows of an ``InMemorySaver``.

``storage[thread][namespace][id]`` is ``(checkpoint, metadata, parent id)``, the first two as the
serializer's ``(type, bytes)``; ``blobs`` hold the values by version; ``writes[thread, namespace,
id][task id, idx]`` is ``(task id, channel, value, task path)``. Reading never creates a key.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar, cast
from weakref import WeakValueDictionary

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint import base as checkpoint_base
from langgraph.checkpoint.base import BaseCheckpointSaver, Checkpoint, CheckpointTuple
from langgraph.checkpoint.memory import InMemorySaver

from retaining_saver._steps import Steps, run
from retaining_saver.backends import moves
from retaining_saver.backends.base import NEIGHBOURS, Movable, ReclaimOutcome, Row, Surroundings
from retaining_saver.backends.chains import along_parents
from retaining_saver.backends.clones import clone
from retaining_saver.backends.memory_threads import MemoryThreads
from retaining_saver.backends.opaque import body_of, holds_value, is_due
from retaining_saver.folds import folded_into, reclaimed_ids
from retaining_saver.records import Ref

T = TypeVar("T")
Typed = tuple[str, bytes]
Entry = tuple[Typed, Typed, "str | None"]
Writes = dict[tuple[str, int], tuple[str, str, Typed, str]]

_locks: WeakValueDictionary[int, threading.Lock] = WeakValueDictionary()
_locks_lock = threading.Lock()


def _lock_of(storage: object) -> threading.Lock:
    """Return the one lock of a storage dict, which copies of a saver share.

    Whoever holds the lock also holds a saver, and so the storage: its ``id`` cannot be reused
    while the entry lives.
    """
    with _locks_lock:
        lock = _locks.get(id(storage))
        if lock is None:
            lock = _locks[id(storage)] = threading.Lock()
        return lock


def _as_it_walks(saver: InMemorySaver) -> InMemorySaver:
    """Return a saver whose tuples have their writes in the order in which its walk has them.

    Before langgraph-checkpoint 4.3 the walk sorts them by task, and a tuple does not.
    """
    if hasattr(checkpoint_base, "writes_sort_key"):
        return saver
    plain = saver.get_tuple

    def get_tuple(config: RunnableConfig) -> CheckpointTuple | None:
        found = plain(config)
        if found is None:
            return None
        by_task = sorted(found.pending_writes or (), key=lambda write: write[0])
        return found._replace(pending_writes=by_task)

    return clone(saver, get_tuple=get_tuple)


class MemoryBackend(MemoryThreads):
    """The adapter to ``InMemorySaver``. LangGraph's own ``put`` does not take our lock, so what
    must not slip in between is looked for again after the deletion, and the deletion undone.
    """

    locks_listings: ClassVar[bool] = False

    def __init__(self, saver: BaseCheckpointSaver[Any]) -> None:
        self._saver = cast(InMemorySaver, saver)
        self._lock = _lock_of(self._saver.storage)

    def on_snapshot(self, operation: Callable[[BaseCheckpointSaver[Any]], Steps[T]]) -> T:
        with self._lock:
            return run(operation(_as_it_walks(self._saver)))

    async def aon_snapshot(self, operation: Callable[[BaseCheckpointSaver[Any]], Steps[T]]) -> T:
        # Not awaiting, which would hold up the loop's other tasks by the lock.
        return self.on_snapshot(operation)

    def row(self, ref: Ref) -> Row | None:
        entries = self._entries(ref)
        checkpoint_id = ref.checkpoint_id or max(list(entries), default="")
        entry = entries.get(checkpoint_id)
        return None if entry is None else self._row(ref.at(checkpoint_id), entry)

    async def arow(self, ref: Ref) -> Row | None:
        return self.row(ref)

    def metadata(self, ref: Ref) -> tuple[str, dict[str, Any]] | None:
        entries = self._entries(ref)
        checkpoint_id = ref.checkpoint_id or max(list(entries), default="")
        entry = entries.get(checkpoint_id)
        return None if entry is None else (checkpoint_id, self._metadata(entry))

    async def ametadata(self, ref: Ref) -> tuple[str, dict[str, Any]] | None:
        return self.metadata(ref)

    def lineage(self, ref: Ref) -> list[tuple[str, dict[str, Any]]]:
        entries = dict(self._entries(ref))
        links = {i: (entry[2], entry) for i, entry in entries.items()}
        return [(i, self._metadata(e)) for i, e in along_parents(ref.checkpoint_id, links)]

    async def alineage(self, ref: Ref) -> list[tuple[str, dict[str, Any]]]:
        return self.lineage(ref)

    def has_writes(self, ref: Ref) -> bool:
        return bool(self._writes(ref))

    async def ahas_writes(self, ref: Ref) -> bool:
        return self.has_writes(ref)

    def surroundings(self, ref: Ref, *, but: str | None = None) -> Surroundings:
        checkpoint_id = _id(ref)
        newer = (i for i in list(self._entries(ref)) if i > checkpoint_id and i != but)
        return Surroundings(self.has_writes(ref), any(newer))

    async def asurroundings(self, ref: Ref, *, but: str | None = None) -> Surroundings:
        return self.surroundings(ref, but=but)

    def exists(self, ref: Ref) -> bool:
        return ref.checkpoint_id in self._entries(ref)

    async def aexists(self, ref: Ref) -> bool:
        return self.exists(ref)

    def reclaimed_into(self, ref: Ref) -> str | None:
        entries = dict(self._entries(ref))
        for checkpoint_id in _neighbours(entries, _id(ref)):
            metadata = self._metadata(entries[checkpoint_id])
            if ref.checkpoint_id in reclaimed_ids(checkpoint_id, metadata):
                return checkpoint_id
        return None

    async def areclaimed_into(self, ref: Ref) -> str | None:
        return self.reclaimed_into(ref)

    def same_values(self, row: Row, checkpoint: Checkpoint) -> bool:  # Shared by version.
        return True

    def fold(self, target: Ref, leaf_id: str | None, metadata: Mapping[str, Any]) -> bool:
        with self._lock:
            entry = self._entries(target).get(_id(target))
            if entry is None:
                return False
            folded = self._folded(target, entry, leaf_id, metadata)
            self._entries(target)[_id(target)] = folded
            return True

    async def afold(self, target: Ref, leaf_id: str | None, metadata: Mapping[str, Any]) -> bool:
        return self.fold(target, leaf_id, metadata)

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
        refused = moves.mismatch(leaf, parent)
        if refused:
            return refused
        ref = Ref(thread_id, checkpoint_ns, leaf.checkpoint_id)
        onto = ref.at(parent.checkpoint_id)
        with self._lock:
            writes = dict(self._writes(ref))
            moved = self._moves(ref, onto, writes, movable)
            refused = self._refusal(ref, leaf, parent, only_head, writes if moved else {})
            if refused:
                return refused
            entries = self._entries(ref)
            entry, onto_entry = entries[leaf.checkpoint_id], entries[parent.checkpoint_id]
            # Everything that may fail comes before anything changes.
            folded = self._folded(onto, onto_entry, leaf.checkpoint_id, self._metadata(entry))
            entries.pop(leaf.checkpoint_id)
            refused = "superseded"
            try:
                refused = self._refusal_after(ref, only_head, writes)
            finally:
                if refused:
                    entries[leaf.checkpoint_id] = entry
            if refused:
                return refused
            if writes:
                self._move_writes(ref, onto, moved)
            entries[parent.checkpoint_id] = folded
            return "reclaimed"

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
        return self.reclaim(
            thread_id, checkpoint_ns, leaf, parent, only_head=only_head, movable=movable
        )

    def rescue(self, leaf: Ref, parent_id: str) -> int:
        with self._lock:
            entries = self._entries(leaf)
            if _id(leaf) in entries or parent_id not in entries:
                return 0
            children = self._children(leaf)
            for child_id in children:
                checkpoint, metadata, _ = entries[child_id]
                entries[child_id] = (checkpoint, metadata, parent_id)
            tasks = {task_id for task_id, _ in list(self._writes(leaf))}
            moved = {t: moves.rescued_task_id(t, _id(leaf), parent_id) for t in tasks}
            return len(children) + self._move_writes(leaf, leaf.at(parent_id), moved)

    async def arescue(self, leaf: Ref, parent_id: str) -> int:
        return self.rescue(leaf, parent_id)

    def _entries(self, ref: Ref) -> dict[str, Entry]:
        return (self._saver.storage.get(ref.thread_id) or {}).get(ref.checkpoint_ns) or {}

    def _writes(self, ref: Ref) -> Writes:
        key = (ref.thread_id, ref.checkpoint_ns, _id(ref))
        return self._saver.writes.get(key) or {}

    def _metadata(self, entry: Entry) -> dict[str, Any]:
        metadata: dict[str, Any] = self._saver.serde.loads_typed(entry[1])
        return metadata

    def _row(self, ref: Ref, entry: Entry) -> Row:
        checkpoint, _, parent_id = entry
        # The serializer itself may read this one: the saver takes the values out before it writes.
        body = body_of(self._saver.serde.loads_typed(checkpoint))
        return Row(
            _id(ref),
            parent_id or None,
            self._metadata(entry),
            body,
            is_due(self._stored(ref, body)),
            token=checkpoint,
        )

    def _stored(self, ref: Ref, body: Mapping[str, Any]) -> list[str]:
        blobs, serde = self._saver.blobs, self._saver.serde
        absent: Typed = ("empty", b"")
        stored = {
            channel: blobs.get((ref.thread_id, ref.checkpoint_ns, channel, version), absent)
            for channel, version in body["channel_versions"].items()
        }
        return [channel for channel, blob in stored.items() if holds_value(channel, blob, serde)]

    def _children(self, ref: Ref) -> list[str]:
        entries = list(self._entries(ref).items())
        return [i for i, (_, _, parent_id) in entries if parent_id == ref.checkpoint_id]

    def _moves(self, ref: Ref, onto: Ref, writes: Writes, movable: Movable) -> dict[str, str]:
        if not writes or self._writes(onto):
            return {}
        tasks = [task_id for task_id, _ in writes]
        return moves.planned_moves(tasks, _id(ref), _id(onto), movable)

    def _refusal(
        self, ref: Ref, leaf: Row, parent: Row, only_head: bool, movable: Writes
    ) -> ReclaimOutcome | None:
        entries = self._entries(ref)
        stored, stored_parent = entries.get(leaf.checkpoint_id), entries.get(parent.checkpoint_id)
        if stored is None:
            return "superseded"
        if stored_parent is None:
            return "parent_missing"
        is_same = stored[0] == leaf.token and stored[2] == parent.checkpoint_id
        if not is_same or stored_parent[0] != parent.token:
            return "versions_differ"
        return self._refusal_after(ref, only_head, movable)

    def _refusal_after(self, ref: Ref, only_head: bool, movable: Writes) -> ReclaimOutcome | None:
        if (only_head and self.surroundings(ref).has_newer) or self._children(ref):
            return "superseded"
        return "has_writes" if dict(self._writes(ref)) != movable else None

    def _folded(
        self, onto: Ref, entry: Entry, leaf_id: str | None, metadata: Mapping[str, Any]
    ) -> Entry:
        checkpoint, _, parent_id = entry
        folded = folded_into(self._metadata(entry), _id(onto), metadata, leaf_id)
        return checkpoint, self._saver.serde.dumps_typed(folded), parent_id

    def _move_writes(self, ref: Ref, onto: Ref, task_ids: Mapping[str, str]) -> int:
        """Move writes as ``put_writes`` would have stored them: an ordinary one never replaces."""
        key = (ref.thread_id, ref.checkpoint_ns, _id(ref))
        writes = self._saver.writes.pop(key, {})
        if not writes:
            return 0
        target = self._saver.writes[ref.thread_id, ref.checkpoint_ns, _id(onto)]
        count = 0
        for (task_id, idx), (_, channel, value, path) in writes.items():
            moved = task_ids.get(task_id, task_id)
            if idx < 0 or (moved, idx) not in target:
                target[moved, idx] = (moved, channel, value, path)
                count += 1
        return count


def _id(ref: Ref) -> str:
    return ref.checkpoint_id or ""


def _neighbours(entries: Mapping[str, Entry], checkpoint_id: str) -> list[str]:
    """List the ids next to one, nearest first, older ones before newer ones."""
    ids = sorted(entries)
    below, above = bisect_left(ids, checkpoint_id), bisect_right(ids, checkpoint_id)
    return [*reversed(ids[max(below - NEIGHBOURS, 0) : below]), *ids[above : above + NEIGHBOURS]]
