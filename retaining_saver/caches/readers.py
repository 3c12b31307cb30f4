"""What readers of one saver know of each other: who reads what now, and which parents were seen."""

from __future__ import annotations

import asyncio
import threading
from weakref import WeakValueDictionary

from aiologic import BinarySemaphore
from cachetools import LRUCache
from langgraph.checkpoint.base import CheckpointTuple

from retaining_saver import folds
from retaining_saver.caches.base import Epoch
from retaining_saver.caches.history import StoredHistory
from retaining_saver.records import Ref

_COUNTERS = "counters_since_delta_snapshot"
_THREADS_KNOWN = 1024
_PARENTS_KNOWN = 64


class Readers:
    """What the readers of one saver and its clones share: whose turn it is, and parents seen.

    Holds a bounded number of links and nothing of the state.
    """

    def __init__(self) -> None:
        self._flights: WeakValueDictionary[tuple[Ref, str | None], Flight] = WeakValueDictionary()
        self._threads: LRUCache[str, _Seen] = LRUCache(_THREADS_KNOWN)
        # Re-entrant: a garbage collection inside may finish an abandoned read.
        self._lock = threading.RLock()

    def saw(self, stored: CheckpointTuple) -> None:
        """Remember that a checkpoint was stored, and its parent; it saves the next read a lookup.

        Not the parent of what may be a leaf: it may be reclaimed before its history is read, and
        then its parent may already have the next run's writes. Costs nothing on a thread that
        shows no sign of a delta channel: every read asks.
        """
        ref = Ref.of(stored.config)
        if _COUNTERS not in stored.metadata and ref.thread_id not in self._threads:
            return
        with self._lock:
            if ref.thread_id not in self._threads:
                self._threads[ref.thread_id] = _Seen()
            seen = self._threads[ref.thread_id]
            seen.ids[ref] = None if _may_be_leaf(stored) else parent_id(stored)
            if not _looks_like_leaf(stored):
                newest = seen.newest.get(ref.checkpoint_ns, "")
                seen.newest[ref.checkpoint_ns] = max(newest, ref.checkpoint_id or "")

    def parent(self, ref: Ref) -> str | None:
        """Return the parent of a checkpoint that was seen, if it is known and has one."""
        with self._lock:
            seen = self._threads.get(ref.thread_id)
            return seen.ids.get(ref) if seen else None

    def has_seen(self, ref: Ref) -> bool:
        """Tell whether a checkpoint is known to have been stored."""
        with self._lock:
            seen = self._threads.get(ref.thread_id)
            return seen is not None and ref in seen.ids

    def is_superseded(self, ref: Ref) -> bool:
        """Tell whether a newer checkpoint of the namespace was seen, leaves aside."""
        with self._lock:
            seen = self._threads.get(ref.thread_id)
            newest = seen.newest.get(ref.checkpoint_ns, "") if seen else ""
            return (ref.checkpoint_id or "") < newest

    def forget_thread(self, thread_id: str) -> None:
        """Forget a thread whose rows were deleted or moved."""
        with self._lock:
            self._threads.pop(thread_id, None)

    def flight(self, ref: Ref, epoch: Epoch | None) -> Flight:
        """Return what everyone who misses ``ref`` in one epoch shares."""
        key = (ref, epoch.token if epoch else None)
        with self._lock:
            flight = self._flights.get(key)
            if flight is None:
                flight = self._flights[key] = Flight()
            return flight


class _Seen:
    """What was seen of one thread: parents by checkpoint, and each namespace's newest id."""

    def __init__(self) -> None:
        self.ids: LRUCache[Ref, str | None] = LRUCache(_PARENTS_KNOWN)
        self.newest: LRUCache[str, str] = LRUCache(_PARENTS_KNOWN)


class Flight:
    """One miss that may be several readers' at once; it lives while any of them does."""

    def __init__(self) -> None:
        self.turn = BinarySemaphore()
        self.entries: dict[str, StoredHistory] = {}


class Turn:
    """One reader's turn in a flight. Ending it twice, or before it began, does nothing."""

    def __init__(self, flight: Flight) -> None:
        self._flight = flight
        self._held = False

    def begin(self) -> None:
        """Wait for the reader before, but never on an event loop's own thread.

        The reader before may be a task of that loop, or need the loop to finish.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self._held = self._flight.turn.green_acquire()

    async def abegin(self) -> None:
        self._held = await self._flight.turn.async_acquire()

    def end(self) -> None:
        """Let the next reader go on."""
        if self._held:
            self._held = False
            self._flight.turn.release()


def parent_id(stored: CheckpointTuple) -> str | None:
    """Return the id of the parent that a checkpoint names."""
    return Ref.of(stored.parent_config).checkpoint_id if stored.parent_config else None


def _may_be_leaf(stored: CheckpointTuple) -> bool:
    return stored.metadata.get("source") == "update" or _looks_like_leaf(stored)


def _looks_like_leaf(stored: CheckpointTuple) -> bool:
    checkpoint_id, metadata = stored.checkpoint["id"], stored.metadata
    if folds.kind_of(checkpoint_id, metadata) or folds.has_legacy_marker(metadata):
        return True
    return metadata.get("source") == "update" and folds.adds_history(checkpoint_id, metadata)
