"""Read a serialized checkpoint without its values.

Channel values come back as ``Opaque`` objects that compare by what was stored. No class that a
checkpoint names is ever imported or called, so a missing, renamed or hostile one changes nothing.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import pickletools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ormsgpack
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer

from retaining_saver.entries import fingerprint
from retaining_saver.errors import RetainingSaverError

DELTA_SNAPSHOT = 7
"""The code of a delta channel's stored snapshot, as of langgraph-checkpoint 4."""

_IDENTITY = ("id", "ts")
_SENDS = "__pregel_tasks"
_EMPTY_LISTS = frozenset({("msgpack", b"\x90"), ("json", b"[]"), ("pickle", b"list()")})
_DICTS = frozenset({("collections", "defaultdict"), ("collections", "OrderedDict")})
_UNPACK = ormsgpack.OPT_NON_STR_KEYS
_COMPARE = ormsgpack.OPT_SORT_KEYS | ormsgpack.OPT_PASSTHROUGH_DATACLASS
_PACK = ormsgpack.OPT_NON_STR_KEYS | ormsgpack.OPT_PASSTHROUGH_DATACLASS


class UnreadableCheckpoint(RetainingSaverError):
    """A checkpoint is stored in a form that cannot be read without its values."""


@dataclass(frozen=True, slots=True)
class Opaque:
    """A value that was not deserialised. ``code`` is its msgpack extension code, if it has one."""

    code: int | None
    data: bytes


def read_checkpoint(stored: tuple[str, bytes], serde: SerializerProtocol) -> dict[str, Any]:
    """Return the checkpoint dict with every channel value as an ``Opaque``.

    ``serde`` only decrypts. Raises ``UnreadableCheckpoint`` for a type other than msgpack, json,
    pickle, or one of them encrypted by an ``EncryptedSerializer``.
    """
    kind, data = _decrypted(stored, serde)
    if kind not in _READERS:
        raise UnreadableCheckpoint(
            f"A checkpoint of type {kind!r} was to be read without its values; only msgpack, json "
            f"and pickle can be. Threads written by this serializer are left as they are."
        )
    load, close = _READERS[kind]
    try:
        checkpoint = load(data)
    except Exception as error:
        raise UnreadableCheckpoint(
            f"A checkpoint of type {kind!r} could not be read ({type(error).__name__}). "
            f"Its thread is left as it is; look for a damaged row."
        ) from error
    if not isinstance(checkpoint, dict):
        raise UnreadableCheckpoint(f"A checkpoint holds a {type(checkpoint).__name__}, not a dict.")
    return _closed(checkpoint, close)


def is_msgpack(kind: str) -> bool:
    """Tell whether values of a checkpoint of this type may be given to ``pack_checkpoint``."""
    return kind.split("+", 1)[0] == "msgpack"


def pack_checkpoint(checkpoint: Mapping[str, Any], serde: SerializerProtocol) -> tuple[str, bytes]:
    """Serialize a checkpoint dict with ``Opaque`` values that were read from msgpack.

    It loads as if the saver had stored the values themselves. ``serde`` only encrypts.
    """
    values = {channel: _opened(value) for channel, value in checkpoint["channel_values"].items()}
    packed = {**checkpoint, "channel_values": values}
    data = ormsgpack.packb(packed, default=_extension, option=_PACK)
    if not isinstance(serde, EncryptedSerializer):
        return "msgpack", data
    cipher_name, encrypted = serde.cipher.encrypt(data)
    return f"msgpack+{cipher_name}", encrypted


def _opened(value: Opaque) -> Any:
    return value if value.code is not None else _load_msgpack(value.data)


def body_of(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return what two checkpoints of the same state have in common: all but ``id`` and ``ts``."""
    return {key: value for key, value in checkpoint.items() if key not in _IDENTITY}


def stored_channels(body: Mapping[str, Any]) -> set[str]:
    """Name the channels whose values are stored inside the checkpoint.

    An empty list of sends does not count: a graph that has used ``Send`` stores one at rest.
    """
    values: Mapping[str, Opaque] = body.get("channel_values") or {}
    channels = set(values)
    sends = values.get(_SENDS)
    if sends is not None and any(sends == Opaque(None, data) for _, data in _EMPTY_LISTS):
        channels.remove(_SENDS)
    return channels


def fingerprint_of(body: Mapping[str, Any]) -> bytes:
    """Digest a checkpoint dict with ``Opaque`` values; see ``entries.fingerprint``.

    Raises ``UnreadableCheckpoint`` for what no msgpack or JSON checkpoint holds.
    """
    stripped = body_of(body)
    try:
        packed = ormsgpack.packb(stripped, default=_spelled, option=_COMPARE)
    except ormsgpack.MsgpackEncodeError:
        # Keys that are no text, integers of any size, strings that are no Unicode.
        return _fingerprint_piecewise(stripped)
    return hashlib.blake2b(packed, digest_size=16).digest()


def _fingerprint_piecewise(body: Mapping[str, Any]) -> bytes:
    try:
        return fingerprint(body, lambda value: repr(_spelled(value)).encode())
    except TypeError as error:
        raise UnreadableCheckpoint(
            f"A checkpoint holds objects outside its values ({error}). Its thread is left as it is."
        ) from error


def _spelled(value: object) -> tuple[str, int | None, bytes]:
    if isinstance(value, Opaque):
        return "opaque", value.code, value.data
    raise TypeError(f"{type(value).__name__} cannot be compared")


def holds_value(channel: str, stored: tuple[str, bytes], serde: SerializerProtocol) -> bool:
    """Tell whether a value that has a row of its own counts as ``stored_channels`` counts."""
    if stored[0] == "empty":
        return False
    try:
        return channel != _SENDS or _decrypted(stored, serde) not in _EMPTY_LISTS
    except UnreadableCheckpoint:
        return True


def is_snapshot(stored: tuple[str, bytes], serde: SerializerProtocol) -> bool:
    """Tell whether a value that has a row of its own is a delta channel's snapshot."""
    kind, data = _decrypted(stored, serde)
    if kind == "pickle":
        return _close_pickle(_load_pickle(data)).code == DELTA_SNAPSHOT
    return kind == "msgpack" and _extension_code(data) == DELTA_SNAPSHOT


def _extension_code(data: bytes) -> int | None:
    """Read the code of a msgpack extension type from the first bytes, without what it holds."""
    at = {0xC7: 2, 0xC8: 3, 0xC9: 5}.get(data[0], 1 if 0xD4 <= data[0] <= 0xD8 else None)
    return None if at is None else data[at]


def is_due(channels: Iterable[str]) -> bool:
    """Tell whether one of these channels, holding a value, means that something is about to run."""
    return any(name in ("__start__", _SENDS) or name.startswith("branch:to:") for name in channels)


def _decrypted(stored: tuple[str, bytes], serde: SerializerProtocol) -> tuple[str, bytes]:
    kind, data = stored
    if "+" not in kind:
        return kind, data
    inner, cipher_name = kind.split("+", 1)
    if not isinstance(serde, EncryptedSerializer):
        raise UnreadableCheckpoint(
            f"A checkpoint is encrypted ({cipher_name}) and the saver's serializer, "
            f"{type(serde).__name__}, has no cipher to read it with. "
            f"Open the saver with the EncryptedSerializer that wrote it."
        )
    return inner, serde.cipher.decrypt(cipher_name, data)


def _closed(checkpoint: dict[str, Any], close: Callable[[Any], Opaque]) -> dict[str, Any]:
    # Plain values are closed as well: 1, 1.0 and True are equal in Python and not the same state.
    values = checkpoint.get("channel_values") or {}
    sends = checkpoint.get("pending_sends") or ()
    closed = {**checkpoint, "channel_values": {k: close(v) for k, v in values.items()}}
    if sends:
        closed["pending_sends"] = [close(send) for send in sends]
    return closed


def _load_msgpack(data: bytes) -> Any:
    return ormsgpack.unpackb(data, ext_hook=Opaque, option=_UNPACK)


def _close_msgpack(value: Any) -> Opaque:
    if isinstance(value, Opaque):
        return value
    return Opaque(None, ormsgpack.packb(value, default=_extension, option=_PACK))


def _extension(value: Any) -> ormsgpack.Ext:
    if isinstance(value, Opaque) and value.code is not None:
        return ormsgpack.Ext(value.code, value.data)
    raise TypeError(f"{type(value).__name__} does not come out of msgpack")


def _close_json(value: Any) -> Opaque:
    return Opaque(None, json.dumps(value).encode())


class Inert:
    """What a pickle's class or function becomes: it takes everything and does nothing."""

    named: tuple[str, str] = ("", "")
    received: list[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:  # Self: 3.11.
        made = object.__new__(cls)
        made.received = [args, kwargs]
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what ``__new__`` has kept already."""

    def __setstate__(self, state: Any) -> None:
        self.received.append(state)

    def append(self, item: Any) -> None:
        self.received.append(item)

    def extend(self, items: Iterable[Any]) -> None:
        self.received.extend(items)

    def add(self, item: Any) -> None:
        self.received.append(item)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.received.append((key, value))

    def __call__(self, *args: Any, **kwargs: Any) -> Inert:
        return Inert(self, args, kwargs)

    def __hash__(self) -> int:
        # Pickles put objects into sets and use them as keys before their state is known.
        return hash(self.named)


class InertDict(dict[Any, Any]):
    """What a standard dict with a class of its own becomes: versions are sometimes kept in one."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[Any]:
        if (module, name) in _DICTS:
            return type(name, (InertDict,), {})
        return type("Inert", (Inert,), {"named": (module, name)})


def _load_pickle(data: bytes) -> Any:
    # Classes registered by number come out of the interpreter's own cache, past find_class.
    if any(opcode.name.startswith("EXT") for opcode, _, _ in pickletools.genops(data)):
        raise pickle.UnpicklingError("a class is named by number")
    return _InertUnpickler(io.BytesIO(data)).load()


def _close_pickle(value: Any) -> Opaque:
    named = getattr(type(value), "named", None)
    is_snapshot = named == ("langgraph.checkpoint.serde.types", "_DeltaSnapshot")
    shape = _shape(value, {})
    return Opaque(DELTA_SNAPSHOT if is_snapshot else None, shape.encode("utf-8", "surrogatepass"))


def _shape(value: Any, above: dict[int, int]) -> str:
    """Spell a value's structure: equal for equal structures, whatever the pickle's memo did."""
    if id(value) in above:
        return f"<{above[id(value)]}>"  # A cycle: name the enclosing object by its depth.
    inside = {**above, id(value): len(above)}
    name = type(value).__name__
    if isinstance(value, Inert):
        return f"{value.named!r}{_shape(value.received, inside)}"
    if isinstance(value, type) and issubclass(value, Inert):
        return f"class {value.named!r}"
    if isinstance(value, dict):
        pairs = (f"{_shape(k, inside)}:{_shape(v, inside)}" for k, v in value.items())
        return f"{name}({','.join(pairs)})"
    if isinstance(value, (set, frozenset)):
        return f"{name}({','.join(sorted(_shape(item, inside) for item in value))})"
    if isinstance(value, (list, tuple)):
        return f"{name}({','.join(_shape(item, inside) for item in value)})"
    return f"{name} {value!r}"


_READERS: dict[str, tuple[Callable[[bytes], Any], Callable[[Any], Opaque]]] = {
    "msgpack": (_load_msgpack, _close_msgpack),
    "json": (json.loads, _close_json),
    "pickle": (_load_pickle, _close_pickle),
}
