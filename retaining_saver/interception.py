"""What happens at ``get_tuple``, ``put`` and ``put_writes`` where a leaf is involved.

``route_put`` and ``route_writes`` decide, from what this process knows and without a statement,
whether one is. If not, the saver calls the wrapped one and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Literal

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
)
from langgraph.checkpoint.serde.types import INTERRUPT

from retaining_saver import folds, leaves
from retaining_saver._steps import Steps, call
from retaining_saver.admission import Terms, heir, reclaim_known, rescue
from retaining_saver.backends.base import Backend, Movable, Row
from retaining_saver.errors import CheckpointNotFoundError, CheckpointReclaimedError
from retaining_saver.events import DeleteFailed, Folded, LeafTagged, PinFailed
from retaining_saver.listing import is_carrier
from retaining_saver.parts import Journal, Parts, reported
from retaining_saver.pins import Pin, checked_ttl
from retaining_saver.records import ROOT_NS, Ref, is_exit_run, named_refs, readdressed

logger = logging.getLogger("retaining_saver")

PutRoute = Literal["plain", "annotation", "onto_leaf", "beside_leaf"]
WritesRoute = Literal["plain", "onto_leaf", "onto_reclaimed", "asks_under_leaf"]


@dataclass(frozen=True, slots=True)
class Put:
    """The arguments of one ``put``."""

    config: RunnableConfig
    checkpoint: Checkpoint
    metadata: CheckpointMetadata
    new_versions: ChannelVersions
    kind: str | None = None
    """What the classifier took it for; asked before any lock is held."""

    def classified(self, parts: Parts) -> Put:
        """Ask the classifier. One that raises is logged and recognises nothing."""
        if self.new_versions or parts.backend is None:
            return self
        kind = folds.kind_of(self.checkpoint["id"], self.metadata)
        try:
            kind = kind or parts.classify(self.metadata)
            if kind is not None and not isinstance(kind, str):
                raise TypeError(f"A kind is text or None, not {kind!r}")
            return replace(self, kind=kind)
        except Exception:
            logger.exception("the classifier failed; the checkpoint is stored as it is")
            return self

    def under(self, parent_id: str) -> Put:
        """The same put with another parent."""
        return replace(self, config=readdressed(self.config, parent_id))

    def steps(self, parts: Parts) -> Steps[RunnableConfig]:
        """Store it with the wrapped saver."""
        return call(
            parts.inner.put,
            parts.inner.aput,
            self.config,
            self.checkpoint,
            self.metadata,
            self.new_versions,
        )


def note_leaf(parts: Parts, found: CheckpointTuple) -> bool:
    """Tell whether ``found`` claims to be a leaf, and remember its ids if so."""
    checkpoint_id = found.checkpoint["id"]
    if parts.backend is None or leaves.claim(checkpoint_id, found.metadata) is None:
        return False
    ref = Ref.of(found.config)
    if ref.checkpoint_ns != ROOT_NS or found.parent_config is None:
        return False
    parent_id = found.parent_config["configurable"]["checkpoint_id"]
    version = found.checkpoint["channel_versions"].get("__start__")
    parts.known.saw(ref.thread_id, checkpoint_id, parent_id, version)
    return True


def needs_admission(parts: Parts, thread_id: str, found: CheckpointTuple) -> bool:
    """Tell whether a run that just read ``found`` as its head should clean up first."""
    if note_leaf(parts, found):
        return True
    if found.parent_config is None or not parts.known.knows(thread_id):
        return False
    parent = Ref.of(found.parent_config)
    return parent.checkpoint_id is not None and (
        parts.known.parent_of(thread_id, parent.id) is not None
    )


def pin_named(parts: Parts, journal: Journal, config: RunnableConfig) -> Steps[None]:
    """Pin every checkpoint that a run names, for the registry's time; a failure is reported."""
    expires = _expiry(parts, parts.pins.ttl)
    for ref in named_refs(config):
        with reported(journal, PinFailed, ref):
            yield from call(parts.pins.pin, parts.pins.apin, ref, expires)


def pin(parts: Parts, config: RunnableConfig, ttl: timedelta | None) -> Steps[Pin]:
    """Pin a stored checkpoint: first the pin, then the look, so that it cannot go in between."""
    expires = _expiry(parts, ttl)
    ref = Ref.of(config)
    inner = parts.inner
    if ref.checkpoint_id is None:
        head = yield from call(inner.get_tuple, inner.aget_tuple, ref.config())
        if head is None:
            raise CheckpointNotFoundError(f"Thread {ref.thread_id} has no checkpoint to pin")
        ref = ref.at(head.checkpoint["id"])
    yield from call(parts.pins.pin, parts.pins.apin, ref, expires)
    found = yield from call(inner.get_tuple, inner.aget_tuple, ref.config())
    # A carrier holds no state of its own: nobody could resume from it.
    if found is None or is_carrier(found):
        yield from call(parts.pins.unpin, parts.pins.aunpin, ref)
        yield from missing(parts, ref, by_run=False)
        raise CheckpointNotFoundError(
            f"Checkpoint {ref.checkpoint_id} of thread {ref.thread_id} is not stored, "
            "so it cannot be pinned"
        )
    return Pin(ref.thread_id, ref.checkpoint_ns, ref.id, expires)


def _expiry(parts: Parts, ttl: timedelta | None) -> datetime | None:
    if checked_ttl(ttl) is None or ttl is None:
        return None
    try:
        return parts.clock() + ttl
    except OverflowError:  # Later than any time that can be told: for ever.
        return None


def missing(parts: Parts, ref: Ref, by_run: bool) -> Steps[None]:
    """Raise if reading ``ref`` as absent would be a silent loss; else return.

    LangGraph takes ``None`` for an explicit id as "start from an empty state", and that becomes
    the thread's latest. On a thread without checkpoints that is what the caller means.
    """
    backend = parts.backend
    if backend is not None and ref.checkpoint_ns == ROOT_NS:
        holder = yield from heir(parts, backend, ref)
        if holder is not None:
            raise CheckpointReclaimedError(ref.thread_id, ref.id, holder)
    if not by_run:
        return
    any_stored = yield from call(
        parts.inner.get_tuple, parts.inner.aget_tuple, Ref(ref.thread_id).config()
    )
    if any_stored is not None:
        raise CheckpointNotFoundError(
            f"A run was asked to start from checkpoint {ref.checkpoint_id} of thread "
            f"{ref.thread_id}, which is not stored; the thread has others. Name one of those, "
            "or none for the newest."
        )


def route_put(parts: Parts, ref: Ref, put: Put) -> PutRoute:
    """Decide what a put under ``ref``, in the root namespace, involves; issues no statement."""
    if not put.new_versions and put.checkpoint["id"] != ref.checkpoint_id and put.kind:
        return "annotation"
    if parts.known.leaf(ref.thread_id, ref.id) is not None:
        return "onto_leaf"
    if parts.known.parent_of(ref.thread_id, ref.id) is not None:
        return "onto_leaf"
    if parts.known.leaf_on(ref.thread_id, ref.id) is not None:
        return "beside_leaf"
    return "plain"


def put_steps(
    parts: Parts,
    config: RunnableConfig,
    checkpoint: Checkpoint,
    metadata: CheckpointMetadata,
    new_versions: ChannelVersions,
) -> Callable[[Journal], Steps[RunnableConfig]] | None:
    """Return the operation that a put is where a leaf is involved, else ``None``."""
    ref = Ref.of(config)
    if parts.backend is None or ref.checkpoint_ns != ROOT_NS or ref.checkpoint_id is None:
        return None
    if new_versions and not parts.known.knows(ref.thread_id):
        return None
    put = Put(config, checkpoint, metadata, new_versions).classified(parts)
    route = route_put(parts, ref, put)
    if route == "plain":
        return None
    operation = {
        "annotation": put_annotation,
        "onto_leaf": put_onto_leaf,
        "beside_leaf": put_beside_leaf,
    }[route]
    return lambda journal: operation(parts, journal, put)


def put_annotation(parts: Parts, journal: Journal, put: Put) -> Steps[RunnableConfig]:
    """Store a metadata-only checkpoint as a tagged leaf, or fold it where a leaf would do harm."""
    backend = parts.storage
    ref = Ref.of(put.config)
    parent: Row | None = None
    harmful = False
    with reported(journal, DeleteFailed, ref) as lookup:
        parent = yield from _stored_parent(parts, backend, ref)
        if parent is not None and _annotates(parts, put, parent):
            harmful = parts.annotations == "fold" or not backend.same_values(parent, put.checkpoint)
            if not harmful:
                around = yield from call(
                    backend.surroundings, backend.asurroundings, ref.at(parent.checkpoint_id)
                )
                harmful = leaves.would_harm(parent, around)
    if lookup.failed or parent is None:
        return (yield from put.steps(parts))
    put = put.under(parent.checkpoint_id)
    if not _annotates(parts, put, parent):
        return (yield from put.steps(parts))
    leaf_id = put.checkpoint["id"]
    if folds.kind_of(leaf_id, put.metadata) is None:
        tagged: Any = folds.tagged(put.metadata, leaf_id, put.kind or "", parent.metadata)
        put = replace(put, metadata=tagged)
    if harmful:
        target = yield from _leaf_or_itself(backend, journal, ref, parent)
        carrier = yield from _fold(parts, backend, journal, put.under(target))
        if target == parent.checkpoint_id:
            yield from tell_head(backend, journal, Ref.of(carrier), _recorded(put))
        return carrier
    stored = yield from put.steps(parts)
    holder = parent.checkpoint_id
    if leaves.claim(holder, parent.metadata) is not None:
        # A leaf that another writer left, and that another worker may have reclaimed meanwhile.
        yield from _look_for_leaf(parts, backend, journal, ref.at(holder))
        holder = parts.known.parent_of(ref.thread_id, holder) or holder
    version = put.checkpoint["channel_versions"].get("__start__")
    parts.known.saw(ref.thread_id, leaf_id, holder, version)
    journal.note(LeafTagged, ref.at(leaf_id), parent_id=holder)
    return (yield from _look_again(parts, backend, journal, put.under(holder), stored))


def _leaf_or_itself(backend: Backend, journal: Journal, ref: Ref, parent: Row) -> Steps[str]:
    """Return the marked leaf on ``parent`` if that is the head, else ``parent``, to fold into.

    A head that carries the whole run history must not lack what is recorded under it.
    """
    head: Row | None = None
    with reported(journal, DeleteFailed, ref):
        head = yield from call(backend.row, backend.arow, ref.at(None))
    if head is None or head.parent_id != parent.checkpoint_id:
        return parent.checkpoint_id
    marked = folds.kind_of(head.checkpoint_id, head.metadata) is not None
    return head.checkpoint_id if marked else parent.checkpoint_id


def tell_head(
    backend: Backend, journal: Journal, target: Ref, entries: Mapping[str, Any]
) -> Steps[None]:
    """Fold the run history in ``entries``, which went into ``target``, into the head as well.

    Only into a head that answers for the whole history by itself, and that ``target`` leads to:
    nobody looks below such a head.
    """
    history = {key: entries[key] for key in folds.HISTORY_MAPS if key in entries}
    if not history or target.checkpoint_ns != ROOT_NS:
        return
    with reported(journal, DeleteFailed, target):
        found = yield from call(backend.metadata, backend.ametadata, target.at(None))
        if found is None or found[0] == target.checkpoint_id or not folds.is_whole(*found):
            return
        head = target.at(found[0])
        line = yield from call(backend.lineage, backend.alineage, head)
        if any(checkpoint_id == target.checkpoint_id for checkpoint_id, _ in line):
            yield from call(backend.fold, backend.afold, head, None, history)


def _recorded(put: Put) -> dict[str, Any]:
    """Return what a tagged annotation records by itself."""
    return folds.folded_into({}, "", put.metadata, put.checkpoint["id"])


def _stored_parent(parts: Parts, backend: Backend, ref: Ref) -> Steps[Row | None]:
    known = parts.known.parent_of(ref.thread_id, ref.id)
    parent = yield from call(backend.row, backend.arow, ref.at(known or ref.checkpoint_id))
    if parent is None:
        holder = yield from heir(parts, backend, ref)
        if holder is not None:
            parent = yield from call(backend.row, backend.arow, ref.at(holder))
    return parent


def _annotates(parts: Parts, put: Put, parent: Row) -> bool:
    by_default = parts.classify is leaves.classify_duration
    marked = folds.kind_of(put.checkpoint["id"], put.metadata) is not None
    return leaves.copies_state(put.checkpoint, parent) and (
        marked or leaves.is_duration(put.metadata, put.checkpoint["id"], parent, by_default)
    )


def _fold(parts: Parts, backend: Backend, journal: Journal, put: Put) -> Steps[RunnableConfig]:
    target = Ref.of(put.config)
    leaf_id = put.checkpoint["id"]
    folded = yield from call(backend.fold, backend.afold, target, leaf_id, put.metadata)
    if not folded:
        # The parent was reclaimed since it was read; its own parent holds the same state.
        holder = yield from heir(parts, backend, target)
        if holder is None:
            return (yield from put.steps(parts))
        return (yield from _fold(parts, backend, journal, put.under(holder)))
    parts.known.reclaimed(target.thread_id, leaf_id, target.id)
    journal.note(Folded, target.at(leaf_id), parent_id=target.id)
    return target.config()


def _look_again(
    parts: Parts, backend: Backend, journal: Journal, put: Put, stored: RunnableConfig
) -> Steps[RunnableConfig]:
    """Take a leaf back after it was stored, if its parent moved on, or asks, meanwhile."""
    parent = Ref.of(put.config)
    leaf_id = put.checkpoint["id"]
    with reported(journal, DeleteFailed, parent.at(leaf_id)):
        around = yield from call(backend.surroundings, backend.asurroundings, parent, but=leaf_id)
        if around.has_writes or around.has_newer:
            gone = yield from reclaim_known(
                parts, journal, parent.at(leaf_id), Terms(only_head=False)
            )
            if gone:
                yield from tell_head(backend, journal, parent, _recorded(put))
                return parent.config()
        if folds.is_whole(leaf_id, put.metadata):
            yield from _catch_up(backend, parent, put)
    return stored


def _catch_up(backend: Backend, parent: Ref, put: Put) -> Steps[None]:
    """Add to a whole leaf what was folded into its parent after the history had been read."""
    found = yield from call(backend.metadata, backend.ametadata, parent)
    missed: dict[str, Any] = {}
    for key in folds.HISTORY_MAPS:
        told, recorded = put.metadata.get(key), found[1].get(key) if found else None
        known = told if isinstance(told, Mapping) else {}
        if isinstance(recorded, Mapping) and recorded.keys() - known.keys():
            missed[key] = {name: v for name, v in recorded.items() if name not in known}
    if missed:
        leaf = parent.at(put.checkpoint["id"])
        yield from call(backend.fold, backend.afold, leaf, None, missed)


def put_onto_leaf(parts: Parts, journal: Journal, put: Put) -> Steps[RunnableConfig]:
    """Store a child of what is or was a leaf: under the leaf's parent if that is safe."""
    backend = parts.storage
    ref = Ref.of(put.config)
    leaf = parts.known.leaf(ref.thread_id, ref.id)
    from_input = leaf is not None and leaves.started_from_input(put.checkpoint, put.metadata, leaf)
    if from_input and parts.admission != "manual":
        movable = Movable(inputs=True, exits=is_exit_run(put.config))
        yield from reclaim_known(parts, journal, ref, Terms(movable=movable))
    holder = yield from _heir_of_gone(parts, backend, journal, ref)
    if holder is not None:
        return (yield from put.under(holder).steps(parts))
    stored = yield from put.steps(parts)
    if (yield from _look_for_leaf(parts, backend, journal, ref)):
        # It has a child now: a link, which admission never removes.
        parts.known.forget(ref.thread_id, ref.id)
    return stored


def _heir_of_gone(parts: Parts, backend: Backend, journal: Journal, leaf: Ref) -> Steps[str | None]:
    """Return the checkpoint to store under instead of a leaf that is gone; ``None`` if it is not.

    Looking before the put as well as after it leaves no dangling parent behind if the process
    dies in between, but for the moment in which another worker reclaims.
    """
    holder = parts.known.parent_of(leaf.thread_id, leaf.id)
    with reported(journal, DeleteFailed, leaf):
        if holder is None and not (yield from call(backend.exists, backend.aexists, leaf)):
            holder = yield from heir(parts, backend, leaf)
            if holder is not None:
                parts.known.reclaimed(leaf.thread_id, leaf.id, holder)
    return holder


def put_beside_leaf(parts: Parts, journal: Journal, put: Put) -> Steps[RunnableConfig]:
    """Store a child of a checkpoint that has a leaf, which goes first: it could hide the child."""
    yield from _reclaim_leaf_on(parts, journal, Ref.of(put.config))
    return (yield from put.steps(parts))


def _reclaim_leaf_on(parts: Parts, journal: Journal, parent: Ref) -> Steps[None]:
    leaf = parts.known.leaf_on(parent.thread_id, parent.id)
    if leaf is not None:
        yield from reclaim_known(parts, journal, parent.at(leaf.leaf_id), Terms())


def _look_for_leaf(parts: Parts, backend: Backend, journal: Journal, leaf: Ref) -> Steps[bool]:
    """After something was stored for a leaf: tell whether that is still there, else re-address.

    Another worker may have reclaimed it meanwhile. One of the two always sees the other: it looks
    for late rows after its deletion is committed, and this looks after the rows are.
    """
    with reported(journal, DeleteFailed, leaf):
        if (yield from call(backend.exists, backend.aexists, leaf)):
            return True
        holder = yield from heir(parts, backend, leaf)
        if holder is None:
            known = parts.known.leaf(leaf.thread_id, leaf.id)
            holder = known.parent_id if known else None
        if holder is not None:
            parts.known.reclaimed(leaf.thread_id, leaf.id, holder)
            yield from rescue(backend, journal, leaf, holder)
    return False


def route_writes(parts: Parts, ref: Ref, writes: Sequence[tuple[str, Any]]) -> WritesRoute:
    """Decide what a ``put_writes`` involves; issues no statement."""
    if parts.backend is None or ref.checkpoint_ns != ROOT_NS or ref.checkpoint_id is None:
        return "plain"
    if not parts.known.knows(ref.thread_id):
        return "plain"
    if parts.known.leaf(ref.thread_id, ref.id) is not None:
        return "onto_leaf"
    if parts.known.parent_of(ref.thread_id, ref.id) is not None:
        return "onto_reclaimed"
    if parts.known.leaf_on(ref.thread_id, ref.id) is not None and any(
        channel == INTERRUPT for channel, _ in writes
    ):
        return "asks_under_leaf"
    return "plain"


def put_writes(
    parts: Parts, journal: Journal, route: WritesRoute, config: RunnableConfig, store: Any
) -> Steps[None]:
    """Store writes where a leaf is involved. ``store(config)`` asks the wrapped saver for it."""
    backend = parts.storage
    ref = Ref.of(config)
    if route == "asks_under_leaf":
        yield from _reclaim_leaf_on(parts, journal, ref)
    holder = parts.known.parent_of(ref.thread_id, ref.id)
    if holder is not None:
        yield from store(readdressed(config, holder))
        return
    yield from store(config)
    if route == "onto_leaf":
        yield from _look_for_leaf(parts, backend, journal, ref)
