"""Hooks count what happened by type and outcome, and name no thread."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import datetime, timezone

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from retaining_saver.events import DeleteFailed, Event, Reclaimed, Refused, emit
from retaining_saver.hooks.otel import OpenTelemetryHook
from retaining_saver.hooks.prometheus import PrometheusHook


def happened(kind: Callable[..., Event], **details: str) -> Event:
    return kind(
        thread_id="thread-of-somebody",
        checkpoint_ns="",
        checkpoint_id="id-of-something",
        at=datetime(2026, 1, 2, tzinfo=timezone.utc),
        **details,
    )


def events() -> list[Event]:
    return [
        happened(Reclaimed, parent_id="p"),
        happened(Reclaimed, parent_id="p"),
        happened(Refused, outcome="pinned"),
        happened(DeleteFailed, error_type="OperationalError"),
    ]


def test_prometheus_counts_each_type_and_outcome() -> None:
    registry = CollectorRegistry()
    emit([PrometheusHook(registry)], events())

    def counted(event: str, outcome: str) -> float | None:
        labels = {"event": event, "outcome": outcome}
        return registry.get_sample_value("retaining_saver_events_total", labels)

    assert 2 == counted("Reclaimed", "")
    assert 1 == counted("Refused", "pinned")
    assert 1 == counted("DeleteFailed", "OperationalError")
    assert counted("Refused", "no_leaf") is None


def test_prometheus_sees_no_ids() -> None:
    registry = CollectorRegistry()
    emit([PrometheusHook(registry)], events())
    exposed = generate_latest(registry).decode()
    assert "Reclaimed" in exposed
    assert "somebody" not in exposed
    assert "something" not in exposed


def test_prometheus_uses_the_global_registry_by_default() -> None:
    hook = PrometheusHook()
    try:
        emit([hook], events())
        labels = {"event": "Refused", "outcome": "pinned"}
        assert 1 == REGISTRY.get_sample_value("retaining_saver_events_total", labels)
    finally:
        REGISTRY.unregister(hook._events)


def test_opentelemetry_counts_each_type_and_outcome_without_ids() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    emit([OpenTelemetryHook(provider.get_meter("test"))], events())
    data = reader.get_metrics_data()
    assert data is not None
    metric = data.resource_metrics[0].scope_metrics[0].metrics[0]
    counted = {
        tuple(sorted((point.attributes or {}).items())): point.value
        for point in metric.data.data_points
        if isinstance(point, NumberDataPoint)
    }
    provider.shutdown()
    assert "retaining_saver.events" == metric.name
    assert {
        (("event", "Reclaimed"), ("outcome", "")): 2,
        (("event", "Refused"), ("outcome", "pinned")): 1,
        (("event", "DeleteFailed"), ("outcome", "OperationalError")): 1,
    } == counted


def test_opentelemetry_works_without_a_configured_provider() -> None:
    # A failure would be swallowed by ``emit``.
    OpenTelemetryHook()(events()[0])


@pytest.mark.parametrize(
    ("hook", "package", "extra"),
    [
        (PrometheusHook, "prometheus_client", "prometheus"),
        (OpenTelemetryHook, "opentelemetry.metrics", "otel"),
    ],
)
def test_a_missing_package_is_an_import_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, hook: type, package: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError) as raised:
        hook()
    assert f'pip install "retaining-saver[{extra}]"' in str(raised.value)
