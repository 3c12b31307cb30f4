"""What happens at ``get_tuple``, ``put`` and ``put_writes`` where a leaf is involved.

``route_put`` and ``route_writes`` decide, from what this process knows and without a statement,
whether one is. If not, the saver calls the wrapped one and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
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

from retaining_saver import leaves
from retaining_saver._steps import Steps, call
from retaining_saver.admission import Terms, heir, learn_heir, look_for_leaf, reclaim_known
from retaining_saver.backends.base import Backend, Movable
from retaining_saver.errors import CheckpointNotFoundError, CheckpointReclaimedError
from retaining_saver.events import DeleteFailed, PinFailed
from retaining_saver.listing import is_carrier
from retaining_saver.parts import Journal, Parts, reported
from retaining_saver.pins import Pin, checked_ttl
from retaining_saver.puts import Put
from retaining_saver.recording import put_annotation
from retaining_saver.records import ROOT_NS, Ref, is_exit_run, named_refs, readdressed

logger = logging.getLogger("retaining_saver")

PutRoute = Literal["plain", "annotation", "onto_leaf", "beside_leaf"]
WritesRoute = Literal["plain", "onto_leaf", "onto_reclaimed", "asks_under_leaf"]


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
    if (yield from look_for_leaf(parts, backend, journal, ref)):
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
            yield from learn_heir(parts, leaf)
            holder = parts.known.parent_of(leaf.thread_id, leaf.id)
    return holder


def put_beside_leaf(parts: Parts, journal: Journal, put: Put) -> Steps[RunnableConfig]:
    """Store a child of a checkpoint that has a leaf, which goes first: it could hide the child."""
    yield from _reclaim_leaf_on(parts, journal, Ref.of(put.config))
    return (yield from put.steps(parts))


def _reclaim_leaf_on(parts: Parts, journal: Journal, parent: Ref) -> Steps[None]:
    leaf = parts.known.leaf_on(parent.thread_id, parent.id)
    if leaf is not None:
        yield from reclaim_known(parts, journal, parent.at(leaf.leaf_id), Terms())


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
        yield from look_for_leaf(parts, backend, journal, ref)
