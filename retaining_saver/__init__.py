"""Reclaim LangGraph checkpoint storage without ever breaking a conversation."""

from retaining_saver.admission import Admission
from retaining_saver.annotations import RunHistory
from retaining_saver.backends import Backend, register_backend
from retaining_saver.backends.retention import StorageStats
from retaining_saver.caches import (
    CacheStats,
    HistoryCache,
    MemoryHistoryCache,
    RedisHistoryCache,
)
from retaining_saver.errors import (
    ChannelModeMismatchError,
    CheckpointLineageError,
    CheckpointNotFoundError,
    CheckpointParentMissingError,
    CheckpointReclaimedError,
    PinsFullError,
    PlanRefused,
    PolicyError,
    RetainingSaverError,
    UnsupportedSaverError,
)
from retaining_saver.events import (
    CacheFailed,
    DeleteFailed,
    Event,
    Folded,
    Hook,
    Invalidated,
    LeafTagged,
    PinFailed,
    Readdressed,
    Reclaimed,
    Refused,
    ThreadRetained,
    log_hook,
)
from retaining_saver.hooks.otel import OpenTelemetryHook
from retaining_saver.hooks.prometheus import PrometheusHook
from retaining_saver.leaves import classify_duration
from retaining_saver.pins import MemoryPins, Pin, PinRegistry, StorePins
from retaining_saver.planned import Entry, RetentionPlan
from retaining_saver.policy import RetentionPolicy
from retaining_saver.retention import RetentionReport
from retaining_saver.saver import RetainingSaver

__all__ = [
    "Admission",
    "Backend",
    "CacheFailed",
    "CacheStats",
    "ChannelModeMismatchError",
    "CheckpointLineageError",
    "CheckpointNotFoundError",
    "CheckpointParentMissingError",
    "CheckpointReclaimedError",
    "DeleteFailed",
    "Entry",
    "Event",
    "Folded",
    "HistoryCache",
    "Hook",
    "Invalidated",
    "LeafTagged",
    "MemoryHistoryCache",
    "MemoryPins",
    "OpenTelemetryHook",
    "Pin",
    "PinFailed",
    "PinRegistry",
    "PinsFullError",
    "PlanRefused",
    "PolicyError",
    "PrometheusHook",
    "Readdressed",
    "Reclaimed",
    "RedisHistoryCache",
    "Refused",
    "RetainingSaver",
    "RetainingSaverError",
    "RetentionPlan",
    "RetentionPolicy",
    "RetentionReport",
    "RunHistory",
    "StorageStats",
    "StorePins",
    "ThreadRetained",
    "UnsupportedSaverError",
    "classify_duration",
    "log_hook",
    "register_backend",
]
