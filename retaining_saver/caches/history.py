"""One delta history as caches hold it: frozen, and handed out as fresh copies.

LangGraph changes the objects that a saver gives it, so a reader must never get the cache's own.
Each mutable value is kept as a *mould*: a function that casts a fresh copy from private parts.
Plain containers and pydantic models have moulds of their own; a value of any other type is cast by
the saver's serializer, from the bytes that it made of the value.

What one read of a cached history costs, in milliseconds on one machine (CPython 3.11)::

                                    moulds   deserialise   copy.deepcopy   walk on SQLite
    600 writes of one message each    0.7        7.7            5.7             13
    600 writes of one text each       0.06       0.10           0.84             6

Making the moulds takes 2.7 ms for the messages, about what serialising them takes.
"""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any, Final

from langgraph.checkpoint.base import DeltaChannelHistory, PendingWrite
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from pydantic import BaseModel

Mould = Callable[[], Any]
Moulder = Callable[[Any], tuple[Mould, int]]
"""Makes a mould of a value and tells about how many bytes the mould takes."""

_Write = tuple[str, Any, "Mould | None"]
"""A task id, and a value: itself where it is immutable, else what casts copies of it."""

OVERHEAD: Final = 64
"""Bytes of memory that any object is taken to need beside its contents."""


class UntrustedHistoryError(ValueError):
    """Bytes from a shared cache have a form that this saver's serializer never writes."""


class StoredHistory:
    """One channel's delta history, frozen.

    - ``thaw`` returns objects that nobody else has, equal to what the saver would have read.
    - ``followed_by`` shares what it extends: a running thread's entries cost what they add.
    - What one reader's serializer was allowed to build is never handed to a stricter one: that
      one gets what its own serializer makes of the bytes.
    """

    __slots__ = ("_packed", "_seed", "_serde", "_writes", "size")

    def __init__(
        self,
        serde: SerializerProtocol | None,
        seed: _Frozen | None,
        writes: tuple[_Write, ...],
        size: int,
        packed: tuple[str, bytes] | None = None,
    ) -> None:
        self._serde = serde
        self._seed = seed
        self._writes = writes
        self._packed = packed
        self.size: Final = size
        """Roughly how many bytes of memory the entry takes."""

    @classmethod
    def of(cls, history: DeltaChannelHistory, serde: SerializerProtocol) -> StoredHistory:
        """Keep a copy of ``history``. Raises what ``serde`` raises for a value it cannot write."""
        seed = freeze(history["seed"], serde) if "seed" in history else None
        empty = cls(serde, seed, (), OVERHEAD + (seed.size if seed else 0))
        return empty.followed_by(history["writes"], serde)

    @classmethod
    def packed(cls, tag: str, data: bytes) -> StoredHistory:
        """Wrap what ``pack`` returned, unread."""
        return cls(None, None, (), OVERHEAD + len(data), (tag, data))

    def followed_by(
        self, writes: Iterable[PendingWrite], serde: SerializerProtocol
    ) -> StoredHistory:
        """Return this history with later writes of the same channel appended."""
        if self._serde is None or not _reads_alike(self._serde, serde):
            return StoredHistory.of(self.thaw(serde, ""), serde).followed_by(writes, serde)
        added, size = [], self.size
        for task_id, _, value in writes:
            frozen = freeze(value, serde)
            added.append((task_id, frozen.value, frozen.cast))
            size += OVERHEAD + frozen.size
        return StoredHistory(self._serde, self._seed, (*self._writes, *added), size)

    def thaw(self, serde: SerializerProtocol, channel: str) -> DeltaChannelHistory:
        """Return the history as the reader with ``serde`` reads it; nothing in it is shared."""
        if self._serde is None or not _reads_alike(self._serde, serde):
            return _unpacked(self.pack(), serde, channel)
        history: DeltaChannelHistory = {
            "writes": [
                (task_id, channel, value if cast is None else cast())
                for task_id, value, cast in self._writes
            ]
        }
        if self._seed is not None:
            history["seed"] = self._seed.thaw()
        return history

    def pack(self) -> tuple[str, bytes]:
        """Return the history as the saver's serializer writes it."""
        if self._packed is not None:
            return self._packed
        assert self._serde is not None
        seed = [] if self._seed is None else [self._seed.thaw()]
        writes = [[task, value if cast is None else cast()] for task, value, cast in self._writes]
        return self._serde.dumps_typed([seed, writes])


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


class _Frozen:
    """One value: itself where it is immutable, else what casts copies of it."""

    __slots__ = ("cast", "size", "value")

    def __init__(self, value: Any, cast: Mould | None, size: int) -> None:
        self.value = value
        self.cast = cast
        self.size = size

    def thaw(self) -> Any:
        return self.value if self.cast is None else self.cast()


class _NoMouldError(Exception):
    """A type for which deserialising is the only copy that is certainly right."""


def freeze(value: Any, serde: SerializerProtocol) -> _Frozen:
    """Keep a private copy of ``value``."""
    kind = type(value)
    if kind in _IMMUTABLE:
        return _Frozen(value, None, _plain_size(value))
    try:
        return _Frozen(None, *_moulder(kind)(value))
    except (_NoMouldError, RecursionError):
        typed = serde.dumps_typed(value)
        return _Frozen(None, partial(serde.loads_typed, typed), 2 * OVERHEAD + len(typed[1]))


_IMMUTABLE = frozenset(
    {
        *(str, bytes, int, float, complex, bool, type(None)),
        *(dt.datetime, dt.date, dt.time, dt.timedelta, dt.timezone),
        *(uuid.UUID, decimal.Decimal),
    }
)


def _plain_size(value: Any) -> int:
    return OVERHEAD + len(value) if isinstance(value, (str, bytes)) else OVERHEAD


def _choose_moulder(kind: type[Any]) -> Moulder:
    """Choose the moulder of exactly this type: a subclass may keep state that we do not know."""
    if kind in _MOULDERS:
        return _MOULDERS[kind]
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return _mould_sequence
    if issubclass(kind, enum.Enum):
        return _mould_constant
    if issubclass(kind, BaseModel) and _copies_as_pydantic_does(kind):
        return _mould_model
    return _refuse


# Chosen once per class; bounded, because classes can be made while the program runs.
_moulder: Callable[[Any], Moulder] = lru_cache(maxsize=1024)(_choose_moulder)


def _refuse(value: Any) -> tuple[Mould, int]:
    raise _NoMouldError(type(value).__name__)


def _copies_as_pydantic_does(kind: type[BaseModel]) -> bool:
    return kind.__copy__ is BaseModel.__copy__ and kind.__deepcopy__ is BaseModel.__deepcopy__


def _mould_items(items: Iterable[tuple[Any, Any]]) -> tuple[list[tuple[Any, Mould]], int]:
    """Return the mutable ones among numbered or named values, and the size of all."""
    moulds: list[tuple[Any, Mould]] = []
    size = 0
    for name, value in items:
        kind = type(value)
        if kind is str:
            size += OVERHEAD + len(value)
        elif kind in _IMMUTABLE:
            size += _plain_size(value)
        elif not value and (kind is dict or kind is list):
            # Messages have several of these. The class itself casts them.
            moulds.append((name, kind))
            size += OVERHEAD
        else:
            cast, cast_size = _moulder(kind)(value)
            moulds.append((name, cast))
            size += cast_size
    return moulds, size


def _mould_list(value: list[Any]) -> tuple[Mould, int]:
    moulds, size = _mould_items(enumerate(value))
    own = value.copy()
    size += OVERHEAD + 8 * len(own)
    if not moulds:
        return own.copy, size
    if len(moulds) == len(own) == 1:
        return partial(_cast_one, moulds[0][1]), size
    if len(moulds) == len(own):
        return partial(_cast_all, tuple(cast for _, cast in moulds)), size
    return partial(_cast_items, _without(own, moulds), moulds), size


def _cast_one(cast: Mould) -> list[Any]:
    """Cast what a node writes that returns one message."""
    return [cast()]


def _cast_all(casts: tuple[Mould, ...]) -> list[Any]:
    return [cast() for cast in casts]


def _mould_dict(value: dict[Any, Any]) -> tuple[Mould, int]:
    # Keys hash by value, so whatever a serializer brings back as a key is immutable.
    moulds, size = _mould_items(value.items())
    own = value.copy()
    size += OVERHEAD + sum(100 + _plain_size(key) for key in own)
    return (partial(_cast_items, _without(own, moulds), moulds) if moulds else own.copy), size


def _without(own: Any, moulds: list[tuple[Any, Mould]]) -> Any:
    """Drop the caller's mutable values from a private container; casting puts copies there."""
    for name, _ in moulds:
        own[name] = None
    return own


def _cast_items(own: Any, moulds: list[tuple[Any, Mould]]) -> Any:
    copied = own.copy()
    for name, cast in moulds:
        copied[name] = cast()
    return copied


def _mould_sequence(value: Any) -> tuple[Mould, int]:
    cast, size = _mould_list(list(value))
    kind = type(value)
    if kind is deque:
        longest = value.maxlen
        return (lambda: deque(cast(), longest)), size
    make = getattr(kind, "_make", kind)
    return (lambda: make(cast())), size


def _mould_set(value: Any) -> tuple[Mould, int]:
    if not _IMMUTABLE.issuperset(map(type, value)):
        return _refuse(value)
    own = type(value)(value)
    return own.copy, 2 * OVERHEAD + sum(_plain_size(item) for item in own)


def _mould_constant(value: Any) -> tuple[Mould, int]:
    return (lambda: value), OVERHEAD


def _mould_bytearray(value: bytearray) -> tuple[Mould, int]:
    own = bytes(value)
    return partial(bytearray, own), OVERHEAD + len(own)


_MOULDERS: dict[type[Any], Moulder] = {
    list: _mould_list,
    dict: _mould_dict,
    tuple: _mould_sequence,
    deque: _mould_sequence,
    set: _mould_set,
    frozenset: _mould_set,
    bytearray: _mould_bytearray,
}


def _mould_model(model: BaseModel) -> tuple[Mould, int]:
    moulds, size = _mould_items(model.__dict__.items())
    mould = partial(
        _cast_model,
        type(model),
        _without(model.__dict__.copy(), moulds),
        _interned(tuple(moulds)) if all(cast in _EMPTIES for _, cast in moulds) else moulds,
        _interned(frozenset(model.__pydantic_fields_set__)),
        _mould_hidden(model.__pydantic_extra__),
        _mould_hidden(model.__pydantic_private__),
    )
    return mould, size + 6 * OVERHEAD


def _cast_model(
    kind: type[BaseModel],
    fields: dict[str, Any],
    moulds: Iterable[tuple[str, Mould]],
    fields_set: frozenset[str],
    extra: Mould | None,
    private: Mould | None,
) -> BaseModel:
    """Cast as pydantic's own deep copy does, without its bookkeeping."""
    copied = kind.__new__(kind)
    values = fields.copy()
    for name, cast in moulds:
        values[name] = cast()
    _assign_fields(copied, values)
    _assign_fields_set(copied, set(fields_set))
    _assign_extra(copied, extra and extra())
    _assign_private(copied, private and private())
    return copied


_EMPTIES = (dict, list)


@lru_cache(maxsize=1024)
def _interned(value: Any) -> Any:
    """Return one object for all that are equal: thousands of messages differ in few fields.

    Reading a long history takes as long as fetching its moulds from memory takes.
    """
    return value


# The slots of every model, past its own ``__setattr__``; the quickest way to them.
_assign_fields, _assign_fields_set, _assign_extra, _assign_private = (
    vars(BaseModel)[slot].__set__
    for slot in (
        "__dict__",
        "__pydantic_fields_set__",
        "__pydantic_extra__",
        "__pydantic_private__",
    )
)


def _mould_hidden(value: dict[str, Any] | None) -> Mould | None:
    if value is None:
        return None
    return _mould_dict(value)[0] if value else dict
