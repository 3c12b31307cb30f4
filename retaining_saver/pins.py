"""Pins: promises that a checkpoint id stays addressable until a stated time."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, Protocol, TypeAlias, runtime_checkable
from urllib.parse import quote

from langgraph.store.base import BaseStore, SearchItem

from retaining_saver._steps import Steps, arun, call, run
from retaining_saver.errors import PinsFullError
from retaining_saver.records import Ref

logger = logging.getLogger("retaining_saver")

DEFAULT_TTL = timedelta(minutes=15)
SEARCH_LIMIT = 256
"""How many pins of a thread the first search of a store asks for."""
TIDIED_PER_READ = 32
"""How many outdated store items one read removes at most: a read stays bounded."""
_LABEL_LIMIT = 200

Spot: TypeAlias = "tuple[str, str]"  # checkpoint_ns, checkpoint_id


@dataclass(frozen=True, slots=True)
class Pin:
    """A checkpoint id that stays addressable until ``expires_at``, or ``None``: until unpinned."""

    thread_id: str
    checkpoint_ns: str
    checkpoint_id: str
    expires_at: datetime | None


@runtime_checkable
class PinRegistry(Protocol):
    """Keep pins.

    - ``ttl`` is how long a pin lives that a run's explicit read makes; ``None`` is for ever.
    - A pin that ``pin`` returned from is seen by the next ``pinned`` of every user of the registry.
    - Pinning again keeps the later expiry, whatever the order and however many do it at once.
    - Never drops a live pin to make room, because a lost pin is a lost resume target; ``pin``
      raises ``PinsFullError`` instead.
    - ``now`` is the present: pins that have expired by then may be removed for good.
    - Storage errors pass through; whoever cannot ask for pins must not delete.
    """

    @property
    def ttl(self) -> timedelta | None: ...

    def pin(self, key: Ref, expires_at: datetime | None) -> None:
        """Keep ``key``, which has an id, until ``expires_at`` (aware), or until unpinned."""
        ...

    async def apin(self, key: Ref, expires_at: datetime | None) -> None: ...

    def unpin(self, key: Ref) -> None:
        """Take back every promise about ``key``. Not an error without one."""
        ...

    async def aunpin(self, key: Ref) -> None: ...

    def pinned(self, thread_id: str, now: datetime) -> Sequence[Pin]:
        """List the thread's pins that expire after ``now``, one per checkpoint."""
        ...

    async def apinned(self, thread_id: str, now: datetime) -> Sequence[Pin]: ...

    def delete_thread(self, thread_id: str) -> None:
        """Take back every promise about the thread."""
        ...

    async def adelete_thread(self, thread_id: str) -> None: ...


def checked_ttl(ttl: timedelta | None) -> timedelta | None:
    """Return ``ttl`` if positive or ``None``; raise ``TypeError`` or ``ValueError`` if not."""
    if ttl is not None and not isinstance(ttl, timedelta):
        raise TypeError(f"ttl must be a timedelta or None, not {ttl!r}")
    if ttl is not None and ttl <= timedelta(0):
        raise ValueError(f"ttl must be positive, not {ttl}; None means no expiry")
    return ttl


class MemoryPins:
    """Keep pins in this process.

    At most ``max_pins``: where expired ones leave no room, a further pin is refused with
    ``PinsFullError``. Dropping the one that expires first would break a promise without a word.
    """

    def __init__(self, *, ttl: timedelta | None = DEFAULT_TTL, max_pins: int = 100_000) -> None:
        if isinstance(max_pins, bool) or not isinstance(max_pins, int):
            raise TypeError(f"max_pins must be an int, not {max_pins!r}")
        if max_pins < 1:
            raise ValueError(f"max_pins must be at least 1, not {max_pins}")
        self._ttl = checked_ttl(ttl)
        self._max_pins = max_pins
        self._lock = threading.Lock()
        self._threads: dict[str, dict[Spot, datetime | None]] = {}
        self._count = 0
        # The latest time that a caller stated: what had expired by then may make room.
        self._now = datetime.min.replace(tzinfo=timezone.utc)
        # No pin expires before this, so that a full registry is not searched at every pin.
        self._soonest: datetime | None = None

    @property
    def ttl(self) -> timedelta | None:
        return self._ttl

    def pin(self, key: Ref, expires_at: datetime | None) -> None:
        spot = _checked(key, expires_at)
        with self._lock:
            pins = self._threads.get(key.thread_id, {})
            if spot in pins:
                pins[spot] = _later(pins[spot], expires_at)
                return
            self._make_room()
            self._threads.setdefault(key.thread_id, {})[spot] = expires_at
            self._count += 1
            self._soonest = _sooner(self._soonest, expires_at)

    async def apin(self, key: Ref, expires_at: datetime | None) -> None:
        self.pin(key, expires_at)

    def unpin(self, key: Ref) -> None:
        spot = _checked(key)
        with self._lock:
            if spot in self._threads.get(key.thread_id, {}):
                self._remove(key.thread_id, [spot])

    async def aunpin(self, key: Ref) -> None:
        self.unpin(key)

    def pinned(self, thread_id: str, now: datetime) -> Sequence[Pin]:
        with self._lock:
            self._now = max(self._now, now)
            if thread_id not in self._threads:
                return []
            self._remove_expired(thread_id, now)
            left = self._threads.get(thread_id, {})
            return [Pin(thread_id, *spot, expires_at) for spot, expires_at in left.items()]

    async def apinned(self, thread_id: str, now: datetime) -> Sequence[Pin]:
        return self.pinned(thread_id, now)

    def delete_thread(self, thread_id: str) -> None:
        with self._lock:
            self._remove(thread_id, list(self._threads.get(thread_id, {})))

    async def adelete_thread(self, thread_id: str) -> None:
        self.delete_thread(thread_id)

    def __len__(self) -> int:
        return self._count

    def _make_room(self) -> None:
        if self._count < self._max_pins:
            return
        if self._soonest is not None and self._soonest <= self._now:
            for thread_id in list(self._threads):
                self._remove_expired(thread_id, self._now)
            self._soonest = None
            for pins in self._threads.values():
                for expires_at in pins.values():
                    self._soonest = _sooner(self._soonest, expires_at)
        if self._count >= self._max_pins:
            raise PinsFullError(
                f"All {self._max_pins} pins are live and none may be dropped. Use a shorter ttl, "
                f"a larger max_pins, or StorePins; unpin what is no longer needed."
            )

    def _remove_expired(self, thread_id: str, now: datetime) -> None:
        pins = self._threads[thread_id]
        self._remove(thread_id, [spot for spot, until in pins.items() if until and until <= now])

    def _remove(self, thread_id: str, spots: Iterable[Spot]) -> None:
        for spot in spots:
            del self._threads[thread_id][spot]
            self._count -= 1
        if not self._threads.get(thread_id, True):
            del self._threads[thread_id]


class StorePins:
    """Keep pins in a LangGraph store, shared by every process that uses the store.

    - One item per promise under ``("retaining_saver", "pins", <thread id, encoded>)``, so that
      pinning is a single ``put`` and no two workers can overwrite each other's later expiry.
    - Pins outlive a default TTL of the store. Items are never embedded.
    - Outdated items are removed by later reads, a few at a time; failing to is logged only.
    - Each face is the store's own: where the store has no synchronous one, neither have the pins.
    - The store must have been set up, and its ``search`` must honour ``limit``.
    """

    def __init__(self, store: BaseStore, *, ttl: timedelta | None = DEFAULT_TTL) -> None:
        self._ttl = checked_ttl(ttl)
        self._store = store

    @property
    def ttl(self) -> timedelta | None:
        return self._ttl

    def pin(self, key: Ref, expires_at: datetime | None) -> None:
        namespace, item_key, value = _item(key, expires_at)
        self._store.put(namespace, item_key, value, index=False, ttl=None)

    async def apin(self, key: Ref, expires_at: datetime | None) -> None:
        namespace, item_key, value = _item(key, expires_at)
        await self._store.aput(namespace, item_key, value, index=False, ttl=None)

    def unpin(self, key: Ref) -> None:
        run(self._unpin(key))

    async def aunpin(self, key: Ref) -> None:
        await arun(self._unpin(key))

    def pinned(self, thread_id: str, now: datetime) -> Sequence[Pin]:
        return run(self._pinned(thread_id, now))

    async def apinned(self, thread_id: str, now: datetime) -> Sequence[Pin]:
        return await arun(self._pinned(thread_id, now))

    def delete_thread(self, thread_id: str) -> None:
        run(self._delete_thread(thread_id))

    async def adelete_thread(self, thread_id: str) -> None:
        await arun(self._delete_thread(thread_id))

    def _unpin(self, key: Ref) -> Steps[None]:
        spot = _checked(key)
        items = yield from self._items(key.thread_id)
        yield from self._delete(item for item in items if _spot(item) == spot)

    def _pinned(self, thread_id: str, now: datetime) -> Steps[Sequence[Pin]]:
        items = yield from self._items(thread_id)
        pins, outdated = _sorted_out(thread_id, items, now)
        with _tidying(thread_id):
            yield from self._delete(outdated[:TIDIED_PER_READ])
        return pins

    def _delete_thread(self, thread_id: str) -> Steps[None]:
        items = yield from self._items(thread_id)
        yield from self._delete(items)

    def _items(self, thread_id: str) -> Steps[list[SearchItem]]:
        """Read every item of the thread.

        Always in one search from the start, with a larger limit if that was reached: an item
        that another worker removes between two pages would hide the one after it.
        """
        namespace = _namespace(thread_id)
        store, limit = self._store, SEARCH_LIMIT
        items = yield from call(store.search, store.asearch, namespace, limit=limit)
        while len(items) >= limit:
            limit *= 4
            items = yield from call(store.search, store.asearch, namespace, limit=limit)
        return [item for item in items if item.namespace == namespace]

    def _delete(self, items: Iterable[SearchItem]) -> Steps[None]:
        for item in items:
            yield from call(self._store.delete, self._store.adelete, item.namespace, item.key)


def _checked(key: Ref, expires_at: datetime | None = None) -> Spot:
    if key.checkpoint_id is None:
        raise ValueError(f"A pin names one checkpoint; {key} has no checkpoint_id")
    if expires_at is not None and not isinstance(expires_at, datetime):
        raise TypeError(f"expires_at must be a datetime or None, not {expires_at!r}")
    if expires_at is not None and expires_at.utcoffset() is None:
        raise ValueError(f"expires_at must have a time zone: {expires_at!r}")
    return key.checkpoint_ns, key.checkpoint_id


def _later(one: datetime | None, other: datetime | None) -> datetime | None:
    return None if one is None or other is None else max(one, other)


def _sooner(one: datetime | None, other: datetime | None) -> datetime | None:
    return min((at for at in (one, other) if at is not None), default=None)


def _namespace(thread_id: str) -> tuple[str, str, str]:
    # A store refuses labels that are empty or have dots or NUL in them; Postgres refuses long
    # ones, and lone surrogates. No quoted text is "%" or has a colon, so nothing collides.
    label = quote(thread_id, safe="", errors="surrogatepass").replace(".", "%2E") or "%"
    if len(label) > _LABEL_LIMIT:
        label = f"sha256:{_digest(thread_id)}"
    return "retaining_saver", "pins", label


def _item(
    key: Ref, expires_at: datetime | None
) -> tuple[tuple[str, str, str], str, dict[str, Any]]:
    spot = _checked(key, expires_at)
    until = None if expires_at is None else expires_at.astimezone(timezone.utc).isoformat()
    value = {"checkpoint_ns": spot[0], "checkpoint_id": spot[1], "expires_at": until}
    return _namespace(key.thread_id), f"{_digest(*spot)}-{until}", value


def _digest(*texts: str) -> str:
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode(errors="surrogatepass")
        digest.update(b"%d:%s" % (len(data), data))
    return digest.hexdigest()


def _spot(item: SearchItem) -> Spot:
    return item.value["checkpoint_ns"], item.value["checkpoint_id"]


def _sorted_out(
    thread_id: str, items: Iterable[SearchItem], now: datetime
) -> tuple[list[Pin], list[SearchItem]]:
    """Return the live pins, one per checkpoint, and the items that no longer say anything."""
    best: dict[Spot, tuple[datetime | None, SearchItem]] = {}
    outdated: list[SearchItem] = []
    for item in items:
        text = item.value["expires_at"]
        until = None if text is None else datetime.fromisoformat(text)
        spot = _spot(item)
        if until is not None and until <= now:
            outdated.append(item)
        elif spot not in best:
            best[spot] = until, item
        elif _later(best[spot][0], until) == until:
            outdated.append(best[spot][1])
            best[spot] = until, item
        else:
            outdated.append(item)
    return [Pin(thread_id, *spot, until) for spot, (until, _) in best.items()], outdated


@contextmanager
def _tidying(thread_id: str) -> Iterator[None]:
    """Log a failure instead of raising it: what was read stays true if nothing was removed."""
    try:
        yield
    except Exception:
        logger.warning("outdated pins of thread %s were not removed", thread_id, exc_info=True)
