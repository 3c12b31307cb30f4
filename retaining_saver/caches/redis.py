"""A cache of delta histories in Redis, shared by any number of processes and databases.

Two keys per thread, in one slot of a cluster::

    retaining-saver:1:{<database>:<thread>}:epoch      what the thread's last purge left
    retaining-saver:1:{<database>:<thread>}:histories  a hash: one field per history, and "order"

One hash holds everything that is cached of a thread: a purge is one ``UNLINK`` that cannot miss a
key, and no eviction can separate an index from what it lists. ``order`` names the fields, oldest
first. Parts of keys and fields are percent-encoded. Values are the tag and the bytes that the
saver's own serializer made: encrypted with an encrypted saver, and never a pickle.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from datetime import timedelta
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote_to_bytes
from weakref import WeakKeyDictionary

from langgraph.checkpoint.base import BaseCheckpointSaver

from retaining_saver.caches.base import CacheStats, Epoch, HistoryKey, Tally, positive
from retaining_saver.caches.history import StoredHistory

if TYPE_CHECKING:
    from redis import Redis
    from redis.asyncio import Redis as AsyncRedis

logger = logging.getLogger("retaining_saver")

FORMAT = 1
PAUSE = 5.0
"""Seconds without lookups after a failure: a Redis that is down must not slow every read."""

# Refused if the thread was purged since; then adds the fields, drops the oldest beyond the limit.
_SET = """
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
local order, added = {}, {}
for i = 4, #ARGV, 2 do
  redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
  added[ARGV[i]] = true
end
for field in string.gmatch(redis.call('HGET', KEYS[2], 'order') or '', '[^ ]+') do
  if not added[field] then order[#order + 1] = field end
end
for i = 4, #ARGV, 2 do order[#order + 1] = ARGV[i] end
while #order > tonumber(ARGV[3]) do redis.call('HDEL', KEYS[2], table.remove(order, 1)) end
redis.call('HSET', KEYS[2], 'order', table.concat(order, ' '))
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return 1
"""
_PURGE = """
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('UNLINK', KEYS[2])
return 1
"""
_EPOCH = "return {redis.call('GET', KEYS[1]) or '', redis.call('HGET', KEYS[2], 'order') or ''}"


class RedisHistoryCache:
    """Remember histories for every process that names the same Redis and the same database.

    - ``url_or_client`` is a Redis URL, a ``redis.Redis`` or a ``redis.asyncio.Redis``. A URL
      serves both faces; a blocking client serves the awaitable face from a worker thread; an
      asyncio client serves the awaitable face only. Clients that decode responses are refused.
    - A thread's entries go ``ttl`` after the last one was stored. At most ``max_per_thread`` are
      kept, oldest first out.
    - ``database`` tells apart databases that share one Redis. Without it, it is taken from the
      saver's connection, without user and password: processes that connect under different host
      names must give one, and those whose saver does not say (``AsyncSqliteSaver``).
    - A Redis that is down costs hits and one log line per outage. A purge that fails raises.

    Needs the extra ``redis``. Close it, on each event loop that used it, with ``aclose``.
    """

    def __init__(
        self,
        url_or_client: str | Redis | AsyncRedis,
        *,
        ttl: timedelta = timedelta(hours=1),
        database: str | None = None,
        max_per_thread: int = 32,
    ) -> None:
        if not isinstance(ttl, timedelta):
            raise TypeError(f"ttl must be a timedelta, not {ttl!r}")
        if ttl < timedelta(seconds=1):
            raise ValueError(f"ttl must be at least one second, not {ttl}")
        self._ttl = ttl
        self._max_per_thread = positive("max_per_thread", max_per_thread)
        self._database = database
        self._clients = _Clients(url_or_client)
        self._outage = _Outage(self._clients.failures)
        self._tally = Tally()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(database={self._database!r})"

    def for_saver(self, saver: BaseCheckpointSaver[Any]) -> RedisHistoryCache:
        if self._database is not None:
            return self
        bound = copy(self)
        bound._database = database_of(saver)
        return bound

    def get_many(self, keys: Collection[HistoryKey]) -> Mapping[HistoryKey, StoredHistory]:
        values: Any = None
        with self._outage.tolerated() as up:
            if up and keys:
                values = self._clients.execute(*self._get(keys))
        return self._found(keys, values)

    async def aget_many(self, keys: Collection[HistoryKey]) -> Mapping[HistoryKey, StoredHistory]:
        values: Any = None
        with self._outage.tolerated() as up:
            if up and keys:
                values = await self._clients.aexecute(*self._get(keys))
        return self._found(keys, values)

    def set_many(self, entries: Mapping[HistoryKey, StoredHistory], epoch: Epoch) -> bool:
        command = self._set(entries, epoch)
        accepted: Any = None
        with self._outage.tolerated() as up:
            if up and command:
                accepted = self._clients.execute(*command)
        return self._accepted(entries, accepted)

    async def aset_many(self, entries: Mapping[HistoryKey, StoredHistory], epoch: Epoch) -> bool:
        command = self._set(entries, epoch)
        accepted: Any = None
        with self._outage.tolerated() as up:
            if up and command:
                accepted = await self._clients.aexecute(*command)
        return self._accepted(entries, accepted)

    def epoch(self, thread_id: str) -> Epoch | None:
        reply: Any = None
        with self._outage.tolerated() as up:
            if up:
                reply = self._clients.execute("EVAL", _EPOCH, 2, *self._keys(thread_id))
        return _epoch(thread_id, reply)

    async def aepoch(self, thread_id: str) -> Epoch | None:
        reply: Any = None
        with self._outage.tolerated() as up:
            if up:
                reply = await self._clients.aexecute("EVAL", _EPOCH, 2, *self._keys(thread_id))
        return _epoch(thread_id, reply)

    def delete_thread(self, thread_id: str) -> None:
        self._clients.execute(*self._purge(thread_id))

    async def adelete_thread(self, thread_id: str) -> None:
        await self._clients.aexecute(*self._purge(thread_id))

    def stats(self) -> CacheStats:
        return replace(self._tally.stats(), failures=self._outage.failed)

    async def astats(self) -> CacheStats:
        return self.stats()

    def close(self) -> None:
        self._clients.close()

    async def aclose(self) -> None:
        await self._clients.aclose()

    # Commands and what their replies mean. No effects.

    def _keys(self, thread_id: str) -> tuple[str, str]:
        tag = f"{_escaped(self._database or '')}:{_escaped(thread_id)}"
        prefix = f"retaining-saver:{FORMAT}:{{{tag}}}"
        return f"{prefix}:epoch", f"{prefix}:histories"

    def _get(self, keys: Collection[HistoryKey]) -> tuple[Any, ...]:
        return "HMGET", self._keys(_thread_of(keys))[1], *map(_field, keys)

    def _set(
        self, entries: Mapping[HistoryKey, StoredHistory], epoch: Epoch
    ) -> tuple[Any, ...] | None:
        packed = {_field(key): entry.pack() for key, entry in entries.items()}
        fields = [
            part
            for field, (tag, data) in packed.items()
            if not _is_pickle(tag)
            for part in (field, tag.encode() + b"\0" + data)
        ]
        if not fields:
            return None
        keys = self._keys(_thread_of(entries))
        return "EVAL", _SET, 2, *keys, epoch.token, _ms(self._ttl), self._max_per_thread, *fields

    def _purge(self, thread_id: str) -> tuple[Any, ...]:
        # Kept longer than any reader takes, so that none that began before is believed again.
        kept = _ms(max(self._ttl, timedelta(days=1)))
        return "EVAL", _PURGE, 2, *self._keys(thread_id), uuid.uuid4().hex, kept

    def _found(
        self, keys: Collection[HistoryKey], values: list[bytes | None] | None
    ) -> Mapping[HistoryKey, StoredHistory]:
        found: dict[HistoryKey, StoredHistory] = {}
        for key, value in zip(keys, values or (), strict=False):
            written, _, data = (value or b"").partition(b"\0")
            tag = written.decode("ascii", "ignore")
            if tag and not _is_pickle(tag):
                found[key] = StoredHistory.packed(tag, data)
        self._tally.add(hits=len(found), misses=len(keys) - len(found))
        return found

    def _accepted(self, entries: Mapping[HistoryKey, StoredHistory], reply: Any) -> bool:
        self._tally.add(**{"stored" if reply else "refused": len(entries)})
        return bool(reply)


def _epoch(thread_id: str, reply: list[bytes] | None) -> Epoch | None:
    if reply is None:
        return None
    token, order = reply
    held = [_key(thread_id, field) for field in order.decode().split()]
    return Epoch(token.decode(), frozenset(held))


def _thread_of(keys: Collection[HistoryKey]) -> str:
    (thread_id,) = {key.thread_id for key in keys}
    return thread_id


def _field(key: HistoryKey) -> str:
    return ":".join(map(_escaped, (key.checkpoint_ns, key.checkpoint_id, key.channel)))


def _key(thread_id: str, field: str) -> HistoryKey:
    checkpoint_ns, checkpoint_id, channel = map(_unescaped, field.split(":"))
    return HistoryKey(thread_id, checkpoint_ns, checkpoint_id, channel)


def _escaped(text: str) -> str:
    # Ids are data and may be anything that a str can be, lone surrogates included.
    return quote(text.encode("utf-8", "surrogatepass"), safe="")


def _unescaped(text: str) -> str:
    return unquote_to_bytes(text).decode("utf-8", "surrogatepass")


def _is_pickle(tag: str) -> bool:
    """Loading a pickle runs what is in it, and others may be able to write to a shared Redis."""
    return tag.startswith("pickle")


def _ms(duration: timedelta) -> int:
    return int(duration.total_seconds() * 1000)


class _Outage:
    """Go on without Redis while it is down: one log line, and no lookup for a while."""

    def __init__(self, failures: tuple[type[Exception], ...]) -> None:
        self.failed = 0
        self._failures = failures
        self._until = 0.0
        self._lock = threading.Lock()

    @contextmanager
    def tolerated(self) -> Iterator[bool]:
        """Tell whether to try; note and swallow the failure if it does not succeed."""
        if time.monotonic() < self._until:
            yield False
            return
        try:
            yield True
        except self._failures as error:
            self._begin(error)
        else:
            self._until = 0.0

    def _begin(self, error: Exception) -> None:
        with self._lock:
            is_new = self._until == 0.0
            self._until = time.monotonic() + PAUSE
            self.failed += 1
        if is_new:
            # The error's text may repeat a connection string.
            logger.warning(
                "The Redis history cache failed (%s): reading without it until it answers",
                type(error).__name__,
            )


class _NoBlockingClientError(RuntimeError):
    """Blocking code wants to use a cache that was given an asyncio client."""


class _Clients:
    """The blocking client, and one asyncio client for each event loop, as connections need."""

    def __init__(self, url_or_client: str | Redis | AsyncRedis) -> None:
        try:
            import redis
            import redis.asyncio
        except ImportError as error:
            raise ImportError(
                "RedisHistoryCache needs redis: pip install 'retaining-saver[redis]'"
            ) from error
        self.failures: tuple[type[Exception], ...] = (
            *(redis.RedisError, OSError, asyncio.TimeoutError),
            _NoBlockingClientError,
        )
        # ``execute_command`` has no types in redis, so the clients have none here.
        self._url: str | None = None
        self._blocking: Any = None
        self._given: Any = None
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = WeakKeyDictionary()
        self._lock = threading.Lock()
        if isinstance(url_or_client, str):
            self._url = url_or_client
            self._blocking = _connected(redis.Redis, self._url)
        elif isinstance(url_or_client, redis.asyncio.Redis):
            self._given = _reads_bytes(url_or_client)
        else:
            self._blocking = _reads_bytes(url_or_client)

    def execute(self, *command: Any) -> Any:
        if self._blocking is None:
            raise _NoBlockingClientError(
                "This RedisHistoryCache was given an asyncio client and is used from blocking "
                "code; give it a URL, which serves both."
            )
        return self._blocking.execute_command(*command)

    async def aexecute(self, *command: Any) -> Any:
        if self._given is not None:
            return await self._given.execute_command(*command)
        if self._url is None:
            return await asyncio.to_thread(self.execute, *command)
        return await self._here(self._url).execute_command(*command)

    def close(self) -> None:
        """Close the blocking client, if it is ours."""
        if self._url is not None and self._blocking is not None:
            self._blocking.close()

    async def aclose(self) -> None:
        """Close all of ours that this event loop can close."""
        with self._lock:
            client = self._by_loop.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()
        self.close()

    def _here(self, url: str) -> Any:
        import redis.asyncio

        loop = asyncio.get_running_loop()
        with self._lock:
            client = self._by_loop.get(loop)
            if client is None:
                client = self._by_loop[loop] = _connected(redis.asyncio.Redis, url)
            return client


def _connected(kind: Any, url: str) -> Any:
    """Make a client that gives up soon; what ``url`` says goes before."""
    return _reads_bytes(kind.from_url(url, socket_timeout=2, socket_connect_timeout=2))


def _reads_bytes(client: Any) -> Any:
    if client.connection_pool.connection_kwargs.get("decode_responses"):
        raise ValueError(
            "A Redis client with decode_responses=True cannot hold histories, which are bytes; "
            "give RedisHistoryCache another client or a URL."
        )
    return client


def database_of(saver: BaseCheckpointSaver[Any]) -> str:
    """Name the database behind a saver by what its connection says, without secrets.

    Postgres is named by where it is, SQLite by its file. A saver that does not say gets a name that
    nobody else has: its histories are cached, but shared with no other process.
    """
    connection = getattr(saver, "conn", None)
    if isinstance(connection, sqlite3.Connection) and (path := _file_of(connection)):
        return f"sqlite-{sha256(path.encode()).hexdigest()[:12]}"
    info = getattr(connection, "info", None)
    settings: dict[str, Any] | None = None
    if info is not None and hasattr(info, "get_parameters"):
        settings = {"host": info.host, "port": info.port, **info.get_parameters()}
    elif isinstance(conninfo := getattr(connection, "conninfo", None), str):
        from psycopg.conninfo import conninfo_to_dict

        settings = conninfo_to_dict(conninfo)
    if settings is None:
        logger.warning(
            "RedisHistoryCache cannot tell which database %s uses, so no other process shares its "
            "entries; give it a name: RedisHistoryCache(..., database='...')",
            type(saver).__name__,
        )
        return f"private-{uuid.uuid4().hex}"
    # The user names the database where nothing else does.
    name = str(settings.get("dbname") or settings.get("user") or "")
    where = [str(settings.get(key) or default) for key, default in _WHERE]
    return f"{name}-{sha256(repr([name, *where]).encode()).hexdigest()[:12]}"


def _file_of(connection: sqlite3.Connection) -> str | None:
    """Return the path of a SQLite database, ``None`` for one in memory."""
    try:
        rows = connection.execute("PRAGMA database_list").fetchall()
        return next((os.path.realpath(row[2]) for row in rows if row[1] == "main" and row[2]), None)
    except (sqlite3.Error, LookupError):
        # Made in another thread, closed, or with rows of another form.
        return None


_WHERE = (("host", ""), ("hostaddr", ""), ("port", "5432"), ("service", ""), ("options", ""))
