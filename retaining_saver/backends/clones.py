"""Clone a saver whose lock or connection is held, so that its own methods can read on it."""

from __future__ import annotations

from inspect import isroutine
from typing import Any, TypeVar

AnySaver = TypeVar("AnySaver")


def clone(saver: AnySaver, **attributes: Any) -> AnySaver:
    """Return a shallow copy with other ``attributes``.

    Methods that were replaced on the instance are the class's own again: a replacement that calls
    the original's method would wait for the lock that is held.
    """
    kind = type(saver)
    twin = kind.__new__(kind)
    for name, value in vars(saver).items():
        if not isroutine(getattr(kind, name, None)):
            twin.__dict__[name] = value
    twin.__dict__.update(attributes)
    return twin
