"""What every registry of pins promises, on every kind of store and both faces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import datetime, timedelta, timezone
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from langgraph.store.base import BaseStore
from langgraph.store.memory import InMemoryStore
from langgraph.store.postgres import PostgresStore
from langgraph.store.postgres.aio import AsyncPostgresStore
from langgraph.store.sqlite import SqliteStore
from langgraph.store.sqlite.aio import AsyncSqliteStore

from retaining_saver.pins import MemoryPins, Pin, PinRegistry, StorePins
from retaining_saver.records import Ref
from tests.support.faces import ASYNC, FACES, SYNC, Face

NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=timezone.utc)
MINUTE = timedelta(minutes=1)

STORES = ("store_memory", "store_sqlite", "store_asqlite", "store_pg", "store_apg")
# This store has no asynchronous face.
KINDS_AND_FACES = [
    (kind, face)
    for kind in ("memory", *STORES)
    for face in FACES
    if (kind, face) != ("store_sqlite", ASYNC)
]


@pytest.fixture(params=KINDS_AND_FACES, ids=lambda param: f"{param[0]}-{param[1]}")
async def registry(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[tuple[PinRegistry, Face]]:
    kind, face = request.param
    if kind == "memory":
        yield MemoryPins(), face
        return
    async with AsyncExitStack() as stack:
        yield StorePins(await opened(kind, request, tmp_path, stack)), face


async def opened(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, stack: AsyncExitStack
) -> BaseStore:
    if kind == "store_memory":
        return InMemoryStore()
    if kind == "store_sqlite":
        store = stack.enter_context(SqliteStore.from_conn_string(str(tmp_path / "store.db")))
        store.setup()
        return store
    if kind == "store_asqlite":
        path = str(tmp_path / "store.db")
        astore = await stack.enter_async_context(AsyncSqliteStore.from_conn_string(path))
        await astore.setup()
        return astore
    url: str = request.getfixturevalue("postgres_url")
    if kind == "store_pg":
        pg = stack.enter_context(PostgresStore.from_conn_string(url))
        pg.setup()
        return pg
    apg = await stack.enter_async_context(AsyncPostgresStore.from_conn_string(url))
    await apg.setup()
    return apg


class Asked:
    """One face of a registry."""

    def __init__(self, pins: PinRegistry, face: Face) -> None:
        self.pins = pins
        self.face = face

    async def pin(self, key: Ref, expires_at: datetime | None) -> None:
        await self.face(self.pins.pin, self.pins.apin, key, expires_at)

    async def unpin(self, key: Ref) -> None:
        await self.face(self.pins.unpin, self.pins.aunpin, key)

    async def pinned(self, thread_id: str, now: datetime = NOW) -> set[Pin]:
        pins = await self.face(self.pins.pinned, self.pins.apinned, thread_id, now)
        assert len(set(pins)) == len(pins)
        return set(pins)

    async def delete_thread(self, thread_id: str) -> None:
        await self.face(self.pins.delete_thread, self.pins.adelete_thread, thread_id)


@pytest.fixture
def asked(registry: tuple[PinRegistry, Face]) -> Asked:
    return Asked(*registry)


async def test_it_is_a_registry(asked: Asked) -> None:
    assert isinstance(asked.pins, PinRegistry)
    assert timedelta(minutes=15) == asked.pins.ttl


async def test_nothing_is_pinned_at_first(asked: Asked, thread_id: str) -> None:
    assert set() == await asked.pinned(thread_id)


async def test_a_pin_lasts_until_it_expires(asked: Asked, thread_id: str) -> None:
    await asked.pin(Ref(thread_id, "sub:1", "c"), NOW + MINUTE)
    pin = Pin(thread_id, "sub:1", "c", NOW + MINUTE)
    last = timedelta(microseconds=1)
    assert {pin} == await asked.pinned(thread_id)
    assert {pin} == await asked.pinned(thread_id, NOW + MINUTE - last)
    assert set() == await asked.pinned(thread_id, NOW + MINUTE)


async def test_a_pin_without_expiry_lasts(asked: Asked, thread_id: str) -> None:
    await asked.pin(Ref(thread_id, "", "c"), None)
    assert {Pin(thread_id, "", "c", None)} == await asked.pinned(
        thread_id, NOW + timedelta(days=100_000)
    )


async def test_pinning_again_keeps_the_later_expiry(asked: Asked, thread_id: str) -> None:
    for number, order in enumerate(permutations([NOW + MINUTE, NOW + 2 * MINUTE, NOW + MINUTE])):
        for expires_at in order:
            await asked.pin(Ref(thread_id, "", str(number)), expires_at)
    assert {Pin(thread_id, "", str(number), NOW + 2 * MINUTE) for number in range(6)} == (
        await asked.pinned(thread_id)
    )


@pytest.mark.parametrize("expiries", [(None, NOW + MINUTE), (NOW + MINUTE, None)])
async def test_no_expiry_is_the_latest_of_all(
    asked: Asked, thread_id: str, expiries: tuple[datetime | None, ...]
) -> None:
    for expires_at in expiries:
        await asked.pin(Ref(thread_id, "", "c"), expires_at)
    assert {Pin(thread_id, "", "c", None)} == await asked.pinned(thread_id, NOW + 2 * MINUTE)


async def test_pinning_at_once_keeps_the_latest_expiry(asked: Asked, thread_id: str) -> None:
    expiries = [NOW + n * MINUTE for n in (3, 1, 5, 2, 4)]
    await asyncio.gather(*(asked.pin(Ref(thread_id, "", "c"), until) for until in expiries))
    assert {Pin(thread_id, "", "c", NOW + 5 * MINUTE)} == await asked.pinned(thread_id)


async def test_an_expired_pin_can_be_made_again(asked: Asked, thread_id: str) -> None:
    await asked.pin(Ref(thread_id, "", "c"), NOW + MINUTE)
    assert set() == await asked.pinned(thread_id, NOW + 2 * MINUTE)
    await asked.pin(Ref(thread_id, "", "c"), NOW + 3 * MINUTE)
    assert {Pin(thread_id, "", "c", NOW + 3 * MINUTE)} == (
        await asked.pinned(thread_id, NOW + 2 * MINUTE)
    )


async def test_unpinning_takes_back_every_promise_about_one_checkpoint(
    asked: Asked, thread_id: str
) -> None:
    await asked.pin(Ref(thread_id, "", "c"), NOW + MINUTE)
    await asked.pin(Ref(thread_id, "", "c"), NOW + 2 * MINUTE)
    await asked.pin(Ref(thread_id, "", "d"), NOW + MINUTE)
    await asked.pin(Ref(thread_id, "sub", "c"), NOW + MINUTE)
    await asked.unpin(Ref(thread_id, "", "c"))
    await asked.unpin(Ref(thread_id, "", "c"))
    await asked.unpin(Ref(thread_id, "", "never pinned"))
    assert {
        Pin(thread_id, "", "d", NOW + MINUTE),
        Pin(thread_id, "sub", "c", NOW + MINUTE),
    } == await asked.pinned(thread_id)


async def test_deleting_a_thread_takes_back_its_pins_only(asked: Asked, thread_id: str) -> None:
    other = f"{thread_id}-2"
    await asked.pin(Ref(thread_id, "", "c"), None)
    await asked.pin(Ref(thread_id, "sub:1|sub:2", "c"), NOW + MINUTE)
    await asked.pin(Ref(other, "", "c"), None)
    await asked.delete_thread(thread_id)
    await asked.delete_thread(thread_id)
    assert set() == await asked.pinned(thread_id)
    assert {Pin(other, "", "c", None)} == await asked.pinned(other)


SUFFIXES = ("", ".", "a.b", "%", "_", "%2E", "A", "a", "ä/\\ '\";--", "x" * 900, "猫" * 500)


async def test_thread_ids_that_look_alike_are_kept_apart(asked: Asked, thread_id: str) -> None:
    names = {thread_id + suffix for suffix in SUFFIXES}
    names |= {thread_id[:-1] + "%", thread_id[:-1] + "_", thread_id.upper() + "X"}
    for number, name in enumerate(sorted(names)):
        await asked.pin(Ref(name, "", str(number)), None)
    for number, name in enumerate(sorted(names)):
        assert {Pin(name, "", str(number), None)} == await asked.pinned(name)
        await asked.delete_thread(name)


async def test_namespaces_and_ids_are_data(asked: Asked, thread_id: str) -> None:
    for label in ("a:1|b:2", "a.b", "%", "'", "ns" * 800):
        await asked.pin(Ref(thread_id, label, "c"), None)
        await asked.pin(Ref(thread_id, "c", label), None)
        assert {Pin(thread_id, label, "c", None), Pin(thread_id, "c", label, None)} == (
            await asked.pinned(thread_id)
        )
        await asked.unpin(Ref(thread_id, label, "c"))
        assert {Pin(thread_id, "c", label, None)} == await asked.pinned(thread_id)
        await asked.delete_thread(thread_id)


async def test_other_time_zones_are_the_same_time(asked: Asked, thread_id: str) -> None:
    east = timezone(timedelta(hours=5, minutes=30))
    await asked.pin(Ref(thread_id, "", "c"), (NOW + MINUTE).astimezone(east))
    assert {Pin(thread_id, "", "c", NOW + MINUTE)} == await asked.pinned(
        thread_id, NOW.astimezone(east)
    )


@pytest.mark.parametrize(
    ("expires_at", "error"),
    [(datetime(2026, 1, 2), ValueError), (MINUTE, TypeError), (0, TypeError)],  # noqa: DTZ001
)
async def test_an_expiry_that_is_no_time_is_refused(
    asked: Asked, thread_id: str, expires_at: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match="expires_at"):
        await asked.pin(Ref(thread_id, "", "c"), expires_at)
    assert set() == await asked.pinned(thread_id)


async def test_a_head_cannot_be_pinned(asked: Asked, thread_id: str) -> None:
    with pytest.raises(ValueError, match="no checkpoint_id"):
        await asked.pin(Ref(thread_id), NOW + MINUTE)
    with pytest.raises(ValueError, match="no checkpoint_id"):
        await asked.unpin(Ref(thread_id))


async def test_a_store_without_asynchronous_methods_says_so_itself(
    tmp_path: Path, thread_id: str
) -> None:
    with SqliteStore.from_conn_string(str(tmp_path / "store.db")) as store:
        store.setup()
        with pytest.raises(NotImplementedError, match="SqliteStore"):
            await StorePins(store).apinned(thread_id, NOW)


@pytest.mark.parametrize("kind", STORES)
async def test_workers_share_pins_through_a_store(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, thread_id: str
) -> None:
    async with AsyncExitStack() as stack:
        store = await opened(kind, request, tmp_path, stack)
        second_face = SYNC if kind == "store_sqlite" else ASYNC
        one = Asked(StorePins(store), SYNC)
        other = Asked(StorePins(store, ttl=None), second_face)
        assert other.pins.ttl is None
        await one.pin(Ref(thread_id, "", "c"), NOW + 2 * MINUTE)
        await other.pin(Ref(thread_id, "", "c"), NOW + MINUTE)
        expected = {Pin(thread_id, "", "c", NOW + 2 * MINUTE)}
        assert expected == await one.pinned(thread_id) == await other.pinned(thread_id)
        await other.unpin(Ref(thread_id, "", "c"))
        assert set() == await one.pinned(thread_id)
