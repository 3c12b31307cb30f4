"""Notice values that a serializer could not rebuild, so that they are not cached for others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from langgraph.checkpoint.serde.event_hooks import SerdeEvent, register_serde_event_listener


class LostTypes:
    """Types that the serializer met and could not build, where it says so."""

    def __init__(self) -> None:
        self._blocked = False
        self._met: set[tuple[str, str]] = set()

    def note(self, event: SerdeEvent) -> None:
        if event["kind"] == "msgpack_unregistered_allowed":
            self._met.add((event["module"], event["name"]))
        else:
            self._blocked = True

    def __bool__(self) -> bool:
        return self._blocked or not all(
            hasattr(sys.modules.get(module), name) for module, name in self._met
        )


_noticing: ContextVar[LostTypes | None] = ContextVar("noticing", default=None)


@contextmanager
def noticing_lost_types() -> Iterator[LostTypes]:
    """Notice values that come back as bare data for want of their class.

    Cached, they would come back so for readers that do have it.
    """
    lost, outer = LostTypes(), _noticing.get()

    def listen(event: SerdeEvent) -> None:
        # Called for every load in the process; the context tells which are this read's.
        if _noticing.get() is lost:
            lost.note(event)

    stop = register_serde_event_listener(listen)
    _noticing.set(lost)
    try:
        yield lost
    finally:
        _noticing.set(outer)
        stop()
