"""Ready hooks that need another package: ``hooks.prometheus`` and ``hooks.otel``."""

from __future__ import annotations

from retaining_saver.events import Event


def labels(event: Event) -> dict[str, str]:
    """Describe an event in few different ways: its type, and how it ended if it says so.

    Thread and checkpoint ids are left out: each would be a time series of its own.
    """
    outcome = getattr(event, "outcome", None) or getattr(event, "error_type", None) or ""
    return {"event": type(event).__name__, "outcome": outcome}
