"""Caches of delta histories."""

from retaining_saver.caches.base import CacheStats, Epoch, HistoryCache, HistoryKey
from retaining_saver.caches.history import StoredHistory
from retaining_saver.caches.memory import MemoryHistoryCache
from retaining_saver.caches.redis import RedisHistoryCache

__all__ = [
    "CacheStats",
    "Epoch",
    "HistoryCache",
    "HistoryKey",
    "MemoryHistoryCache",
    "RedisHistoryCache",
    "StoredHistory",
]
