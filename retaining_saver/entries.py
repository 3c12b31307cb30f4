"""What is stored of one thread, read without values: the input of ``lineage`` and ``plan``. Pure.

A backend makes one record per checkpoint of every namespace through ``ThreadRecords`` and never
loads a value for it. A record is small (about half a kilobyte) however large the checkpoint or
its history maps are: names that repeat are stored once per thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from retaining_saver.folds import (
    HISTORY_MAPS,
    Metadata,
    adds_history,
    has_legacy_marker,
    kind_of,
)

# LangGraph's private names, as of langgraph 1.2.
START = "__start__"
SENDS = "__pregel_tasks"
BRANCH = "branch:to:"
INTERRUPT = "__interrupt__"
ERROR = "__error__"
RESUME = "__resume__"
NULL_TASK_ID = "00000000-0000-0000-0000-000000000000"
FORKED = ("update", "fork")
"""Sources of checkpoints that a replay reads subgraphs for as of their parents."""

_FOREIGN_DELTA = "delta_writes_versioned"
"""LangGraph.js marks with it the threads of graphs with delta channels, and has no counters."""

CARRIER = "carrier"
"""The kind of a synthetic checkpoint that carries what a delta channel needs across a cut."""
LEGACY = "legacy"
"""The claim of a row that an application marked as duration-only by itself."""


@dataclass(frozen=True, slots=True)
class Writes:
    """The rows that the writes table holds for one checkpoint, summarised.

    ``asked`` and ``failed`` are the tasks with an ``__interrupt__`` and an ``__error__`` row.
    ``null_task`` tells that some row belongs to no task: readers apply those as the
    checkpoint's own state.
    """

    rows: int = 0
    channels: frozenset[str] = frozenset()
    asked: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    null_task: bool = False

    @classmethod
    def of(cls, rows: Iterable[tuple[str, str]]) -> Writes:
        """Summarise rows given as ``(task_id, channel)``."""
        listed = list(rows)
        if not listed:
            return NO_WRITES
        return cls(
            len(listed),
            frozenset(channel for _, channel in listed),
            tuple(dict.fromkeys(task for task, channel in listed if channel == INTERRUPT)),
            tuple(dict.fromkeys(task for task, channel in listed if channel == ERROR)),
            any(task == NULL_TASK_ID for task, _ in listed),
        )


NO_WRITES = Writes()


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """One stored checkpoint, as far as retention looks at it.

    - ``claim``: what it says to be, ``None`` for most: the kind in its own retention mark
      (``"duration"``, ``"carrier"``, ...) or ``"legacy"``. A claim is proved before it counts.
    - ``annotates``: it records runs by itself that its parent does not.
    - ``has_history``: its metadata holds any entry of a history map.
    - ``matches``: its metadata satisfies the policy's ``keep_where``.
    - ``parents``: the checkpoints of the enclosing namespaces that it was written under.
    - ``versioned``: channels with a version; ``stored``: channels with a stored value;
      ``snapshots``: those of them that are snapshots of a delta channel; ``counted``: channels
      named by ``counters_since_delta_snapshot``.
    - ``fingerprint``: equal exactly for two checkpoints that differ at most in ``id`` and ``ts``.
    """

    checkpoint_ns: str
    checkpoint_id: str
    parent_id: str | None
    source: str | None
    step: int | None
    ts: datetime | None
    v: int
    run_id: str | None
    claim: str | None
    annotates: bool
    has_history: bool
    matches: bool
    parents: tuple[tuple[str, str], ...]
    start_version: Any
    versioned: frozenset[str]
    stored: frozenset[str]
    snapshots: frozenset[str]
    counted: frozenset[str]
    fingerprint: bytes
    writes: Writes

    @property
    def due(self) -> bool:
        """Tell whether something is about to run from it."""
        return any(c in (START, SENDS) or c.startswith(BRANCH) for c in self.stored)

    @property
    def root_id(self) -> str | None:
        """The root checkpoint that the subgraph call was started from."""
        return dict(self.parents).get("")


@dataclass(frozen=True, slots=True)
class OrphanWrites:
    """Rows of the writes table that name a checkpoint which is not stored."""

    checkpoint_ns: str
    checkpoint_id: str
    rows: int


@dataclass(frozen=True, slots=True)
class StoredThread:
    """Everything stored of one thread. ``problems`` are sentences on what could not be read."""

    thread_id: str
    checkpoints: tuple[StoredCheckpoint, ...] = ()
    orphan_writes: tuple[OrphanWrites, ...] = ()
    problems: tuple[str, ...] = ()


class ThreadRecords:
    """Collects the records of one thread, in any order.

    ``matches`` is the policy's test of a checkpoint's metadata (``RetentionPolicy.matches``).
    """

    def __init__(
        self, thread_id: str, *, matches: Callable[[Metadata], bool] = lambda _: False
    ) -> None:
        self._thread_id = thread_id
        self._matches = matches
        self._pool: dict[Any, Any] = {}
        self._checkpoints: list[StoredCheckpoint] = []
        self._foreign: str | None = None

    def add(
        self,
        checkpoint_ns: str,
        checkpoint_id: str,
        parent_id: str | None,
        *,
        metadata: Metadata,
        parent_metadata: Callable[[], Metadata | None],
        body: Mapping[str, Any],
        ts: datetime | str | None,
        stored: Iterable[str],
        snapshots: Iterable[str],
        fingerprint: bytes,
        writes: Writes = NO_WRITES,
    ) -> None:
        """Add one checkpoint.

        ``body`` is the checkpoint dict; only ``v`` and ``channel_versions`` are looked at.
        ``parent_metadata`` reads the parent's metadata (``None`` if it is not stored); it is
        called only for the few rows that may be metadata-only without saying so. ``stored`` are
        the channels that a reader of the saver finds a value of, a null one too (a thread that
        waits stores ``branch:to:*`` as null), but for an empty list of sends.
        """
        if _FOREIGN_DELTA in metadata:
            self._foreign = checkpoint_id
        versions: Mapping[str, Any] = body.get("channel_versions") or {}
        claim = kind_of(checkpoint_id, metadata) or (
            LEGACY if has_legacy_marker(metadata) else None
        )
        source = metadata.get("source")
        self._checkpoints.append(
            StoredCheckpoint(
                checkpoint_ns=self._one(checkpoint_ns),
                checkpoint_id=self._one(checkpoint_id),
                parent_id=self._one(parent_id or None),
                source=self._one(source),
                step=metadata.get("step"),
                ts=_time(ts),
                v=int(body.get("v") or 1),
                run_id=self._one(_text(metadata.get("run_id"))),
                claim=self._one(claim),
                annotates=claim is None
                and source == "update"
                and adds_history(checkpoint_id, metadata)
                and adds_history(checkpoint_id, metadata, parent_metadata()),
                has_history=any(metadata.get(key) for key in HISTORY_MAPS),
                matches=bool(self._matches(metadata)),
                parents=self._one(_pairs(metadata.get("parents"))),
                start_version=self._one(versions.get(START)),
                versioned=self._one(frozenset(versions)),
                stored=self._one(frozenset(stored)),
                snapshots=self._one(frozenset(snapshots)),
                counted=self._one(frozenset(metadata.get("counters_since_delta_snapshot") or ())),
                fingerprint=fingerprint,
                writes=self._one(writes),
            )
        )

    def thread(
        self,
        *,
        orphan_writes: Iterable[OrphanWrites] = (),
        problems: Iterable[str] = (),
    ) -> StoredThread:
        """Return everything added, ordered by namespace and id."""
        ordered = sorted(self._checkpoints, key=lambda c: (c.checkpoint_ns, c.checkpoint_id))
        found = [*problems]
        if self._foreign is not None:
            found.append(
                f"Checkpoint {self._foreign} is LangGraph.js's, whose delta channels leave no "
                "trace of what they read."
            )
        return StoredThread(self._thread_id, tuple(ordered), tuple(orphan_writes), tuple(found))

    def _one(self, value: Any) -> Any:
        # The type belongs to the key: 1, 1.0 and True are equal.
        return self._pool.setdefault((type(value), value), value)


def fingerprint(body: Mapping[str, Any], encode: Callable[[object], bytes] | None = None) -> bytes:
    """Digest a checkpoint dict; ``id`` and ``ts`` do not count, nor does the order of keys.

    ``encode`` turns a backend's opaque values into bytes; without it they are a ``TypeError``.
    """
    digest = hashlib.blake2b(digest_size=16)
    _feed(digest.update, {k: v for k, v in body.items() if k not in ("id", "ts")}, encode)
    return digest.digest()


def _feed(
    update: Callable[[bytes], None], value: Any, encode: Callable[[object], bytes] | None
) -> None:
    # Each piece is preceded by its kind and length, so that no two values read alike.
    if isinstance(value, Mapping):
        update(b"m%d;" % len(value))
        for key in sorted(value, key=lambda k: (type(k).__name__, str(k))):
            _feed(update, key, encode)
            _feed(update, value[key], encode)
    elif isinstance(value, (list, tuple)):
        update(b"l%d;" % len(value))
        for item in value:
            _feed(update, item, encode)
    elif value is None or isinstance(value, (str, bytes, bool, int, float)):
        text = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
        update(b"%s%d;" % (type(value).__name__.encode(), len(text)))
        update(text)
    elif encode is not None:
        encoded = encode(value)
        update(b"o%d;" % len(encoded))
        update(encoded)
    else:
        raise TypeError(f"Cannot digest a value of type {type(value).__name__} without `encode`.")


def _time(ts: datetime | str | None) -> datetime | None:
    if isinstance(ts, str):
        try:
            # Python 3.10 does not read the `Z` that other writers use.
            ts = datetime.fromisoformat(ts.replace("Z", "+00:00"))
        except ValueError:
            return None
    return ts.replace(tzinfo=timezone.utc) if ts is not None and ts.tzinfo is None else ts


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _pairs(value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, Mapping):
        return ()
    return tuple((str(ns), str(checkpoint_id)) for ns, checkpoint_id in value.items())
