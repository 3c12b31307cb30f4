"""What happened, as frozen records of ids and counts, never payloads; the hook that logs them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from datetime import datetime

logger = logging.getLogger("retaining_saver")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that was decided about a checkpoint. ``at`` is UTC."""

    thread_id: str
    checkpoint_ns: str
    checkpoint_id: str | None
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafTagged(Event):
    """A metadata-only checkpoint was stored and marked as one."""

    parent_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded(Event):
    """What a metadata-only checkpoint recorded was moved into ``parent_id``."""

    parent_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaimed(Event):
    """A metadata-only leaf was deleted; ``parent_id`` holds the same state."""

    parent_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Event):
    """A metadata-only leaf stayed; ``outcome`` names the condition that failed."""

    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Invalidated(Event):
    """The thread's cached histories were purged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFailed(Event):
    """The history cache failed. A failed purge stops the deletion it was to precede."""

    error_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteFailed(Event):
    """The storage failed while work of ours was under way; nothing was changed."""

    error_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PinFailed(Event):
    """The pin registry failed; the run goes on, and its resume target may expire early."""

    error_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Readdressed(Event):
    """``count`` rows that were written for a reclaimed leaf now belong to ``parent_id``."""

    parent_id: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadRetained(Event):
    """Whole-thread retention removed ``count`` checkpoints."""

    count: int


Hook = Callable[[Event], None]


def log_hook(event: Event) -> None:
    """Write an event to the logger ``retaining_saver``: failures as warnings, the rest as debug."""
    level = (
        logging.WARNING
        if isinstance(event, (CacheFailed, DeleteFailed, PinFailed))
        else logging.DEBUG
    )
    if logger.isEnabledFor(level):
        shown = " ".join(f"{f.name}={_told(getattr(event, f.name))}" for f in fields(event))
        logger.log(level, "%s %s", type(event).__name__, shown)


def _told(value: object) -> str:
    # Ids are anybody's text: no line break of theirs begins a line of the log, and what no
    # encoding takes is escaped.
    return repr(value) if isinstance(value, str) else str(value)


def emit(hooks: Iterable[Hook], events: Iterable[Event]) -> None:
    """Hand every event to every hook. A hook that raises is logged and ignored."""
    for event in events:
        for hook in hooks:
            try:
                hook(event)
            except Exception:
                logger.exception("hook %r failed on %s", hook, type(event).__name__)
