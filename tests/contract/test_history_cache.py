"""What every history cache promises, in memory and in Redis, on both faces."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.base import DeltaChannelHistory
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver

from retaining_saver.caches import (
    Epoch,
    HistoryCache,
    HistoryKey,
    MemoryHistoryCache,
    RedisHistoryCache,
    StoredHistory,
)
from retaining_saver.caches.redis import database_of
from tests.support.faces import FACES, SYNC, Face

CACHES = ("memory", "redis", "redis-blocking-client", "redis-asyncio-client")
SERDE = JsonPlusSerializer()
ODD = "a:b/{c}*? \n\x00é\ud800%"


def history(*texts: str) -> DeltaChannelHistory:
    return {"writes": [("task", "messages", [HumanMessage(text)]) for text in texts]}


def entry(*texts: str) -> StoredHistory:
    return StoredHistory.of(history(*texts), SERDE)


def key(thread_id: str, checkpoint_id: str = "1", **other: str) -> HistoryKey:
    parts = {"checkpoint_ns": "", "channel": "messages", **other}
    return HistoryKey(thread_id, checkpoint_id=checkpoint_id, **parts)


@pytest.fixture
async def cache(
    request: pytest.FixtureRequest, redis_url: str, thread_id: str
) -> AsyncIterator[HistoryCache]:
    kind = request.param
    if kind == "memory":
        yield MemoryHistoryCache()
        return
    if kind == "redis-asyncio-client":
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            yield RedisHistoryCache(client, database=thread_id)
        return
    if kind == "redis-blocking-client":
        with redis.Redis.from_url(redis_url) as blocking:
            yield RedisHistoryCache(blocking, database=thread_id)
        return
    ours = RedisHistoryCache(redis_url, database=thread_id)
    yield ours
    await ours.aclose()


class On:
    """One face of a cache."""

    def __init__(self, face: Face, cache: HistoryCache) -> None:
        self._face = face
        self._cache = cache

    async def get(self, *keys: HistoryKey) -> dict[HistoryKey, DeltaChannelHistory]:
        found = await self._face(self._cache.get_many, self._cache.aget_many, keys)
        return {key: entry.thaw(SERDE, key.channel) for key, entry in found.items()}

    async def set(self, entries: dict[HistoryKey, StoredHistory], epoch: Epoch) -> bool:
        return await self._face(self._cache.set_many, self._cache.aset_many, entries, epoch)

    async def epoch(self, thread_id: str) -> Epoch:
        epoch = await self._face(self._cache.epoch, self._cache.aepoch, thread_id)
        assert epoch is not None
        return epoch

    async def delete(self, thread_id: str) -> None:
        await self._face(self._cache.delete_thread, self._cache.adelete_thread, thread_id)

    async def put(self, *keys: HistoryKey, text: str = "hello") -> bool:
        epoch = await self.epoch(keys[0].thread_id)
        return await self.set({key: entry(text) for key in keys}, epoch)


@pytest.fixture
def on(face: Face, cache: HistoryCache) -> On:
    return On(face, cache)


# An asyncio client has no blocking face; a test below says what happens then.
every_cache = pytest.mark.parametrize(
    ("cache", "face"),
    [(c, f) for c in CACHES for f in FACES if (c, f) != ("redis-asyncio-client", SYNC)],
    indirect=True,
    ids=str,
)


@every_cache
async def test_what_was_stored_comes_back_equal_in_one_lookup(on: On) -> None:
    one, two = key("t", "1"), key("t", "2", channel="log")
    seeded: DeltaChannelHistory = {"seed": {"a": [1]}, "writes": [("task", "log", None)]}
    epoch = await on.epoch("t")
    stored = {one: entry("hello"), two: StoredHistory.of(seeded, SERDE)}
    assert await on.set(stored, epoch)
    found = await on.get(one, two, key("t", "3"))
    assert {one: history("hello"), two: seeded} == found


@every_cache
async def test_every_part_of_the_key_tells_entries_apart(on: On) -> None:
    keys = [
        key("t"),
        key("t", "2"),
        key("t", channel="log"),
        key("t", checkpoint_ns="sub:1"),
        key("t:1"),
        key(ODD, ODD, channel=ODD, checkpoint_ns=ODD),
        key("t", "1:messages", channel=""),
    ]
    for number, each in enumerate(keys):
        await on.put(each, text=str(number))
    for number, each in enumerate(keys):
        found = (await on.get(each))[each]
        assert [[HumanMessage(str(number))]] == [write[2] for write in found["writes"]]
    assert frozenset({keys[5]}) == (await on.epoch(ODD)).held


@every_cache
async def test_a_purge_leaves_nothing_of_its_thread_and_all_of_the_others(on: On) -> None:
    gone = [key("gone", str(n), checkpoint_ns=ns) for n in range(3) for ns in ("", "sub")]
    kept = key("gone:not")
    await on.put(*gone)
    await on.put(kept)
    await on.delete("gone")
    assert {} == await on.get(*gone)
    assert frozenset() == (await on.epoch("gone")).held
    assert {kept: history("hello")} == await on.get(kept)


@every_cache
async def test_a_reader_from_before_a_purge_cannot_put_anything_back(on: On) -> None:
    before = await on.epoch("t")
    await on.delete("t")
    assert not await on.set({key("t"): entry("canary")}, before)
    assert {} == await on.get(key("t"))
    assert await on.put(key("t"), text="new")
    assert {key("t"): history("new")} == await on.get(key("t"))


@every_cache
async def test_a_purge_of_another_thread_refuses_nothing(on: On) -> None:
    before = await on.epoch("t")
    await on.delete("other")
    assert await on.set({key("t"): entry("hello")}, before)


@every_cache
async def test_the_epoch_lists_what_is_held(on: On) -> None:
    keys = {key("t", "1"), key("t", "2", checkpoint_ns="sub")}
    await on.put(*keys)
    assert keys == (await on.epoch("t")).held


@every_cache
async def test_changing_what_came_out_changes_nothing_inside(on: On) -> None:
    each = key("t")
    await on.put(each)
    first = (await on.get(each))[each]
    first["writes"][0][2][0].content = "changed"
    first["writes"][0][2].append("more")
    first["writes"].clear()
    assert {each: history("hello")} == await on.get(each)


@every_cache
async def test_changing_what_was_put_in_changes_nothing_inside(on: On) -> None:
    each, given = key("t"), history("hello")
    await on.set({each: StoredHistory.of(given, SERDE)}, await on.epoch("t"))
    given["writes"][0][2][0].content = "changed"
    given["writes"].clear()
    assert {each: history("hello")} == await on.get(each)


@every_cache
async def test_hits_and_misses_are_counted(on: On, cache: HistoryCache, face: Face) -> None:
    await on.put(key("t"))
    await on.get(key("t"), key("t", "2"))
    stats = await face(cache.stats, cache.astats)
    assert (1, 1, 1) == (stats.hits, stats.misses, stats.stored)


# Memory.


async def put(cache: MemoryHistoryCache, each: HistoryKey, stored: StoredHistory) -> None:
    assert cache.set_many({each: stored}, cache.epoch(each.thread_id))


async def test_memory_is_bounded_by_entries_and_drops_the_least_recently_used() -> None:
    cache = MemoryHistoryCache(max_entries=2)
    await put(cache, key("a"), entry("a"))
    await put(cache, key("b"), entry("b"))
    cache.get_many([key("a")])
    await put(cache, key("c"), entry("c"))
    assert {key("a"), key("c")} == set(cache.get_many([key("a"), key("b"), key("c")]))
    assert frozenset() == cache.epoch("b").held


async def test_memory_is_bounded_by_bytes() -> None:
    one = entry("x" * 1000)
    cache = MemoryHistoryCache(max_bytes=3 * one.size)
    for number in range(10):
        await put(cache, key(str(number)), one)
    assert (3, 3 * one.size) == (cache.stats().entries, cache.stats().bytes)


async def test_memory_does_not_keep_what_is_larger_than_all_of_it() -> None:
    cache = MemoryHistoryCache(max_bytes=entry("x" * 1000).size)
    await put(cache, key("small"), entry("x"))
    await put(cache, key("large"), entry("x" * 5000))
    assert {key("small")} == set(cache.get_many([key("small"), key("large")]))


async def test_a_thread_whose_purge_was_forgotten_still_refuses_old_readers() -> None:
    cache = MemoryHistoryCache()
    before = cache.epoch("t")
    cache.delete_thread("t")
    for number in range(5000):
        cache.delete_thread(f"other-{number}")
    assert not cache.set_many({key("t"): entry("canary")}, before)
    await put(cache, key("t"), entry("new"))


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (True, TypeError), ("5", TypeError)])
@pytest.mark.parametrize("option", ["max_entries", "max_bytes"])
def test_memory_refuses_impossible_bounds(option: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=option):
        MemoryHistoryCache(**{option: value})


# Redis.


@pytest.fixture
def scan(redis_url: str) -> Iterator[Callable[[], dict[bytes, Any]]]:
    """Everything in Redis: keys, and values of both types that are used."""
    with redis.Redis.from_url(redis_url) as client:

        def everything() -> dict[bytes, Any]:
            return {
                name: client.hgetall(name) if client.type(name) == b"hash" else client.get(name)
                for name in client.scan_iter()
            }

        yield everything


def stored_in(cache: RedisHistoryCache, each: HistoryKey, stored: StoredHistory) -> None:
    epoch = cache.epoch(each.thread_id)
    assert epoch is not None
    assert cache.set_many({each: stored}, epoch)


@pytest.fixture
def shared(redis_url: str, thread_id: str) -> Iterator[RedisHistoryCache]:
    cache = RedisHistoryCache(redis_url, database=thread_id)
    yield cache
    cache.close()


def test_two_processes_share_what_one_of_them_stored(
    shared: RedisHistoryCache, redis_url: str, thread_id: str
) -> None:
    other = RedisHistoryCache(redis_url, database=thread_id)
    stored_in(shared, key("t"), entry("hello"))
    found = other.get_many([key("t")])[key("t")]
    assert history("hello") == found.thaw(SERDE, "messages")
    other.delete_thread("t")
    assert {} == shared.get_many([key("t")])
    other.close()


def test_databases_in_one_redis_do_not_meet(shared: RedisHistoryCache, redis_url: str) -> None:
    other = RedisHistoryCache(redis_url, database="other")
    stored_in(shared, key("t"), entry("hello"))
    assert {} == other.get_many([key("t")])
    other.delete_thread("t")
    assert key("t") in shared.get_many([key("t")])
    other.close()


def test_nothing_of_a_purged_thread_is_anywhere_in_redis(
    shared: RedisHistoryCache, scan: Callable[[], dict[bytes, Any]]
) -> None:
    canary = f"canary{uuid.uuid4().hex}"
    stored_in(shared, key("t"), entry(canary))
    assert canary in repr(scan())
    shared.delete_thread("t")
    assert canary not in repr(scan())


def test_every_key_expires(redis_url: str, thread_id: str) -> None:
    cache = RedisHistoryCache(redis_url, database=thread_id, ttl=timedelta(seconds=90))
    stored_in(cache, key("t"), entry("hello"))
    cache.delete_thread("t")
    stored_in(cache, key("t"), entry("hello"))
    with redis.Redis.from_url(redis_url) as client:
        names = list(client.scan_iter(f"*{thread_id}*"))
        left = {name.rsplit(b":", 1)[1].decode(): client.ttl(name) for name in names}
    assert {"epoch", "histories"} == set(left)
    assert 80 < left["histories"] <= 90
    # Longer than any reader that began before the purge.
    assert left["epoch"] > 3600
    cache.close()


def test_a_running_thread_does_not_fill_redis(redis_url: str, thread_id: str) -> None:
    cache = RedisHistoryCache(redis_url, database=thread_id, max_per_thread=3)
    keys = [key("t", str(number)) for number in range(10)]
    for each in keys:
        stored_in(cache, each, entry("hello"))
    assert set(keys[-3:]) == set(cache.get_many(keys))
    epoch = cache.epoch("t")
    assert epoch is not None
    assert set(keys[-3:]) == epoch.held
    with redis.Redis.from_url(redis_url) as client:
        (name,) = client.scan_iter(f"*{thread_id}*:histories")
        assert 4 == client.hlen(name)
    cache.close()


def test_the_values_of_an_encrypted_saver_are_encrypted(
    shared: RedisHistoryCache, scan: Callable[[], dict[bytes, Any]]
) -> None:
    secret = f"secret{uuid.uuid4().hex}"
    serde = EncryptedSerializer.from_pycryptodome_aes(key=b"0123456789abcdef")
    stored_in(shared, key("t"), StoredHistory.of(history(secret), serde))
    assert secret not in repr(scan())
    found = shared.get_many([key("t")])[key("t")]
    assert history(secret) == found.thaw(serde, "messages")


def test_an_encrypted_saver_does_not_believe_plain_values(shared: RedisHistoryCache) -> None:
    serde = EncryptedSerializer.from_pycryptodome_aes(key=b"0123456789abcdef")
    stored_in(shared, key("t"), entry("forged"))
    found = shared.get_many([key("t")])[key("t")]
    with pytest.raises(ValueError, match="not encrypted"):
        found.thaw(serde, "messages")


class OnlyPickles:
    """A value that msgpack cannot write."""

    def __reduce__(self) -> tuple[type[Exception], tuple[str]]:
        return AssertionError, ("unpickled",)


def test_no_pickle_is_written_or_read(
    shared: RedisHistoryCache, redis_url: str, thread_id: str
) -> None:
    serde = JsonPlusSerializer(pickle_fallback=True)
    pickled = StoredHistory.packed(*serde.dumps_typed(OnlyPickles()))
    epoch = shared.epoch("t")
    assert epoch is not None
    assert not shared.set_many({key("t"): pickled}, epoch)
    stored_in(shared, key("t"), entry("hello"))
    with redis.Redis.from_url(redis_url) as client:
        (name,) = client.scan_iter(f"*{thread_id}*:histories")
        (field,) = (f for f in client.hkeys(name) if f != b"order")
        client.hset(name, field, b"pickle\0" + pickled.pack()[1])
    assert {} == shared.get_many([key("t")])


def test_a_value_in_an_unknown_form_is_a_miss(
    shared: RedisHistoryCache, redis_url: str, thread_id: str
) -> None:
    stored_in(shared, key("t"), entry("hello"))
    with redis.Redis.from_url(redis_url) as client:
        (name,) = client.scan_iter(f"*{thread_id}*:histories")
        (field,) = (f for f in client.hkeys(name) if f != b"order")
        for broken in (b"", b"\0rest", b"\xff\xfe\0rest"):
            client.hset(name, field, broken)
            assert {} == shared.get_many([key("t")])


class DyingRedis:
    """A Redis server of this test's own, which it can stop and start."""

    def __init__(self, executable: str, directory: Any) -> None:
        self._command = [executable, "--port", "0", "--save", "", "--dir", str(directory)]
        self._socket = directory / "own.socket"
        self.url = f"unix://{self._socket}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [*self._command, "--unixsocket", str(self._socket)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        with redis.Redis.from_url(self.url) as client:
            for _ in range(500):
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@pytest.fixture
def dying(tmp_path: Any) -> Iterator[DyingRedis]:
    from tests.support.servers import _redis_executable

    server = DyingRedis(_redis_executable(), tmp_path)
    server.start()
    yield server
    server.stop()


async def test_a_redis_that_is_down_costs_hits_and_one_log_line(
    face: Face, dying: DyingRedis, caplog: pytest.LogCaptureFixture
) -> None:
    cache = RedisHistoryCache(dying.url, database="mine")
    on = On(face, cache)
    await on.put(key("t"))
    before = await on.epoch("t")
    dying.stop()
    with caplog.at_level(logging.WARNING, "retaining_saver"):
        for _ in range(3):
            assert {} == await on.get(key("t"))
            assert await face(cache.epoch, cache.aepoch, "t") is None
            assert not await on.set({key("t"): entry("hello")}, before)
    assert 1 == len(caplog.records)
    assert dying.url not in caplog.text
    await cache.aclose()


async def test_a_purge_that_fails_raises(face: Face, dying: DyingRedis) -> None:
    cache = RedisHistoryCache(dying.url, database="mine")
    on = On(face, cache)
    dying.stop()
    with pytest.raises(redis.ConnectionError):
        await on.delete("t")
    # Also while reads are paused: a purge is never skipped.
    await on.get(key("t"))
    with pytest.raises(redis.ConnectionError):
        await on.delete("t")
    await cache.aclose()


async def test_a_redis_that_comes_back_is_used_again(
    face: Face, dying: DyingRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retaining_saver.caches.redis.PAUSE", 0.0)
    cache = RedisHistoryCache(dying.url, database="mine")
    on = On(face, cache)
    dying.stop()
    assert {} == await on.get(key("t"))
    dying.start()
    await on.put(key("t"))
    assert {key("t"): history("hello")} == await on.get(key("t"))
    await cache.aclose()


def test_an_asyncio_client_has_no_blocking_face_and_says_so() -> None:
    cache = RedisHistoryCache(redis.asyncio.Redis(), database="mine")
    assert {} == cache.get_many([key("t")])
    with pytest.raises(RuntimeError, match="give it a URL"):
        cache.delete_thread("t")


async def test_one_cache_serves_one_event_loop_after_the_other(
    redis_url: str, thread_id: str
) -> None:
    cache = RedisHistoryCache(redis_url, database=thread_id)

    async def use() -> int:
        await On(Face("async"), cache).put(key("t"))
        found = await cache.aget_many([key("t")])
        await cache.aclose()
        return len(found)

    for _ in range(2):
        assert 1 == await asyncio.to_thread(asyncio.run, use())


def test_clients_that_decode_are_refused(redis_url: str) -> None:
    with pytest.raises(ValueError, match="decode_responses"):
        RedisHistoryCache(redis.Redis(decode_responses=True))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"ttl": 60}, TypeError),
        ({"ttl": timedelta(0)}, ValueError),
        ({"max_per_thread": 0}, ValueError),
        ({"max_per_thread": True}, TypeError),
    ],
)
def test_impossible_options_are_refused(options: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        RedisHistoryCache("redis://localhost", **options)


def test_neither_keys_nor_repr_hold_credentials(postgres_url: str) -> None:
    cache = RedisHistoryCache("redis://user:hunter2@localhost/0")
    with PostgresSaver.from_conn_string(postgres_url) as saver:
        bound = cache.for_saver(saver)
        assert bound.for_saver(saver)._keys("t") == bound._keys("t")
    assert "hunter2" not in repr(bound) + repr(cache)


def test_a_database_is_named_without_its_password() -> None:
    class Pool:
        conninfo = "postgresql://ann:hunter2@db.example:6432/chats"

    class Other(Pool):
        conninfo = "postgresql://bob:secret@db.example:6432/chats"

    class Elsewhere(Pool):
        conninfo = "postgresql://ann:hunter2@db.example:6432/chats?options=-csearch_path%3Dx"

    names = []
    for pool in (Pool, Other, Elsewhere):
        saver: Any = InMemorySaver()
        saver.conn = pool()
        names.append(database_of(saver))
    assert names[0] == names[1] != names[2]
    assert names[0].startswith("chats-")
    assert "hunter2" not in names[0]


def test_a_sqlite_database_is_named_by_its_file(tmp_path: Path) -> None:
    names = []
    for file in ("one.sqlite", "one.sqlite", "other.sqlite", ":memory:", ":memory:"):
        where = file if file == ":memory:" else str(tmp_path / file)
        with SqliteSaver.from_conn_string(where) as saver:
            names.append(database_of(saver))
    assert names[0] == names[1] != names[2]
    assert names[3] != names[4]
    assert str(tmp_path) not in names[0]


def test_a_saver_that_does_not_say_its_database_shares_with_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = RedisHistoryCache("redis://localhost")
    one, other = (cache.for_saver(InMemorySaver())._keys("t") for _ in range(2))
    assert one != other
    assert "database=" in caplog.text
    named = RedisHistoryCache("redis://localhost", database="mine")
    assert named is named.for_saver(InMemorySaver())
