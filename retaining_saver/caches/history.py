"""One delta history as caches hold it: frozen, and handed out as fresh copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, Final, NamedTuple

from langgraph.checkpoint.base import DeltaChannelHistory, PendingWrite
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.serde.types import _DeltaSnapshot

from retaining_saver.caches.moulds import OVERHEAD, FrozenItems, moved


class UntrustedHistoryError(ValueError):
    """Bytes from a shared cache have a form that this saver's serializer never writes."""


class StoredHistory:
    """One channel's delta history, frozen.

    - ``thaw`` returns objects that nobody else has, equal to what the saver would have read.
    - ``followed_by`` shares what it extends: a running thread's entries cost what they add.
    - What one reader's serializer was allowed to build is never handed to a stricter one: that
      one gets what its own serializer makes of the bytes.
    """

    __slots__ = ("_packed", "_seed", "_serde", "_stretches", "size")

    def __init__(
        self,
        serde: SerializerProtocol | None,
        seed: _Seed | None,
        stretches: tuple[_Stretch, ...],
        packed: tuple[str, bytes] | None = None,
    ) -> None:
        self._serde = serde
        self._seed = seed
        self._stretches = stretches
        self._packed = packed
        size = OVERHEAD + sum(stretch.size for stretch in stretches)
        size += (seed.content.size if seed else 0) + (len(packed[1]) if packed else 0)
        self.size: Final = size
        """Roughly how many bytes of memory the entry takes."""

    @classmethod
    def of(cls, history: DeltaChannelHistory, serde: SerializerProtocol) -> StoredHistory:
        """Keep a copy of ``history``. Raises what ``serde`` raises for a value it cannot write."""
        seed = _Seed.of(history["seed"], serde) if "seed" in history else None
        return cls(serde, seed, ()).followed_by(history["writes"], serde)

    @classmethod
    def packed(cls, tag: str, data: bytes) -> StoredHistory:
        """Wrap what ``pack`` returned, unread."""
        return cls(None, None, (), (tag, data))

    def followed_by(
        self, writes: Iterable[PendingWrite], serde: SerializerProtocol
    ) -> StoredHistory:
        """Return this history with later writes of the same channel appended."""
        if self._serde is None or not _reads_alike(self._serde, serde):
            return StoredHistory.of(self.thaw(serde, ""), serde).followed_by(writes, serde)
        stretches, last = list(self._stretches), _Stretch.of(list(writes), serde)
        # Each is longer than the next, so there are few: reading is cheapest in one go, and what
        # many entries share is the long ones.
        while stretches and len(stretches[-1].tasks) <= len(last.tasks):
            last = stretches.pop().followed_by(last)
        return StoredHistory(self._serde, self._seed, (*stretches, last))

    def thaw(self, serde: SerializerProtocol, channel: str) -> DeltaChannelHistory:
        """Return the history as the reader with ``serde`` reads it; nothing in it is shared."""
        if self._serde is None or not _reads_alike(self._serde, serde):
            return _unpacked(self.pack(), serde, channel)
        writes: list[PendingWrite] = []
        for stretch in self._stretches:
            writes += stretch.thaw(channel)
        history: DeltaChannelHistory = {"writes": writes}
        if self._seed is not None:
            history["seed"] = self._seed.thaw()
        return history

    def pack(self) -> tuple[str, bytes]:
        """Return the history as the saver's serializer writes it."""
        if self._packed is not None:
            return self._packed
        assert self._serde is not None
        history = self.thaw(self._serde, "")
        seed = [history["seed"]] if "seed" in history else []
        writes = [[task_id, value] for task_id, _, value in history["writes"]]
        return self._serde.dumps_typed([seed, writes])


class _Stretch(NamedTuple):
    """Writes in their order.

    Most write a list of one message. The items of all lists are kept side by side, and each write
    is kept as the span of its items, or the number of the one that is its whole value.
    """

    tasks: tuple[str, ...]
    spans: tuple[int | slice, ...]
    items: FrozenItems

    @classmethod
    def of(cls, writes: Sequence[PendingWrite], serde: SerializerProtocol) -> _Stretch:
        spans: list[int | slice] = []
        items: list[Any] = []
        for _, _, value in writes:
            start = len(items)
            if type(value) is list:
                items += value
                spans.append(slice(start, len(items)))
            else:
                items.append(value)
                spans.append(start)
        tasks = tuple(task_id for task_id, _, _ in writes)
        lists = [span for span in spans if isinstance(span, slice)]
        return cls(tasks, tuple(spans), FrozenItems.of(items, serde, lists))

    @property
    def size(self) -> int:
        return 2 * OVERHEAD * len(self.tasks) + self.items.size

    def followed_by(self, later: _Stretch) -> _Stretch:
        by = len(self.items)
        spans = (*self.spans, *(moved(span, by) for span in later.spans))
        items = self.items.followed_by(later.items)
        return _Stretch(self.tasks + later.tasks, spans, items)

    def thaw(self, channel: str) -> Iterable[PendingWrite]:
        items = self.items.thaw()
        return zip(self.tasks, repeat(channel), [items[span] for span in self.spans])


class _Seed(NamedTuple):
    """A stored value: kept as a write is, because a snapshot is a list of all that was written."""

    content: _Stretch
    is_snapshot: bool

    @classmethod
    def of(cls, seed: Any, serde: SerializerProtocol) -> _Seed:
        is_snapshot = type(seed) is _DeltaSnapshot
        content = seed.value if is_snapshot else seed
        return cls(_Stretch.of([("", "", content)], serde), is_snapshot)

    def thaw(self) -> Any:
        [(_, _, content)] = self.content.thaw("")
        return _DeltaSnapshot(content) if self.is_snapshot else content


def _unpacked(
    packed: tuple[str, bytes], serde: SerializerProtocol, channel: str
) -> DeltaChannelHistory:
    if isinstance(serde, EncryptedSerializer) and "+" not in packed[0]:
        # Its ``loads_typed`` accepts plain bytes too; whoever can write to the cache but lacks
        # the key must not be able to use that.
        raise UntrustedHistoryError("A cached history is not encrypted, but the saver is")
    seed, writes = serde.loads_typed(packed)
    history: DeltaChannelHistory = {
        "writes": [(task_id, channel, value) for task_id, value in writes]
    }
    if seed:
        history["seed"] = seed[0]
    return history


def _reads_alike(one: SerializerProtocol, other: SerializerProtocol) -> bool:
    return one is other or _reader(one) == _reader(other)


def _reader(serde: SerializerProtocol) -> object:
    """Tell what a serializer may build: equal answers mean equal values."""
    inner = serde.serde if isinstance(serde, EncryptedSerializer) else serde
    if type(inner) is not JsonPlusSerializer or inner._custom_unpack_ext_hook:
        return inner
    # In strict mode the host makes a new serializer for each invocation, and there is no other
    # way to see that two of them are alike.
    allowed = inner._allowed_msgpack_modules
    return allowed if allowed is None or isinstance(allowed, bool) else frozenset(allowed)
