"""Read-through delta histories: from the cache, from the nearest cached ancestor, or by one walk.

A checkpoint's history never changes while its thread is not purged. It is made of what its
*ancestors* stored, and those are sealed: LangGraph stores a checkpoint after its parent's delta
writes, and whatever branches off later stores snapshots instead of writes. So a new head's history
is its nearest cached ancestor's, followed by the writes of the few checkpoints in between.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    CheckpointTuple,
    DeltaChannelHistory,
    PendingWrite,
)

from retaining_saver._steps import Steps, call
from retaining_saver.backends.base import Backend, SnapshotReads
from retaining_saver.caches.base import Epoch, HistoryCache, HistoryKey
from retaining_saver.caches.history import StoredHistory
from retaining_saver.caches.lost_types import noticing_lost_types
from retaining_saver.caches.readers import Readers, Turn, parent_id
from retaining_saver.errors import CheckpointNotFoundError
from retaining_saver.records import Ref

__all__ = [
    "MAX_STEPS",
    "Readers",
    "Spared",
    "delta_history",
    "purge_sparing",
    "put_back",
    "writes_arrived",
]

logger = logging.getLogger("retaining_saver")

MAX_STEPS = 32
"""How many checkpoints are looked at on the way to a cached ancestor; then the saver walks."""

T = TypeVar("T")
Saver = BaseCheckpointSaver[Any]
Histories = Mapping[str, DeltaChannelHistory]
ParentOf = Callable[[str, str], "str | None"]
"""Tells the parent of a reclaimed leaf, by thread and id."""
CacheFailure = Callable[[Ref, Exception], None]
"""Told when the cache failed at a read, which went on without it."""


def _unknown(_thread_id: str, _checkpoint_id: str) -> str | None:
    return None


def _log_failure(ref: Ref, error: Exception) -> None:
    logger.warning("history cache failed for thread %s: %s", ref.thread_id, type(error).__name__)


def delta_history(
    inner: Saver,
    cache: HistoryCache | None,
    readers: Readers,
    config: RunnableConfig,
    channels: Sequence[str],
    *,
    backend: Backend | None = None,
    parent_of: ParentOf = _unknown,
    cache_failed: CacheFailure = _log_failure,
) -> Steps[Histories]:
    """Return what ``inner.get_delta_channel_history`` returns, in objects that nobody else has.

    - Cached under the checkpoint's own id, never under "latest".
    - A checkpoint that is gone is never served empty: a leaf that was reclaimed reads as its
      parent does; another id raises ``CheckpointNotFoundError``, unless nothing was ever seen
      in its namespace.
    - Concurrent misses for one checkpoint do the work once.
    - What is read to make one history was stored at one moment, where ``backend`` can tell.
    - The cache can fail without failing the read.
    """
    wanted = list(dict.fromkeys(channels))
    if not wanted:
        return {}
    ref = Ref.of(config)
    if ref.checkpoint_id is None:
        head = yield from call(inner.get_tuple, inner.aget_tuple, config)
        if head is None:
            return {channel: {"writes": []} for channel in wanted}
        readers.saw(head)
        ref = Ref.of(head.config)
    read = _Read(inner, cache, readers, ref, config, backend, parent_of, cache_failed)
    return (yield from read.histories(wanted))


def writes_arrived(
    cache: HistoryCache | None,
    readers: Readers,
    config: RunnableConfig,
    *,
    cache_failed: CacheFailure = _log_failure,
) -> Steps[None]:
    """Purge the thread if the checkpoint that was just written to is known not to be newest.

    Time travel can add writes to a checkpoint that has children, when a task runs there again and
    writes more than before, or answers a question that another branch had left open. The bare
    saver then reads them into the children as well.
    """
    ref = Ref.of(config)
    if cache is None or not readers.is_superseded(ref):
        return
    try:
        yield from call(cache.delete_thread, cache.adelete_thread, ref.thread_id)
    except Exception as error:
        cache_failed(ref, error)


@dataclass(frozen=True, slots=True)
class Spared:
    """Histories that outlive a purge, and the epoch that the purge began."""

    entries: Mapping[HistoryKey, StoredHistory]
    epoch: Epoch | None


def purge_sparing(
    cache: HistoryCache, parent: Ref, *, cache_failed: CacheFailure = _log_failure
) -> Steps[Spared]:
    """Purge a thread before a leaf of ``parent`` is reclaimed. Raises if the purge fails.

    Reclaiming a leaf changes no history of ``parent``, of older checkpoints, or of another
    namespace. Without the newest of these, each run on a thread with leaves would begin with a
    walk through all of it. ``put_back`` them once the leaf is gone.
    """
    entries: Mapping[HistoryKey, StoredHistory] = {}
    epoch: Epoch | None = None
    try:
        epoch = yield from call(cache.epoch, cache.aepoch, parent.thread_id)
        if epoch is not None and (keys := _unaffected(epoch.held, parent)):
            entries = yield from call(cache.get_many, cache.aget_many, keys)
    except Exception as error:
        cache_failed(parent, error)
    yield from call(cache.delete_thread, cache.adelete_thread, parent.thread_id)
    if not entries:
        return Spared({}, None)
    try:
        # Asked for before the deletion: a thread that is deleted meanwhile is purged again, and
        # then nothing can be put back.
        epoch = yield from call(cache.epoch, cache.aepoch, parent.thread_id)
    except Exception as error:
        cache_failed(parent, error)
        epoch = None
    return Spared(entries, epoch)


def put_back(
    cache: HistoryCache, parent: Ref, spared: Spared, *, cache_failed: CacheFailure = _log_failure
) -> Steps[None]:
    """Store what ``purge_sparing`` spared, unless the thread was purged since."""
    if spared.epoch is None:
        return
    try:
        yield from call(cache.set_many, cache.aset_many, spared.entries, spared.epoch)
    except Exception as error:
        cache_failed(parent, error)


def _unaffected(held: Iterable[HistoryKey], parent: Ref) -> list[HistoryKey]:
    """Choose the newest key of each channel that reclaiming a leaf of ``parent`` leaves valid."""
    newest: dict[tuple[str, str], HistoryKey] = {}
    for key in sorted(held, key=lambda key: key.checkpoint_id):
        is_newer = key.checkpoint_id > (parent.checkpoint_id or "")
        if key.checkpoint_ns != parent.checkpoint_ns or not is_newer:
            newest[key.checkpoint_ns, key.channel] = key
    return list(newest.values())


@dataclass(slots=True)
class _Stretch:
    """What one channel stored between a checkpoint and where its history is known.

    That is a stored value (``seed``), a cached ancestor (``anchor``), or the root (neither).
    """

    newest_first: list[list[PendingWrite]] = field(default_factory=list)
    seed: list[Any] = field(default_factory=list)
    anchor: HistoryKey | None = None

    @property
    def writes(self) -> list[PendingWrite]:
        """The writes, oldest first."""
        return [write for writes in reversed(self.newest_first) for write in writes]


@dataclass(frozen=True, slots=True)
class _Read:
    """One read of a resolved checkpoint's histories."""

    inner: Saver
    cache: HistoryCache | None
    readers: Readers
    ref: Ref
    config: RunnableConfig
    backend: Backend | None
    parent_of: ParentOf
    cache_failed: CacheFailure

    def histories(self, channels: list[str]) -> Steps[Histories]:
        """Read every channel: cached ones from the cache, the others once for all readers."""
        if self.cache is None:
            histories, _ = yield from self._walked(channels)
            return histories
        found = yield from self._cached(channels)
        missing = [channel for channel in channels if channel not in found]
        if missing:
            epoch = yield from self._epoch()
            found.update((yield from self._shared(missing, epoch)))
        return {channel: found[channel] for channel in channels}

    def _shared(self, channels: list[str], epoch: Epoch | None) -> Steps[Histories]:
        flight = self.readers.flight(self.ref, epoch)
        turn = Turn(flight)
        try:
            yield from call(turn.begin, turn.abegin)
            found = self._thawed({c: flight.entries[c] for c in channels if c in flight.entries})
            missing = [channel for channel in channels if channel not in found]
            if missing:
                histories, entries = yield from self._computed(missing, epoch)
                flight.entries.update(entries)
                found.update(histories)
            return found
        finally:
            turn.end()

    def _computed(
        self, channels: list[str], epoch: Epoch | None
    ) -> Steps[tuple[Histories, dict[str, StoredHistory]]]:
        """Compose what can be composed, walk for the rest, and offer both to the cache."""
        with noticing_lost_types() as lost:
            entries = yield from self._composed(channels, epoch.held if epoch else frozenset())
            histories = self._thawed(entries)
            rest = [channel for channel in channels if channel not in histories]
            if rest:
                walked, may_be_kept = yield from self._walked(rest)
                histories.update(walked)
                if may_be_kept:
                    entries.update(self._stored(walked))
        if lost:
            # Another reader may have the types that this process could not rebuild.
            return histories, {}
        if epoch is not None and entries:
            yield from self._keep(entries, epoch)
        return histories, entries

    # Composing from a cached ancestor.

    def _composed(
        self, channels: list[str], held: Iterable[HistoryKey]
    ) -> Steps[dict[str, StoredHistory]]:
        anchors = self._possible_anchors(channels, held)
        if not anchors:
            return {}
        stretches = yield from self._at_one_moment(lambda saver: self._stretches(saver, anchors))
        keys = [s.anchor for s in stretches.values() if s.anchor is not None]
        cached = (yield from self._looked_up(keys)) if keys else {}
        return self._joined(stretches, cached)

    def _possible_anchors(
        self, channels: list[str], held: Iterable[HistoryKey]
    ) -> dict[str, dict[str, HistoryKey]]:
        """Find, per channel, the cached checkpoints that may be ancestors, by id."""
        anchors: dict[str, dict[str, HistoryKey]] = {}
        for key in held:
            older = key.checkpoint_id < (self.ref.checkpoint_id or "")
            if key.channel in channels and key.checkpoint_ns == self.ref.checkpoint_ns and older:
                anchors.setdefault(key.channel, {})[key.checkpoint_id] = key
        return anchors

    def _stretches(
        self, saver: Saver, anchors: dict[str, dict[str, HistoryKey]]
    ) -> Steps[dict[str, _Stretch]]:
        """Look at ancestors until every channel is settled or there is no anchor left to meet."""
        settled: dict[str, _Stretch] = {}
        unsettled = {channel: _Stretch() for channel in anchors}
        parent = self.readers.parent(self.ref)
        at = self.ref.checkpoint_id if parent is None else parent
        for _ in range(MAX_STEPS):
            ancestor = yield from self._tuple(saver, at)
            if ancestor is None:
                return settled
            if at != self.ref.checkpoint_id:
                settled.update(_settle(unsettled, anchors, ancestor))
            at = parent_id(ancestor)
            if at is None:
                settled.update(unsettled)
                return settled
            if not unsettled or at < min(min(anchors[channel]) for channel in unsettled):
                return settled
        return settled

    def _joined(
        self, stretches: dict[str, _Stretch], cached: Mapping[HistoryKey, StoredHistory]
    ) -> dict[str, StoredHistory]:
        entries: dict[str, StoredHistory] = {}
        for channel, stretch in stretches.items():
            with self._tolerated():
                if stretch.anchor is None:
                    start: DeltaChannelHistory = {"writes": []}
                    if stretch.seed:
                        start["seed"] = stretch.seed[0]
                    before: StoredHistory | None = StoredHistory.of(start, self.inner.serde)
                else:
                    before = cached.get(stretch.anchor)
                if before is not None:
                    entries[channel] = before.followed_by(stretch.writes, self.inner.serde)
        return entries

    # The saver's own walk, and targets that are gone.

    def _walked(self, channels: list[str]) -> Steps[tuple[Histories, bool]]:
        """Let the saver walk; also tell whether the result may be cached."""
        histories, gone = yield from self._at_one_moment(lambda saver: self._walk(saver, channels))
        if gone is None:
            return histories, True
        if gone == self.ref.checkpoint_id:
            return (yield from self._without_target(channels)), False
        heir = self.parent_of(self.ref.thread_id, gone)
        if heir is None:
            return histories, False
        return (yield from self._after(heir, channels, own_writes=True)), False

    def _walk(self, saver: Saver, channels: list[str]) -> Steps[tuple[Histories, str | None]]:
        """Let the saver walk; also name the target, or its parent, if that is not stored."""
        histories: Histories = yield from call(
            saver.get_delta_channel_history,
            saver.aget_delta_channel_history,
            config=self._at(self.ref.checkpoint_id),
            channels=channels,
        )
        if any(history["writes"] or "seed" in history for history in histories.values()):
            return histories, None
        # Nothing at all: a young thread, or something is gone that the walk should have met.
        target = yield from self._tuple(saver, self.ref.checkpoint_id)
        if target is None:
            return histories, self.ref.checkpoint_id
        parent = parent_id(target)
        if parent is None or (yield from self._tuple(saver, parent)) is not None:
            return histories, None
        return histories, parent

    def _without_target(self, channels: list[str]) -> Steps[Histories]:
        """Read a reclaimed leaf as its parent, whose state it repeated.

        The parent's own writes do not belong to it: a leaf is stored on a checkpoint without
        any, so these came with the next run.
        """
        assert self.ref.checkpoint_id is not None
        heir = self.parent_of(self.ref.thread_id, self.ref.checkpoint_id)
        if heir is not None:
            return (yield from self._after(heir, channels, own_writes=False))
        if not self.readers.has_seen(self.ref):
            head = yield from self._tuple(self.inner, None)
            if head is None:
                return {channel: {"writes": []} for channel in channels}
        raise CheckpointNotFoundError(
            f"The delta history of checkpoint {self.ref.checkpoint_id} of thread "
            f"{self.ref.thread_id} was asked for, but the checkpoint is no longer stored. "
            f"Read the thread again without a checkpoint_id."
        )

    def _after(self, parent: str, channels: list[str], *, own_writes: bool) -> Steps[Histories]:
        """Return the histories of a checkpoint as if ``parent`` were its parent."""
        stored = yield from self._tuple(self.inner, parent)
        config = self._at(parent)
        before = yield from delta_history(
            self.inner,
            self.cache,
            self.readers,
            config,
            channels,
            backend=self.backend,
            parent_of=self.parent_of,
            cache_failed=self.cache_failed,
        )
        if stored is None:
            return before
        return {
            channel: _continued(before[channel], channel, stored, own_writes=own_writes)
            for channel in channels
        }

    # Effects.

    def _cached(self, channels: list[str]) -> Steps[dict[str, DeltaChannelHistory]]:
        keys = {channel: self._key(channel) for channel in channels}
        entries = yield from self._looked_up(list(keys.values()))
        return self._thawed({c: entries[key] for c, key in keys.items() if key in entries})

    def _looked_up(self, keys: list[HistoryKey]) -> Steps[Mapping[HistoryKey, StoredHistory]]:
        assert self.cache is not None
        entries: Mapping[HistoryKey, StoredHistory] = {}
        with self._tolerated():
            entries = yield from call(self.cache.get_many, self.cache.aget_many, keys)
        return entries

    def _epoch(self) -> Steps[Epoch | None]:
        assert self.cache is not None
        epoch: Epoch | None = None
        with self._tolerated():
            epoch = yield from call(self.cache.epoch, self.cache.aepoch, self.ref.thread_id)
        return epoch

    def _keep(self, entries: dict[str, StoredHistory], epoch: Epoch) -> Steps[None]:
        assert self.cache is not None
        keyed = {self._key(channel): entry for channel, entry in entries.items()}
        with self._tolerated():
            yield from call(self.cache.set_many, self.cache.aset_many, keyed, epoch)

    def _at_one_moment(self, operation: Callable[[Saver], Steps[T]]) -> Steps[T]:
        """Read on one snapshot: retention may replace checkpoints between two reads of a saver."""
        backend: object = self.backend
        if not isinstance(backend, SnapshotReads):
            return (yield from operation(self.inner))
        found = yield from call(backend.on_snapshot, backend.aon_snapshot, operation)
        return cast(T, found)

    def _tuple(self, saver: Saver, checkpoint_id: str | None) -> Steps[CheckpointTuple | None]:
        config = self._at(checkpoint_id)
        stored = yield from call(saver.get_tuple, saver.aget_tuple, config)
        if stored is None:
            return None
        self.readers.saw(stored)
        return stored

    # Without effects.

    def _at(self, checkpoint_id: str | None) -> RunnableConfig:
        """Name another checkpoint as the caller named this one: thread ids may be numbers."""
        copy = self.config.copy()
        copy["configurable"] = {**self.config["configurable"], "checkpoint_id": checkpoint_id}
        return copy

    def _key(self, channel: str) -> HistoryKey:
        assert self.ref.checkpoint_id is not None
        return HistoryKey(
            self.ref.thread_id, self.ref.checkpoint_ns, self.ref.checkpoint_id, channel
        )

    def _thawed(self, entries: Mapping[str, StoredHistory]) -> dict[str, DeltaChannelHistory]:
        histories: dict[str, DeltaChannelHistory] = {}
        for channel, entry in entries.items():
            with self._tolerated():
                histories[channel] = entry.thaw(self.inner.serde, channel)
        return histories

    def _stored(self, histories: Histories) -> dict[str, StoredHistory]:
        entries: dict[str, StoredHistory] = {}
        for channel, history in histories.items():
            with self._tolerated():
                entries[channel] = StoredHistory.of(history, self.inner.serde)
        return entries

    @contextmanager
    def _tolerated(self) -> Iterator[None]:
        """Report a failure of caching instead of failing the read."""
        try:
            yield
        except Exception as error:
            self.cache_failed(self.ref, error)


def _settle(
    unsettled: dict[str, _Stretch],
    anchors: dict[str, dict[str, HistoryKey]],
    ancestor: CheckpointTuple,
) -> dict[str, _Stretch]:
    """Add an ancestor to every stretch; take out and return those that end there."""
    checkpoint_id = Ref.of(ancestor.config).checkpoint_id or ""
    values = ancestor.checkpoint["channel_values"]
    settled: dict[str, _Stretch] = {}
    for channel, stretch in list(unsettled.items()):
        stretch.newest_first.append(_own_writes(ancestor, channel))
        if channel in values:
            del unsettled[channel]
            # Savers disagree whether a stored ``None`` is a value; each one's walk knows.
            if values[channel] is not None:
                stretch.seed.append(values[channel])
                settled[channel] = stretch
        elif checkpoint_id in anchors[channel]:
            stretch.anchor = anchors[channel][checkpoint_id]
            settled[channel] = unsettled.pop(channel)
    return settled


def _own_writes(stored: CheckpointTuple, channel: str) -> list[PendingWrite]:
    return [write for write in stored.pending_writes or () if write[1] == channel]


def _continued(
    before: DeltaChannelHistory, channel: str, stored: CheckpointTuple, *, own_writes: bool
) -> DeltaChannelHistory:
    """Continue the history of ``stored`` past itself."""
    writes = _own_writes(stored, channel) if own_writes else []
    values = stored.checkpoint["channel_values"]
    if values.get(channel) is not None:
        return {"seed": values[channel], "writes": writes}
    continued: DeltaChannelHistory = {"writes": [*before["writes"], *writes]}
    if "seed" in before:
        continued["seed"] = before["seed"]
    return continued
