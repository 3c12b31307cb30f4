"""RetainingSaver: the decorator, one line per method and face."""

from __future__ import annotations

import copy
import warnings
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from inspect import signature
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
)
from langgraph.checkpoint.serde.base import SerializerProtocol

from retaining_saver import admission as admissions
from retaining_saver import interception, retention
from retaining_saver._steps import Steps, arun, call, run
from retaining_saver.admission import Admission
from retaining_saver.annotations import RunHistory, annotate, run_entries, run_history, storable
from retaining_saver.backends import find_backend, refusal
from retaining_saver.backends.base import Backend
from retaining_saver.caches import HistoryCache, MemoryHistoryCache
from retaining_saver.caches.readers import Readers
from retaining_saver.delta_history import delta_history, writes_arrived
from retaining_saver.errors import CheckpointNotFoundError, PlanRefused
from retaining_saver.events import Hook, emit, log_hook
from retaining_saver.interception import WritesRoute
from retaining_saver.known import KnownLeaves
from retaining_saver.leaves import classify_duration
from retaining_saver.listing import Listing, apaged, ashown, is_carrier, paged, shown
from retaining_saver.locks import ThreadLocks
from retaining_saver.parts import AdmissionPoint, Annotations, Classify, Clock, Journal, Parts
from retaining_saver.pins import MemoryPins, Pin, PinRegistry
from retaining_saver.planned import RetentionPlan
from retaining_saver.policy import RetentionPolicy
from retaining_saver.records import RUN_MARKER, Ref, is_root_run, named_refs
from retaining_saver.retention import RetentionReport

T = TypeVar("T")
Pins: TypeAlias = list[Pin]  # Inside the class, ``list`` is a method.

_UNSET: Any = object()


def utc_now() -> datetime:
    """Return the time, aware and in UTC."""
    return datetime.now(timezone.utc)


class RetainingSaver(BaseCheckpointSaver[Any]):
    """Wrap any LangGraph saver so that its metadata-only checkpoints are reclaimed.

    - Drop-in: pass it to ``compile(checkpointer=...)``. Every method of the wrapped saver works as
      before, in both spellings as far as the wrapped saver has them; attributes that only the
      wrapped saver defines are reached through this one.
    - Nothing is removed that is not provably a copy of its parent. What it recorded is folded into
      the parent first, in the same transaction.
    - A failure of our own storage work never fails a run: the run goes on as on the bare saver.
    - A ``put``, ``put_writes`` or ``get_tuple`` that involves no metadata-only checkpoint issues no
      statement of its own.

    ``inner`` is the saver to wrap; one of an unknown class works as before, with one warning and
    nothing reclaimed. Wrapping a ``RetainingSaver`` again changes nothing: its options stand.

    ``policy`` is what ``enforce_thread_retention`` does when given none: by default only
    metadata-only checkpoints go.
    ``admission``: when leaves are reclaimed. ``"auto"`` at a run's first unpinned root read, else
    at its first put; ``"put"`` at the first put only; ``"manual"`` only by ``admit``.
    ``annotations``: ``"leaf"`` stores metadata-only checkpoints as rows that the next admission
    reclaims, ``"fold"`` merges them into their parent at once. ``classify`` names the kind of
    metadata-only checkpoint that a put's metadata stands for, or returns ``None``. ``pins`` holds
    the ids that must stay addressable. ``history_cache`` remembers histories of delta channels, by
    default in this process; ``None`` turns it off. ``backend`` reaches the wrapped saver's rows;
    ``None`` finds one by class. ``hooks`` are called with an event after each decision; ``clock``
    returns an aware UTC time.

    Raises ``TypeError`` and ``ValueError`` for options that make no sense.
    """

    inner: BaseCheckpointSaver[Any]
    _parts: Parts
    _locks: ThreadLocks
    _readers: Readers
    _hooks: tuple[Hook, ...]
    _policy: RetentionPolicy

    def __init__(
        self,
        inner: BaseCheckpointSaver[Any],
        *,
        policy: RetentionPolicy | None = None,
        admission: AdmissionPoint = "auto",
        annotations: Annotations = "leaf",
        classify: Classify = classify_duration,
        pins: PinRegistry | None = None,
        history_cache: HistoryCache | None = _UNSET,
        backend: Backend | None = None,
        hooks: Iterable[Hook] = (log_hook,),
        clock: Clock = utc_now,
    ) -> None:
        # Not super().__init__: it would assign a serializer, and ours is the wrapped saver's.
        if not isinstance(inner, BaseCheckpointSaver):
            raise TypeError(f"inner must be a LangGraph checkpoint saver, not {inner!r}")
        _one_of("admission", admission, ("auto", "put", "manual"))
        _one_of("annotations", annotations, ("leaf", "fold"))
        self.inner = inner
        if isinstance(inner, RetainingSaver):
            self._policy = inner._policy
            self._parts = inner._parts
            self._locks = inner._locks
            self._readers = inner._readers
            self._hooks = inner._hooks
        else:
            self._policy = policy if policy is not None else RetentionPolicy()
            self._locks = ThreadLocks()
            self._readers = Readers()
            self._hooks = tuple(hooks)
            self._parts = Parts(
                inner=inner,
                backend=backend if backend is not None else _backend_for(inner),
                pins=pins if pins is not None else MemoryPins(),
                cache=_cache_for(inner, history_cache),
                known=KnownLeaves(),
                admission=admission,
                annotations=annotations,
                classify=classify,
                clock=_aware(clock),
            )
        self._takes_task_path = _takes_task_path(self._parts.inner)

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "_parts"):  # Not there yet while being copied or unpickled.
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"RetainingSaver({self.inner!r})"

    # The wrapped saver's own ways of being opened and closed.

    def __enter__(self) -> RetainingSaver:
        type(self.inner).__enter__(self.inner)  # type: ignore[attr-defined]  # not every saver has it
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        leave = type(self.inner).__exit__  # type: ignore[attr-defined]  # not every saver has it
        result: bool | None = leave(self.inner, exc_type, exc_value, traceback)
        return result

    async def __aenter__(self) -> RetainingSaver:
        await type(self.inner).__aenter__(self.inner)  # type: ignore[attr-defined]  # as above
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        leave = type(self.inner).__aexit__  # type: ignore[attr-defined]  # not every saver has it
        result: bool | None = await leave(self.inner, exc_type, exc_value, traceback)
        return result

    # What LangGraph asks of a saver besides storing.

    @property
    def serde(self) -> SerializerProtocol:  # type: ignore[override]  # the wrapped saver's, read-only
        """The wrapped saver's serializer."""
        return self.inner.serde

    @property
    def config_specs(self) -> list[Any]:
        return self.inner.config_specs

    def get_next_version(self, current: Any, channel: None) -> Any:
        return self.inner.get_next_version(current, channel)

    def with_allowlist(self, extra_allowlist: Collection[tuple[str, ...]]) -> RetainingSaver:
        """Clone around the wrapped saver's own clone; pins, caches, locks and memory are shared."""
        inner = self.inner.with_allowlist(extra_allowlist)
        if inner is self.inner:
            return self
        clone = copy.copy(self)
        clone.inner = inner
        if isinstance(inner, RetainingSaver):
            clone._parts = inner._parts
        else:
            backend = self._parts.backend
            rebound = None if backend is None else type(backend)(inner)
            clone._parts = replace(self._parts, inner=inner, backend=rebound)
        return clone

    # Reading.

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        ref = Ref.of(config)
        if ref.checkpoint_id is not None:
            read = partial(self._read_explicit, config=config, ref=ref)
            if RUN_MARKER not in config["configurable"]:
                return self._unlocked(read)
            # Locked, so that no admission deletes the checkpoint between the pin and the look.
            return self._locked(ref.thread_id, read)
        admits = self._parts.admission == "auto" and is_root_run(config)
        if admits and self._parts.known.meets(ref.thread_id):
            self._locked(ref.thread_id, self._admission_of(config))
            admits = False
        found = self._parts.inner.get_tuple(config)
        if self._noted(ref, found) and admits:
            self._locked(ref.thread_id, self._admission_of(config))
            found = self._parts.inner.get_tuple(config)
            self._noted(ref, found)
        return found

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        ref = Ref.of(config)
        if ref.checkpoint_id is not None:
            read = partial(self._read_explicit, config=config, ref=ref)
            if RUN_MARKER not in config["configurable"]:
                return await self._aunlocked(read)
            return await self._alocked(ref.thread_id, read)
        admits = self._parts.admission == "auto" and is_root_run(config)
        if admits and self._parts.known.meets(ref.thread_id):
            await self._alocked(ref.thread_id, self._admission_of(config))
            admits = False
        found = await self._parts.inner.aget_tuple(config)
        if self._noted(ref, found) and admits:
            await self._alocked(ref.thread_id, self._admission_of(config))
            found = await self._parts.inner.aget_tuple(config)
            self._noted(ref, found)
        return found

    def _admission_of(self, config: RunnableConfig) -> Callable[[Journal], Steps[Admission]]:
        ref = Ref.of(config)
        named = (r.checkpoint_id for r in named_refs(config) if not r.checkpoint_ns)
        protected = frozenset(i for i in named if i is not None)
        return lambda journal: admissions.admit(self._parts, journal, ref.thread_id, protected)

    def _noted(self, ref: Ref, found: CheckpointTuple | None) -> bool:
        """Remember what matters of a checkpoint; tell whether a run should clean up under it."""
        if found is None:
            return False
        self._readers.saw(found)
        return interception.needs_admission(self._parts, ref.thread_id, found)

    def _read_explicit(
        self, journal: Journal, config: RunnableConfig, ref: Ref
    ) -> Steps[CheckpointTuple | None]:
        if RUN_MARKER in config["configurable"]:
            yield from interception.pin_named(self._parts, journal, config)
        inner = self._parts.inner
        found = yield from call(inner.get_tuple, inner.aget_tuple, config)
        if found is None:
            yield from interception.missing(self._parts, ref, is_root_run(config))
        elif is_carrier(found):
            raise CheckpointNotFoundError(
                f"Checkpoint {ref.checkpoint_id} of thread {ref.thread_id} stands for checkpoints "
                "that retention removed; it holds no state of its own. Name one of its children."
            )
        self._noted(ref, found)
        return found

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        inner, listing = self._parts.inner, Listing(config, filter, before, limit)
        if self._pages(listing):
            return paged(inner, listing)
        if self._counts(listing):
            return shown(inner.list(config, filter=filter, before=before), limit)
        return shown(inner.list(config, filter=filter, before=before, limit=limit), None)

    def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        inner, listing = self._parts.inner, Listing(config, filter, before, limit)
        if self._pages(listing):
            return apaged(inner, listing)
        if self._counts(listing):
            return ashown(inner.alist(config, filter=filter, before=before), limit)
        return ashown(inner.alist(config, filter=filter, before=before, limit=limit), None)

    def _pages(self, listing: Listing) -> bool:
        backend = self._parts.backend
        return listing.pages and backend is not None and backend.locks_listings

    def _counts(self, listing: Listing) -> bool:
        """Tell whether the wrapped saver lists lazily, so that its own limit can be left out."""
        backend = self._parts.backend
        return listing.pages and backend is not None and not backend.locks_listings

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        return self._unlocked(lambda journal: self._delta_history(journal, config, channels))

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        return await self._aunlocked(lambda journal: self._delta_history(journal, config, channels))

    def _delta_history(
        self, journal: Journal, config: RunnableConfig, channels: Sequence[str]
    ) -> Steps[Mapping[str, DeltaChannelHistory]]:
        parts = self._parts

        def read() -> Steps[Mapping[str, DeltaChannelHistory]]:
            return delta_history(
                parts.inner,
                parts.cache,
                self._readers,
                config,
                channels,
                backend=parts.backend,
                parent_of=parts.known.parent_of,
                cache_failed=journal.cache_failed,
            )

        try:
            return (yield from read())
        except CheckpointNotFoundError:
            # Reclaimed by another process since the caller read it?
            if not (yield from admissions.learn_heir(parts, Ref.of(config))):
                raise
        return (yield from read())

    # Writing.

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        arguments = (config, checkpoint, metadata, new_versions)
        steps = interception.put_steps(self._parts, *arguments)
        if steps is None:
            return self._parts.inner.put(*arguments)
        return self._locked(Ref.of(config).thread_id, steps)

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        arguments = (config, checkpoint, metadata, new_versions)
        steps = interception.put_steps(self._parts, *arguments)
        if steps is None:
            return await self._parts.inner.aput(*arguments)
        return await self._alocked(Ref.of(config).thread_id, steps)

    def put_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        args, ref = self._writes_args(writes, task_id, task_path), Ref.of(config)
        route = interception.route_writes(self._parts, ref, writes)
        if route != "plain":
            self._locked(ref.thread_id, self._writes_steps(route, config, args))
        else:
            self._parts.inner.put_writes(config, *args)
        if self._readers.is_superseded(ref):
            self._unlocked(lambda journal: self._writes_arrived(journal, config))

    async def aput_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        args, ref = self._writes_args(writes, task_id, task_path), Ref.of(config)
        route = interception.route_writes(self._parts, ref, writes)
        if route != "plain":
            await self._alocked(ref.thread_id, self._writes_steps(route, config, args))
        else:
            await self._parts.inner.aput_writes(config, *args)
        if self._readers.is_superseded(ref):
            await self._aunlocked(lambda journal: self._writes_arrived(journal, config))

    def _writes_arrived(self, journal: Journal, config: RunnableConfig) -> Steps[None]:
        shared = (self._parts.cache, self._readers)
        return writes_arrived(*shared, config, cache_failed=journal.cache_failed)

    def _writes_args(
        self, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str
    ) -> tuple[Any, ...]:
        return (writes, task_id, task_path) if self._takes_task_path else (writes, task_id)

    def _writes_steps(
        self, route: WritesRoute, config: RunnableConfig, args: tuple[Any, ...]
    ) -> Callable[[Journal], Steps[None]]:
        inner = self._parts.inner

        def store(onto: RunnableConfig) -> Steps[None]:
            return call(inner.put_writes, inner.aput_writes, onto, *args)

        return lambda journal: interception.put_writes(self._parts, journal, route, config, store)

    def delete_thread(self, thread_id: str) -> None:
        self._locked(str(thread_id), lambda journal: self._delete_thread(journal, thread_id))

    async def adelete_thread(self, thread_id: str) -> None:
        await self._alocked(str(thread_id), lambda journal: self._delete_thread(journal, thread_id))

    def _delete_thread(self, journal: Journal, thread_id: str) -> Steps[None]:
        parts = self._parts
        yield from retention.purge(parts, str(thread_id))
        yield from call(parts.inner.delete_thread, parts.inner.adelete_thread, thread_id)
        parts.known.forget_thread(str(thread_id))
        self._readers.forget_thread(str(thread_id))
        # Again: a reader that started in between may have put back what it still saw.
        yield from admissions.purge(parts, journal, str(thread_id))
        yield from call(parts.pins.delete_thread, parts.pins.adelete_thread, str(thread_id))

    # Admission and pins.

    def admit(self, config: RunnableConfig) -> Admission:
        """Remove the trailing metadata-only leaf of a thread before its next run reads it.

        Pins the ``checkpoint_id`` in ``config`` and every id in its ``checkpoint_map``. Returns
        what was done, or why not; never raises for a storage failure.
        """
        self._unlocked(lambda journal: interception.pin_named(self._parts, journal, config))
        return self._locked(Ref.of(config).thread_id, self._admission_of(config))

    async def aadmit(self, config: RunnableConfig) -> Admission:
        """Do what ``admit`` does."""
        await self._aunlocked(lambda journal: interception.pin_named(self._parts, journal, config))
        return await self._alocked(Ref.of(config).thread_id, self._admission_of(config))

    def pin(self, config: RunnableConfig, *, ttl: timedelta | None = _UNSET) -> Pin:
        """Promise that the checkpoint in ``config`` (its head, without an id) stays addressable.

        ``ttl`` is for how long; ``None`` for ever; by default the registry's. Raises
        ``CheckpointNotFoundError`` if it is not stored, ``ValueError`` if ``ttl`` is not positive.
        """
        return self._locked(Ref.of(config).thread_id, lambda _journal: self._pin(config, ttl))

    async def apin(self, config: RunnableConfig, *, ttl: timedelta | None = _UNSET) -> Pin:
        """Do what ``pin`` does."""
        return await self._alocked(
            Ref.of(config).thread_id, lambda _journal: self._pin(config, ttl)
        )

    def _pin(self, config: RunnableConfig, ttl: timedelta | None) -> Steps[Pin]:
        return interception.pin(self._parts, config, self._parts.pins.ttl if ttl is _UNSET else ttl)

    def unpin(self, config: RunnableConfig) -> None:
        """Take back the pin on the checkpoint in ``config``, which must name one."""
        self._parts.pins.unpin(Ref.of(config))

    async def aunpin(self, config: RunnableConfig) -> None:
        """Do what ``unpin`` does."""
        await self._parts.pins.aunpin(Ref.of(config))

    def pins(self, thread_id: str) -> Pins:
        """List the thread's pins that have not expired."""
        return [*self._parts.pins.pinned(str(thread_id), self._parts.clock())]

    async def apins(self, thread_id: str) -> Pins:
        """Do what ``pins`` does."""
        return [*await self._parts.pins.apinned(str(thread_id), self._parts.clock())]

    # Run history.

    def annotate(self, config: RunnableConfig, metadata: Mapping[str, Any]) -> RunnableConfig:
        """Record plain JSON ``metadata`` about a thread's head without changing its state.

        With a ``checkpoint_id`` in ``config``, about that checkpoint. Idempotent. Returns the
        config of the checkpoint that now carries it. Raises ``CheckpointNotFoundError`` where
        there is none, ``TypeError`` or ``ValueError`` before any I/O for what some backend could
        not store, and ``UnsupportedSaverError`` without a backend.
        """
        entries = storable(metadata)
        return self._annotate(config, entries)

    async def aannotate(
        self, config: RunnableConfig, metadata: Mapping[str, Any]
    ) -> RunnableConfig:
        """Do what ``annotate`` does."""
        entries = storable(metadata)
        return await self._aannotate(config, entries)

    def record_run(
        self,
        config: RunnableConfig,
        run_id: str,
        *,
        duration: int | None = None,
        message_ids: Iterable[str] = (),
    ) -> RunnableConfig:
        """Record how long a run took, in whole seconds, and which messages it wrote.

        Otherwise as ``annotate``; with neither a duration nor messages it is a ``ValueError``.
        """
        return self._annotate(config, run_entries(run_id, duration, message_ids))

    async def arecord_run(
        self,
        config: RunnableConfig,
        run_id: str,
        *,
        duration: int | None = None,
        message_ids: Iterable[str] = (),
    ) -> RunnableConfig:
        """Do what ``record_run`` does."""
        return await self._aannotate(config, run_entries(run_id, duration, message_ids))

    def run_history(self, config: RunnableConfig) -> RunHistory:
        """Read what the thread's main line records about its runs; deserialises no state.

        From the head, or from the checkpoint that ``config`` names. Raises
        ``CheckpointNotFoundError`` for an id that is not stored.
        """
        return run(run_history(self._parts, config))

    async def arun_history(self, config: RunnableConfig) -> RunHistory:
        """Do what ``run_history`` does."""
        return await arun(run_history(self._parts, config))

    def _annotate(self, config: RunnableConfig, entries: Mapping[str, Any]) -> RunnableConfig:
        return self._locked(Ref.of(config).thread_id, self._annotation(config, entries))

    async def _aannotate(
        self, config: RunnableConfig, entries: Mapping[str, Any]
    ) -> RunnableConfig:
        return await self._alocked(Ref.of(config).thread_id, self._annotation(config, entries))

    def _annotation(
        self, config: RunnableConfig, entries: Mapping[str, Any]
    ) -> Callable[[Journal], Steps[RunnableConfig]]:
        return lambda journal: annotate(self._parts, journal, config, entries)

    # Whole-thread retention.

    def plan_thread_retention(
        self, thread_id: str, policy: RetentionPolicy | None = None
    ) -> RetentionPlan:
        """Say what ``policy`` (by default the saver's own) would do to a thread; change nothing."""
        return run(self._plan(str(thread_id), policy))

    async def aplan_thread_retention(
        self, thread_id: str, policy: RetentionPolicy | None = None
    ) -> RetentionPlan:
        """Do what ``plan_thread_retention`` does."""
        return await arun(self._plan(str(thread_id), policy))

    def _plan(self, thread_id: str, policy: RetentionPolicy | None) -> Steps[RetentionPlan]:
        policy = policy or self._policy
        planner = retention.by_policy(self._parts, policy)
        _, plan = yield from retention.planned(self._parts, thread_id, policy.matches, planner)
        return plan

    def enforce_thread_retention(
        self, thread_id: str, policy: RetentionPolicy | None = None, *, dry_run: bool = False
    ) -> RetentionReport:
        """Apply ``policy`` (by default the saver's own) to a thread, in one transaction.

        With ``dry_run`` the report has the real numbers and nothing is changed. A broken thread is
        left alone and reported in ``problems``. Raises ``PlanRefused`` for a thread that keeps
        changing, ``UnsupportedSaverError`` without a backend for it.
        """
        return self._locked(str(thread_id), self._retention(str(thread_id), policy, dry_run))

    async def aenforce_thread_retention(
        self, thread_id: str, policy: RetentionPolicy | None = None, *, dry_run: bool = False
    ) -> RetentionReport:
        """Do what ``enforce_thread_retention`` does."""
        return await self._alocked(str(thread_id), self._retention(str(thread_id), policy, dry_run))

    def _retention(
        self, thread_id: str, policy: RetentionPolicy | None, dry_run: bool
    ) -> Callable[[Journal], Steps[RetentionReport]]:
        policy = policy or self._policy
        planner = retention.by_policy(self._parts, policy)
        return lambda journal: retention.retain(
            self._parts, journal, thread_id, policy.matches, planner, dry_run=dry_run
        )

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Keep only the newest state of threads, with what it needs, or delete them whole.

        Safe for delta channels, interrupts, subgraphs and metadata-only leaves. Pins hold against
        ``"keep_latest"``. A broken thread, or one that keeps changing, is left alone; the others
        go on, and an event says so. ``"delete_all"`` is another name for ``"delete"``.
        """
        deletes = retention.checked_strategy(strategy) == "delete"
        for thread_id in retention.thread_ids_of(thread_ids):
            if deletes:
                self.delete_thread(thread_id)
            else:
                self._locked(thread_id, self._pruning(thread_id))

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        deletes = retention.checked_strategy(strategy) == "delete"
        for thread_id in retention.thread_ids_of(thread_ids):
            if deletes:
                await self.adelete_thread(thread_id)
            else:
                await self._alocked(thread_id, self._pruning(thread_id))

    def _pruning(self, thread_id: str) -> Callable[[Journal], Steps[None]]:
        return lambda journal: retention.prune_thread(self._parts, journal, thread_id)

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Remove what runs stored; what other runs left reads as before.

        A question that one of the runs had answered is open again. Pinned checkpoints stay. Raises
        ``PlanRefused`` for a thread that is broken or keeps changing, and where the runs wrote all
        that retention has left of a conversation; every other thread is done by then.
        """
        refused = []
        for thread_id in run(retention.threads_of_runs(self._parts, run_ids)):
            try:
                self._locked(thread_id, self._run_deletion(thread_id, run_ids))
            except PlanRefused as refusal:
                refused.append(refusal)
        retention.raise_together(refused)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        refused = []
        for thread_id in await arun(retention.threads_of_runs(self._parts, run_ids)):
            try:
                await self._alocked(thread_id, self._run_deletion(thread_id, run_ids))
            except PlanRefused as refusal:
                refused.append(refusal)
        retention.raise_together(refused)

    def _run_deletion(
        self, thread_id: str, run_ids: Sequence[str]
    ) -> Callable[[Journal], Steps[None]]:
        return lambda journal: retention.delete_runs(self._parts, journal, thread_id, run_ids)

    def copy_thread(
        self, source_thread_id: str, target_thread_id: str, *, latest_only: bool = False
    ) -> None:
        """Copy a thread's rows to a thread that has none; pins and caches are not copied.

        With ``latest_only`` the copy holds one self-contained head per namespace, with its pending
        writes. Raises ``PlanRefused`` if the target has rows; an interrupted copy leaves nothing.
        """
        self._locked(
            str(target_thread_id),
            self._copy(str(source_thread_id), str(target_thread_id), latest_only),
        )

    async def acopy_thread(
        self, source_thread_id: str, target_thread_id: str, *, latest_only: bool = False
    ) -> None:
        await self._alocked(
            str(target_thread_id),
            self._copy(str(source_thread_id), str(target_thread_id), latest_only),
        )

    def _copy(
        self, source: str, target: str, latest_only: bool
    ) -> Callable[[Journal], Steps[None]]:
        return lambda _journal: retention.copy_thread(
            self._parts, source, target, latest_only=latest_only
        )

    # The two faces of every operation: hooks run after the lock was released.

    def _locked(self, thread_id: str, operation: Callable[[Journal], Steps[T]]) -> T:
        journal = Journal(self._parts.clock)
        try:
            with self._locks.hold_if_possible(thread_id):
                return run(operation(journal))
        finally:
            emit(self._hooks, journal.events)

    async def _alocked(self, thread_id: str, operation: Callable[[Journal], Steps[T]]) -> T:
        journal = Journal(self._parts.clock)
        try:
            async with self._locks.hold(thread_id):
                return await arun(operation(journal))
        finally:
            emit(self._hooks, journal.events)

    def _unlocked(self, operation: Callable[[Journal], Steps[T]]) -> T:
        journal = Journal(self._parts.clock)
        try:
            return run(operation(journal))
        finally:
            emit(self._hooks, journal.events)

    async def _aunlocked(self, operation: Callable[[Journal], Steps[T]]) -> T:
        journal = Journal(self._parts.clock)
        try:
            return await arun(operation(journal))
        finally:
            emit(self._hooks, journal.events)


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{option} must be one of {', '.join(allowed)}, not {value!r}")


def _aware(clock: Clock) -> Clock:
    now = clock()
    if now.tzinfo is None:
        raise ValueError(f"clock must return an aware time in UTC, not {now!r}")
    return clock


def _backend_for(inner: BaseCheckpointSaver[Any]) -> Backend | None:
    found = find_backend(inner)
    if found is not None:
        return found(inner)
    why = refusal(inner) or "there is no backend for it"
    warnings.warn(
        f"{type(inner).__module__}.{type(inner).__qualname__} works as before, but nothing is "
        f"reclaimed: {why}",
        stacklevel=3,
    )
    return None


def _cache_for(inner: BaseCheckpointSaver[Any], cache: HistoryCache | None) -> HistoryCache | None:
    if cache is _UNSET:
        cache = MemoryHistoryCache()
    return None if cache is None else cache.for_saver(inner)


def _takes_task_path(inner: BaseCheckpointSaver[Any]) -> bool:
    return "task_path" in signature(inner.put_writes).parameters
