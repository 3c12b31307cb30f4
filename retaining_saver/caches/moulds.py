"""Frozen values: private parts, and how fresh copies are cast from them.

LangGraph changes the objects that a saver gives it, so a reader must never get the cache's own.
Each mutable value is kept as a *mould*: a function that casts a fresh copy from private parts.
Plain containers and pydantic models have moulds of their own; a value of any other type is cast by
the saver's serializer, from the bytes that it made of the value.

Long histories are thousands of messages that differ in few fields. They are cast in batches, step
by step for a whole batch: most of the time goes into fetching what is read and where it is written.
"""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import uuid
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import ormsgpack
from langgraph.checkpoint.serde.base import SerializerProtocol
from pydantic import BaseModel

Mould = Callable[[], Any]
Moulder = Callable[[Any], tuple[Mould, int]]
"""Makes a mould of a value and tells about how many bytes the mould takes."""

OVERHEAD: Final = 64
"""Bytes of memory that any object is taken to need beside its contents."""


class Frozen(NamedTuple):
    """One value: itself where it is immutable, else what casts copies of it."""

    value: Any
    cast: Mould | None
    size: int

    def thaw(self) -> Any:
        """Return a copy that nobody else has."""
        return self.value if self.cast is None else self.cast()


class _NoMouldError(Exception):
    """A type for which deserialising is the only copy that is certainly right."""


_WITHOUT_MOULD = (_NoMouldError, RecursionError)


def freeze(value: Any, serde: SerializerProtocol) -> Frozen:
    """Keep a private copy of ``value``. Raises what ``serde`` raises if it cannot write it."""
    try:
        return _freeze(value)
    except _WITHOUT_MOULD:
        return Frozen(None, *_serialize(value, serde))


def _freeze(value: Any) -> Frozen:
    kind = type(value)
    if kind in _IMMUTABLE:
        return Frozen(value, None, _plain_size(value))
    return Frozen(None, *_moulder(kind)(value))


def _serialize(value: Any, serde: SerializerProtocol) -> tuple[Mould, int]:
    typed = serde.dumps_typed(value)
    return partial(serde.loads_typed, typed), 2 * OVERHEAD + len(typed[1])


class FrozenItems:
    """Values in their order, thawed together."""

    __slots__ = ("_batches", "_moulds", "_own", "_serialized", "size")

    def __init__(
        self,
        own: list[Any],
        batches: Iterable[_Batch] = (),
        moulds: Iterable[tuple[int, Mould]] = (),
        serialized: Iterable[tuple[Sequence[int | slice], Mould]] = (),
        size: int = 0,
    ) -> None:
        self._own = own
        self._batches = tuple(batches)
        self._moulds = tuple(moulds)
        self._serialized = tuple(serialized)
        self.size: Final = size
        """Roughly how many bytes of memory the values take."""

    @classmethod
    def of(
        cls,
        values: Sequence[Any],
        serde: SerializerProtocol | None,
        lists: Sequence[slice] = (),
    ) -> FrozenItems:
        """Freeze copies. Without ``serde``, raise if a value has no mould.

        ``lists`` tells in order which values were a list's, and read with it.
        """
        own = list(values)
        batches: dict[_Shape, _Batch] = {}
        moulds: list[tuple[int, Mould]] = []
        odd: list[int] = []
        size = 8 * len(own)
        for place, value in enumerate(own):
            if type(value) in _IMMUTABLE:
                size += _plain_size(value)
                continue
            own[place] = None
            try:
                _, cast, cast_size = _freeze(value)
            except _WITHOUT_MOULD:
                if serde is None:
                    raise
                odd.append(place)
                continue
            size += cast_size
            if isinstance(cast, _Model) and not cast.hidden:
                if (batch := batches.get(cast.shape)) is None:
                    batch = batches[cast.shape] = _Batch(cast.shape)
                batch.add(place, cast)
            elif cast is not None:
                moulds.append((place, cast))
        if serde is None or not odd:
            return cls(own, batches.values(), moulds, size=size)
        places: Sequence[int | slice] = odd
        wholes = _wholes(odd, lists)
        if _are_written_otherwise(values, odd, wholes, serde):
            places = wholes
        cast, cast_size = _serialize([values[place] for place in places], serde)
        return cls(own, batches.values(), moulds, [(places, cast)], size + cast_size)

    def __len__(self) -> int:
        return len(self._own)

    def followed_by(self, later: FrozenItems) -> FrozenItems:
        """Return these values and the later ones."""
        by = len(self._own)
        batches = {batch.shape: batch for batch in self._batches}
        for batch in later._batches:
            before = batches.get(batch.shape) or _Batch(batch.shape)
            batches[batch.shape] = before.followed_by(batch, by)
        moulds = [(place + by, cast) for place, cast in later._moulds]
        odd = [([moved(place, by) for place in places], cast) for places, cast in later._serialized]
        return FrozenItems(
            self._own + later._own,
            batches.values(),
            (*self._moulds, *moulds),
            (*self._serialized, *odd),
            self.size + later.size,
        )

    def thaw(self) -> list[Any]:
        """Return copies that nobody else has."""
        values = self._own.copy()
        for batch in self._batches:
            batch.cast_into(values)
        for place, cast in self._moulds:
            values[place] = cast()
        for places, cast in self._serialized:
            for span, value in zip(places, cast(), strict=True):
                values[span] = value
        return values


def moved(place: int | slice, by: int) -> int | slice:
    """Return the place, or the span of places, further by so much."""
    return place + by if isinstance(place, int) else slice(place.start + by, place.stop + by)


def _wholes(places: Iterable[int], lists: Sequence[slice]) -> list[int | slice]:
    """Replace the places in each list by the list, once."""
    wholes: list[int | slice] = []
    end = 0
    for place in places:
        if place < end:
            continue
        at = bisect_right(lists, place, key=_start) - 1
        if at >= 0 and place < lists[at].stop:
            end = lists[at].stop
            wholes.append(lists[at])
        else:
            wholes.append(place)
    return wholes


def _start(span: slice) -> int:
    start: int = span.start
    return start


def _are_written_otherwise(
    values: Sequence[Any],
    places: Sequence[int],
    wholes: Sequence[int | slice],
    serde: SerializerProtocol,
) -> bool:
    """Tell whether values are written in another way alone than in their lists.

    A serializer that pickles what has no other way keeps the types of all that it pickles.
    """
    alone = [values[place] for place in places]
    together = [values[whole] for whole in wholes]
    counts = (len(values[whole]) if isinstance(whole, slice) else 1 for whole in wholes)
    if sum(counts) == len(alone):
        return False
    try:
        return serde.dumps_typed(together)[0] != serde.dumps_typed(alone)[0]
    except Exception:
        return False  # So it is not how they were read.


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
    if issubclass(kind, tuple) and hasattr(kind, "_fields") and not kind.__dictoffset__:
        return _mould_sequence
    if issubclass(kind, enum.Enum):
        return _mould_constant
    if issubclass(kind, BaseModel) and _is_copied_by_pydantic(kind):
        return _mould_model
    return _refuse


# Chosen once per class; bounded, because classes can be made while the program runs.
_moulder: Callable[[Any], Moulder] = lru_cache(maxsize=1024)(_choose_moulder)


def _refuse(value: Any) -> tuple[Mould, int]:
    raise _NoMouldError(type(value).__name__)


def _is_copied_by_pydantic(kind: type[BaseModel]) -> bool:
    """Tell whether a class leaves to pydantic how its instances are made, kept and copied."""
    ways = ("__new__", "__copy__", "__deepcopy__")
    if any(getattr(kind, way) is not getattr(BaseModel, way) for way in ways):
        return False
    return not any(vars(base).get("__slots__") for base in kind.__mro__ if base is not BaseModel)


# Plain containers.

_ROOM: Final = 1024
"""How large a tree of plain values may be to be kept as msgpack, in bytes, roughly.

Unpacking small containers is twice as quick as casting them, and packing them is quicker than
making moulds by far. But it copies texts, which moulds share.
"""
_SCALARS = frozenset({int, float, bool, type(None)})


def _mould_list(value: list[Any]) -> tuple[Mould, int]:
    if _IMMUTABLE.issuperset(map(type, value)):
        own = value.copy()
        return own.copy, 2 * OVERHEAD + 8 * len(own) + sum(map(_plain_size, own))
    if (packed := _pack(value)) is not None:
        return packed
    items = FrozenItems.of(value, None)
    return items.thaw, 2 * OVERHEAD + items.size


def _mould_dict(value: dict[Any, Any]) -> tuple[Mould, int]:
    plain = _IMMUTABLE.issuperset(map(type, value.values()))
    if not plain and (packed := _pack(value)) is not None:
        return packed
    # Keys hash by value, so whatever a serializer brings back as a key is immutable.
    own = value.copy()
    size = OVERHEAD + sum(100 + _plain_size(key) for key in own)
    if plain:
        return own.copy, size + sum(map(_plain_size, own.values()))
    moulds: list[tuple[Any, Mould]] = []
    for key, item in value.items():
        _, cast, item_size = _freeze(item)
        size += item_size
        if cast is not None:
            own[key] = None
            moulds.append((key, cast))
    return partial(_cast_dict, own, moulds), size


def _cast_dict(own: dict[Any, Any], moulds: list[tuple[Any, Mould]]) -> dict[Any, Any]:
    copied = own.copy()
    for name, cast in moulds:
        copied[name] = cast()
    return copied


def _pack(value: Any) -> tuple[Mould, int] | None:
    """Mould a small tree of nothing but plain values, which msgpack brings back as they are."""
    if _room_left(value, _ROOM) < 0:
        return None
    try:
        packed = ormsgpack.packb(value)
    except ormsgpack.MsgpackEncodeError:  # Half a surrogate pair, or a very large number.
        return None
    return partial(ormsgpack.unpackb, packed), 4 * OVERHEAD + len(packed)


def _room_left(value: Any, room: int) -> int:
    """Tell how much of ``room`` a list or dict leaves; less than nothing if it is not plain.

    A subclass, a tuple or a bytearray would come back as something else.
    """
    room -= 16
    if type(value) is dict:
        for key in value:
            if type(key) is not str:
                return -1
            room -= 8 + len(key)
        value = value.values()
    for item in value:
        kind = type(item)
        if kind is str or kind is bytes:
            room -= 8 + len(item)
        elif kind is dict or kind is list:
            room = _room_left(item, room)
        elif kind in _SCALARS:
            room -= 8
        else:
            return -1
        if room < 0:
            return -1
    return room


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


# Pydantic's models.


@dataclass(frozen=True, eq=False, slots=True)
class _Shape:
    """What many models of one class have in common; interned, so compared by identity."""

    kind: type[BaseModel]
    dicts: tuple[str, ...]
    """The fields that hold an empty dict: messages have several."""
    lists: tuple[str, ...]
    fields_set: frozenset[str]
    takes_extra: bool


_shape = lru_cache(maxsize=1024)(_Shape)

_Assign = Callable[[BaseModel, Any], None]

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


@dataclass(eq=False, slots=True)
class _Model:
    """A mould of one model."""

    shape: _Shape
    fields: dict[str, Any]
    """Immutable values, and a place for each of the others."""
    moulds: tuple[tuple[str, Mould], ...]
    hidden: tuple[tuple[_Assign, Mould], ...]

    def __call__(self) -> BaseModel:
        fields = self.fields.copy()
        for name in self.shape.dicts:
            fields[name] = {}
        for name in self.shape.lists:
            fields[name] = []
        for name, cast in self.moulds:
            fields[name] = cast()
        model = _build(self.shape, fields)
        for assign, cast in self.hidden:
            assign(model, cast())
        return model


def _build(shape: _Shape, fields: dict[str, Any]) -> BaseModel:
    """Build a model around its fields as pydantic's own deep copy does."""
    model = shape.kind.__new__(shape.kind)
    _assign_fields(model, fields)
    _assign_fields_set(model, set(shape.fields_set))
    _assign_extra(model, {} if shape.takes_extra else None)
    _assign_private(model, None)
    return model


def _mould_model(model: BaseModel) -> tuple[Mould, int]:
    fields = model.__dict__.copy()
    dicts: list[str] = []
    lists: list[str] = []
    moulds: list[tuple[str, Mould]] = []
    size = OVERHEAD * (6 + len(fields))
    for name, value in model.__dict__.items():
        kind = type(value)
        if kind is str or kind is bytes:
            size += len(value)
        elif kind not in _IMMUTABLE:
            fields[name] = None
            if kind is dict and not value:
                dicts.append(name)
            elif kind is list and not value:
                lists.append(name)
            else:
                cast, cast_size = _moulder(kind)(value)
                moulds.append((name, cast))
                size += cast_size
    fields_set = frozenset(model.__pydantic_fields_set__)
    takes_extra = model.__pydantic_extra__ is not None
    shape = _shape(type(model), tuple(dicts), tuple(lists), fields_set, takes_extra)
    hidden, hidden_size = _mould_hidden(model)
    return _Model(shape, fields, tuple(moulds), hidden), size + hidden_size


def _mould_hidden(model: BaseModel) -> tuple[tuple[tuple[_Assign, Mould], ...], int]:
    """Mould what a model keeps beside its declared fields: mostly nothing."""
    extra, private = model.__pydantic_extra__, model.__pydantic_private__
    if not extra and private is None:
        return (), 0
    hidden: list[tuple[_Assign, Mould]] = []
    size = 0
    for assign, values in ((_assign_extra, extra), (_assign_private, private)):
        if values is not None:
            cast, cast_size = _mould_dict(values)
            hidden.append((assign, cast))
            size += cast_size
    return tuple(hidden), size


class _Batch:
    """Moulds of models of one shape, and the places of the models among other values."""

    __slots__ = ("_fields", "_moulds", "_places", "shape")

    def __init__(self, shape: _Shape) -> None:
        self.shape: Final = shape
        self._places: list[int] = []
        self._fields: list[dict[str, Any]] = []
        self._moulds: list[tuple[int, str, Mould]] = []

    def add(self, place: int, model: _Model) -> None:
        for name, cast in model.moulds:
            self._moulds.append((len(self._fields), name, cast))
        self._places.append(place)
        self._fields.append(model.fields)

    def followed_by(self, later: _Batch, by: int) -> _Batch:
        """Return these models, and the later ones in places further ``by`` so much."""
        before, both = len(self._fields), _Batch(self.shape)
        both._places = self._places + [place + by for place in later._places]
        both._fields = self._fields + later._fields
        moved = [(number + before, name, cast) for number, name, cast in later._moulds]
        both._moulds = self._moulds + moved
        return both

    def cast_into(self, values: list[Any]) -> None:
        """Put a fresh copy of each model in its place."""
        shape = self.shape
        contents = [fields.copy() for fields in self._fields]
        for name in shape.dicts:
            for content in contents:
                content[name] = {}
        for name in shape.lists:
            for content in contents:
                content[name] = []
        for number, name, cast in self._moulds:
            contents[number][name] = cast()
        # As ``_build`` does; a call for each of thousands takes a fifth of the time.
        kind, fields_set, takes_extra = shape.kind, shape.fields_set, shape.takes_extra
        new = kind.__new__
        models = [new(kind) for _ in contents]
        for model, content in zip(models, contents, strict=True):
            _assign_fields(model, content)
            _assign_fields_set(model, set(fields_set))
            _assign_extra(model, {} if takes_extra else None)
            _assign_private(model, None)
        for place, model in zip(self._places, models, strict=True):
            values[place] = model
