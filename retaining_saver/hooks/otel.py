"""Count events in OpenTelemetry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retaining_saver.events import Event
from retaining_saver.hooks import labels

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter


class OpenTelemetryHook:
    """Count events as ``retaining_saver.events`` with the attributes ``event`` and ``outcome``.

    Without ``meter`` the counter comes from the global meter provider.
    """

    def __init__(self, meter: Meter | None = None) -> None:
        try:
            from opentelemetry.metrics import get_meter
        except ImportError as error:
            raise ImportError(
                'OpenTelemetryHook needs the OpenTelemetry API: pip install "retaining-saver[otel]"'
            ) from error
        self._events = (meter or get_meter("retaining_saver")).create_counter(
            "retaining_saver.events",
            unit="{event}",
            description="What was decided about checkpoints.",
        )

    def __call__(self, event: Event) -> None:
        self._events.add(1, labels(event))
