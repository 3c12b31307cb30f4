"""What the library asks of a cache of delta histories."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from langgraph.checkpoint.base import BaseCheckpointSaver

from retaining_saver.caches.history import StoredHistory


@dataclass(frozen=True, slots=True)
class HistoryKey:
    """One channel's history at one checkpoint; never "the latest"."""

    thread_id: str
    checkpoint_ns: str
    checkpoint_id: str
    channel: str


@dataclass(frozen=True, slots=True)
class Epoch:
    """How a thread's entries stood when a reader started.

    ``token`` changes whenever the thread is purged; ``held`` are the keys that were cached.
    """

    token: str
    held: frozenset[HistoryKey] = frozenset()


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts since the cache was made, and what it holds now where it can tell."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    refused: int = 0
    failures: int = 0
    entries: int | None = None
    bytes: int | None = None


@runtime_checkable
class HistoryCache(Protocol):
    """Remember delta histories.

    - An entry is valid until its thread is purged; dropping it sooner costs a hit and no more.
    - Whoever deletes, moves or replaces rows of a thread purges it *before*, so that a failure
      stops the deletion, and *again after*, because a reader that started in between may have
      put back what it still saw.
    - ``set_many`` stores nothing of a thread that was purged since ``epoch`` was asked for; the
      check and the storing are one effect.
    - ``delete_thread`` raises if it cannot promise that nothing of the thread is left to be
      read. Every other failure is the cache's own: it costs hits, never a read.
    - The keys of one call belong to one thread.
    - Nothing mutable is shared with callers: entries are ``StoredHistory``, which is frozen.
    - Safe for threads and event loops at once; the awaitable twins do not block a loop.
    """

    def for_saver(self, saver: BaseCheckpointSaver[Any]) -> HistoryCache:
        """Return this cache as it serves the database of ``saver``. Does no I/O."""
        ...

    def get_many(self, keys: Collection[HistoryKey]) -> Mapping[HistoryKey, StoredHistory]:
        """Return the entries that are there, in one lookup."""
        ...

    async def aget_many(
        self, keys: Collection[HistoryKey]
    ) -> Mapping[HistoryKey, StoredHistory]: ...

    def set_many(self, entries: Mapping[HistoryKey, StoredHistory], epoch: Epoch) -> bool:
        """Store entries of one thread; false, and nothing stored, if purged since ``epoch``."""
        ...

    async def aset_many(
        self, entries: Mapping[HistoryKey, StoredHistory], epoch: Epoch
    ) -> bool: ...

    def epoch(self, thread_id: str) -> Epoch | None:
        """Tell how the thread's entries stand, in one lookup; ``None`` if that cannot be told."""
        ...

    async def aepoch(self, thread_id: str) -> Epoch | None: ...

    def delete_thread(self, thread_id: str) -> None:
        """Purge a thread, at a cost that does not depend on what other threads have cached."""
        ...

    async def adelete_thread(self, thread_id: str) -> None: ...

    def stats(self) -> CacheStats:
        """Count what happened so far."""
        ...

    async def astats(self) -> CacheStats: ...

    def close(self) -> None:
        """Release what the cache holds open."""
        ...

    async def aclose(self) -> None: ...


class Tally:
    """Count for ``CacheStats``, from any thread."""

    def __init__(self) -> None:
        self._stats = CacheStats()
        self._lock = threading.Lock()

    def add(self, **counts: int) -> None:
        """Add to the counts that are named."""
        with self._lock:
            sums = {name: getattr(self._stats, name) + count for name, count in counts.items()}
            self._stats = replace(self._stats, **sums)

    def stats(self) -> CacheStats:
        """Return the counts so far."""
        return self._stats


def positive(name: str, value: int) -> int:
    """Return ``value`` if it is a count that an option called ``name`` may have."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")
    return value
