"""Count events in Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retaining_saver.events import Event
from retaining_saver.hooks import labels

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class PrometheusHook:
    """Count events as ``retaining_saver_events_total{event="Reclaimed",outcome=""}``.

    Registers with ``registry``, by default the client's global one. A registry takes the counter
    once: give several savers the same hook.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        try:
            from prometheus_client import REGISTRY, Counter
        except ImportError as error:
            raise ImportError(
                "PrometheusHook needs the Prometheus client: "
                'pip install "retaining-saver[prometheus]"'
            ) from error
        self._events = Counter(
            "retaining_saver_events",
            "What was decided about checkpoints.",
            ("event", "outcome"),
            registry=REGISTRY if registry is None else registry,
        )

    def __call__(self, event: Event) -> None:
        self._events.labels(**labels(event)).inc()
