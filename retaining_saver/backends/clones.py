"""Clone a saver whose lock or connection is held, so that its own methods can read on it."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import isroutine
from types import MemberDescriptorType, MethodType
from typing import Any, TypeVar

AnySaver = TypeVar("AnySaver")


def clone(saver: AnySaver, **attributes: Any) -> AnySaver:
    """Return a shallow copy with other ``attributes``.

    Nothing that it keeps leads back to ``saver``, where it can be told, and would wait for the
    lock that is held: neither the saver itself nor methods of it, whatever they are kept as. Those
    that were replaced on the instance are the class's own again.
    """
    kind = type(saver)
    twin = object.__new__(kind)
    for name, value in vars(saver).items():
        if not isroutine(getattr(kind, name, None)):
            twin.__dict__[name] = _led_to(twin, saver, value)
    for slot, value in _slots(saver):
        slot.__set__(twin, _led_to(twin, saver, value))
    for name, value in attributes.items():
        object.__setattr__(twin, name, value)
    return twin


def _led_to(twin: Any, saver: object, value: Any) -> Any:
    if value is saver:
        return twin
    if isinstance(value, MethodType) and value.__self__ is saver:
        return MethodType(value.__func__, twin)
    return value


def _slots(saver: object) -> Iterator[tuple[MemberDescriptorType, Any]]:
    for base in type(saver).__mro__:
        for slot in vars(base).values():
            if isinstance(slot, MemberDescriptorType):
                try:
                    yield slot, slot.__get__(saver)
                except AttributeError:  # Nothing was assigned to it.
                    continue
