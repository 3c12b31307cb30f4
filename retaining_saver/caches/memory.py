"""A cache of delta histories in this process's memory."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from cachetools import LRUCache
from langgraph.checkpoint.base import BaseCheckpointSaver

from retaining_saver.caches.base import CacheStats, Epoch, HistoryKey, Tally, positive
from retaining_saver.caches.history import StoredHistory

_EPOCHS_KEPT = 4096


class MemoryHistoryCache:
    """Remember the histories used last, for one saver and its clones.

    Bounded by ``max_entries`` and by ``max_bytes``, an estimate of the memory that entries take
    as if they shared nothing (entries of one running thread do share). A history that is larger
    than ``max_bytes`` by itself is not kept. Give each saver a cache of its own.
    """

    def __init__(self, max_entries: int = 128, max_bytes: int = 128 * 1024 * 1024) -> None:
        self._max_entries = positive("max_entries", max_entries)
        self._entries = _Entries(positive("max_bytes", max_bytes))
        self._epochs = _Epochs()
        self._tally = Tally()
        self._lock = threading.Lock()

    def for_saver(self, saver: BaseCheckpointSaver[Any]) -> MemoryHistoryCache:
        return self

    def get_many(self, keys: Collection[HistoryKey]) -> Mapping[HistoryKey, StoredHistory]:
        with self._lock:
            found = {key: self._entries[key] for key in keys if key in self._entries}
            self._tally.add(hits=len(found), misses=len(keys) - len(found))
            return found

    async def aget_many(self, keys: Collection[HistoryKey]) -> Mapping[HistoryKey, StoredHistory]:
        return self.get_many(keys)

    def set_many(self, entries: Mapping[HistoryKey, StoredHistory], epoch: Epoch) -> bool:
        with self._lock:
            if any(self._epochs.token(key.thread_id) != epoch.token for key in entries):
                self._tally.add(refused=len(entries))
                return False
            for key, entry in entries.items():
                self._store(key, entry)
            return True

    async def aset_many(self, entries: Mapping[HistoryKey, StoredHistory], epoch: Epoch) -> bool:
        return self.set_many(entries, epoch)

    def epoch(self, thread_id: str) -> Epoch:
        with self._lock:
            return Epoch(self._epochs.token(thread_id), self._entries.held(thread_id))

    async def aepoch(self, thread_id: str) -> Epoch:
        return self.epoch(thread_id)

    def delete_thread(self, thread_id: str) -> None:
        with self._lock:
            self._epochs.advance(thread_id)
            for key in self._entries.held(thread_id):
                del self._entries[key]

    async def adelete_thread(self, thread_id: str) -> None:
        self.delete_thread(thread_id)

    def stats(self) -> CacheStats:
        with self._lock:
            size = int(self._entries.currsize)
            return replace(self._tally.stats(), entries=len(self._entries), bytes=size)

    async def astats(self) -> CacheStats:
        return self.stats()

    def close(self) -> None:
        with self._lock:
            self._entries.clear()

    async def aclose(self) -> None:
        self.close()

    def _store(self, key: HistoryKey, entry: StoredHistory) -> None:
        if entry.size > self._entries.maxsize:
            self._tally.add(refused=1)
            return
        self._entries[key] = entry
        self._tally.add(stored=1)
        while len(self._entries) > self._max_entries:
            self._entries.popitem()


class _Entries(LRUCache[HistoryKey, StoredHistory]):
    """Least recently used first out, by bytes, with an index by thread."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes, getsizeof=lambda entry: entry.size)
        self._by_thread: defaultdict[str, set[HistoryKey]] = defaultdict(set)

    def __setitem__(self, key: HistoryKey, entry: StoredHistory) -> None:
        super().__setitem__(key, entry)
        self._by_thread[key.thread_id].add(key)

    def __delitem__(self, key: HistoryKey) -> None:
        super().__delitem__(key)
        keys = self._by_thread[key.thread_id]
        keys.remove(key)
        if not keys:
            del self._by_thread[key.thread_id]

    def clear(self) -> None:
        super().clear()
        self._by_thread.clear()

    def held(self, thread_id: str) -> frozenset[HistoryKey]:
        return frozenset(self._by_thread.get(thread_id, ()))


class _Epochs:
    """Number the purges.

    A thread whose purge was forgotten counts as purged with the last one forgotten: never too
    early, which would let an old reader put entries back.
    """

    def __init__(self) -> None:
        self._purges = 0
        self._forgotten = 0
        self._last: dict[str, int] = {}

    def token(self, thread_id: str) -> str:
        return str(self._last.get(thread_id, self._forgotten))

    def advance(self, thread_id: str) -> None:
        self._purges += 1
        self._last.pop(thread_id, None)
        self._last[thread_id] = self._purges
        if len(self._last) > _EPOCHS_KEPT:
            self._forgotten = self._last.pop(next(iter(self._last)))
