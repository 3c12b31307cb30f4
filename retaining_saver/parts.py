"""What every operation works with, and the journal of what it decided."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointMetadata

from retaining_saver.backends.base import Backend
from retaining_saver.caches.base import HistoryCache
from retaining_saver.errors import UnsupportedSaverError
from retaining_saver.events import CacheFailed, DeleteFailed, Event, PinFailed
from retaining_saver.known import KnownLeaves
from retaining_saver.pins import PinRegistry
from retaining_saver.records import Ref

Clock = Callable[[], datetime]
Classify = Callable[[CheckpointMetadata], "str | None"]
AdmissionPoint = Literal["auto", "put", "manual"]
Annotations = Literal["leaf", "fold"]


@dataclass(frozen=True, slots=True)
class Parts:
    """The wrapped saver and all that wrappers and their clones share."""

    inner: BaseCheckpointSaver[Any]
    backend: Backend | None
    pins: PinRegistry
    cache: HistoryCache | None
    known: KnownLeaves
    admission: AdmissionPoint
    annotations: Annotations
    classify: Classify
    clock: Clock

    @property
    def storage(self) -> Backend:
        """The backend; raises ``UnsupportedSaverError`` where there is none."""
        if self.backend is None:
            raise UnsupportedSaverError(
                f"{type(self.inner).__qualname__} has no backend that reaches its rows; "
                "see register_backend"
            )
        return self.backend


@dataclass(slots=True)
class Journal:
    """Collects events while a lock is held; hooks see them after it was released."""

    clock: Clock
    events: list[Event] = field(default_factory=list)

    def note(self, event: Callable[..., Event], ref: Ref, **details: Any) -> None:
        """Remember that ``event`` happened to ``ref``."""
        self.events.append(
            event(
                thread_id=ref.thread_id,
                checkpoint_ns=ref.checkpoint_ns,
                checkpoint_id=ref.checkpoint_id,
                at=self.clock(),
                **details,
            )
        )

    def cache_failed(self, ref: Ref, error: Exception) -> None:
        """Note that the history cache failed at something that went on without it."""
        self.note(CacheFailed, ref, error_type=type(error).__name__)


@dataclass(slots=True)
class Attempt:
    """Whether the block under ``reported`` failed."""

    failed: bool = False


@contextmanager
def reported(
    journal: Journal, event: type[CacheFailed | DeleteFailed | PinFailed], ref: Ref
) -> Iterator[Attempt]:
    """Note a failure of our own work in the journal instead of failing the user's run.

    A synchronous call into an async saver from its own event loop is a mistake in the calling
    code, not a failure of storage, and passes through.
    """
    attempt = Attempt()
    try:
        yield attempt
    except asyncio.InvalidStateError:
        raise
    except Exception as error:
        attempt.failed = True
        journal.note(event, ref, error_type=type(error).__name__)
