"""Bounded admission: classify, prove, invalidate, fold and delete, look once more, re-address.

Everything here runs under the thread's lock, and issues the same statements however long the
thread's history is: no listing, no statistics, no scan of blobs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from retaining_saver import leaves
from retaining_saver._steps import Steps, call
from retaining_saver.backends.base import NOTHING_MOVES, Backend, Movable, Row
from retaining_saver.delta_history import Spared, purge_sparing, put_back
from retaining_saver.events import (
    CacheFailed,
    DeleteFailed,
    Folded,
    Invalidated,
    Readdressed,
    Reclaimed,
    Refused,
)
from retaining_saver.parts import Journal, Parts, reported
from retaining_saver.records import ROOT_NS, Ref

MAX_STACKED = 8
"""Leaves stacked by other writers that one admission removes; still a constant."""

Outcome = Literal[
    "reclaimed",
    "no_leaf",
    "pinned",
    "has_writes",
    "versions_differ",
    "parent_missing",
    "superseded",
    "cache_failed",
    "delete_failed",
    "unsupported",
]


@dataclass(frozen=True, slots=True)
class Admission:
    """What admission did. ``leaf_id`` was (or stayed) the head; ``parent_id`` holds its state."""

    outcome: Outcome
    leaf_id: str | None = None
    parent_id: str | None = None


@dataclass(frozen=True, slots=True)
class Terms:
    """What differs between the places a leaf is reclaimed from."""

    protected: frozenset[str] = frozenset()
    only_head: bool = True
    movable: Movable = NOTHING_MOVES


@dataclass(frozen=True, slots=True)
class Reclaim:
    """How one attempt ended, and the parent row as it was read before it."""

    outcome: Outcome
    parent: Row | None = None


def admit(
    parts: Parts, journal: Journal, thread_id: str, protected: frozenset[str]
) -> Steps[Admission]:
    """Remove the trailing metadata-only leaves of a thread's root namespace, or say why not.

    Never raises for a storage failure. ``protected`` ids stay whatever the pin registry says.
    """
    backend = parts.backend
    if backend is None:
        return Admission("unsupported")
    done = Admission("no_leaf")
    with reported(journal, DeleteFailed, Ref(thread_id)) as lookup:
        head = yield from call(backend.row, backend.arow, Ref(thread_id))
        if head is not None and not _claims(head):
            yield from _heal_parent(parts, backend, journal, thread_id, head)
        elif head is not None:
            done = yield from _reclaim_stack(parts, journal, thread_id, head, protected)
    return Admission("delete_failed") if lookup.failed else done


def _claims(row: Row) -> bool:
    return leaves.claim(row.checkpoint_id, row.metadata) is not None


def _reclaim_stack(
    parts: Parts, journal: Journal, thread_id: str, head: Row, protected: frozenset[str]
) -> Steps[Admission]:
    """Reclaim ``head`` and the leaves under it. What was reclaimed counts, whatever stopped it."""
    terms = Terms(protected=protected)
    done = Admission("no_leaf")
    leaf = head
    for _ in range(MAX_STACKED):
        with reported(
            journal, DeleteFailed, Ref(thread_id, ROOT_NS, leaf.checkpoint_id)
        ) as attempt:
            result = yield from reclaim(parts, journal, thread_id, leaf, terms)
        outcome: Outcome = "delete_failed" if attempt.failed else result.outcome
        if outcome != "reclaimed" or result.parent is None:
            if done.outcome == "reclaimed" or outcome == "no_leaf":
                return done
            return Admission(outcome, leaf.checkpoint_id, leaf.parent_id)
        done = Admission("reclaimed", head.checkpoint_id, result.parent.checkpoint_id)
        leaf = result.parent
        if not _claims(leaf):
            break
    return done


def reclaim(
    parts: Parts, journal: Journal, thread_id: str, leaf: Row, terms: Terms
) -> Steps[Reclaim]:
    """Prove, invalidate, fold and delete, look once more. Storage failures pass through.

    Stopped after any effect, the thread is whole: before the deletion nothing but the cache
    changed, and the deletion carries the fold.
    """
    backend = parts.storage
    ref = Ref(thread_id, ROOT_NS, leaf.checkpoint_id)
    leaf, parent = yield from _with_parent(parts, backend, journal, ref, leaf)
    outcome: Outcome | None = leaves.refusal(leaf, parent)
    if outcome is None:
        outcome = yield from _pins_and_writes(parts, backend, ref, terms)
    spared: Spared | None = None
    if outcome is None and parent is not None:
        spared = yield from _purge_for(parts, journal, ref.at(parent.checkpoint_id))
        outcome = "cache_failed" if spared is None else None
    if outcome is None and parent is not None:
        outcome = yield from call(
            backend.reclaim,
            backend.areclaim,
            thread_id,
            ROOT_NS,
            leaf,
            parent,
            only_head=terms.only_head,
            movable=terms.movable,
        )
    # Without a parent it was refused above.
    outcome = outcome or "parent_missing"
    if outcome == "reclaimed" and parent is not None:
        parts.known.reclaimed(thread_id, leaf.checkpoint_id, parent.checkpoint_id)
        journal.note(Folded, ref, parent_id=parent.checkpoint_id)
        journal.note(Reclaimed, ref, parent_id=parent.checkpoint_id)
        moved = yield from rescue(backend, journal, ref, parent.checkpoint_id)
        yield from _after_purge(parts, journal, ref.at(parent.checkpoint_id), spared, moved)
    elif outcome != "no_leaf":
        journal.note(Refused, ref, outcome=outcome)
    return Reclaim(outcome, parent)


def _with_parent(
    parts: Parts, backend: Backend, journal: Journal, ref: Ref, leaf: Row
) -> Steps[tuple[Row, Row | None]]:
    """Read the parent of ``leaf``; re-address a leaf whose parent was itself reclaimed."""
    if leaf.parent_id is None:
        return leaf, None
    parent = yield from call(backend.row, backend.arow, ref.at(leaf.parent_id))
    if parent is not None:
        return leaf, parent
    holder = yield from heir(parts, backend, ref.at(leaf.parent_id))
    if holder is None:
        return leaf, None
    yield from rescue(backend, journal, ref.at(leaf.parent_id), holder)
    parent = yield from call(backend.row, backend.arow, ref.at(holder))
    return replace(leaf, parent_id=holder), parent


def _pins_and_writes(
    parts: Parts, backend: Backend, ref: Ref, terms: Terms
) -> Steps[Outcome | None]:
    if ref.checkpoint_id in terms.protected:
        return "pinned"
    pins = yield from call(parts.pins.pinned, parts.pins.apinned, ref.thread_id, parts.clock())
    if any(
        (p.checkpoint_ns, p.checkpoint_id) == (ref.checkpoint_ns, ref.checkpoint_id) for p in pins
    ):
        return "pinned"
    if terms.movable == NOTHING_MOVES and (
        yield from call(backend.has_writes, backend.ahas_writes, ref)
    ):
        return "has_writes"
    return None


def purge(parts: Parts, journal: Journal, thread_id: str) -> Steps[Literal["cache_failed"] | None]:
    """Invalidate the thread's cached histories. A failure stops the deletion that was to follow."""
    if parts.cache is None:
        return None
    ref = Ref(thread_id)
    with reported(journal, CacheFailed, ref) as attempt:
        yield from call(parts.cache.delete_thread, parts.cache.adelete_thread, thread_id)
        journal.note(Invalidated, ref)
    return "cache_failed" if attempt.failed else None


def _purge_for(parts: Parts, journal: Journal, parent: Ref) -> Steps[Spared | None]:
    """Invalidate what a leaf's reclaiming on ``parent`` may change; ``None`` if that failed."""
    if parts.cache is None:
        return Spared({}, None)
    spared: Spared | None = None
    with reported(journal, CacheFailed, Ref(parent.thread_id)):
        spared = yield from purge_sparing(parts.cache, parent, cache_failed=journal.cache_failed)
        journal.note(Invalidated, Ref(parent.thread_id))
    return spared


def _after_purge(
    parts: Parts, journal: Journal, parent: Ref, spared: Spared | None, moved: int
) -> Steps[None]:
    """Put back the histories that were not touched; with rows moved, every one may be."""
    if moved:
        yield from purge(parts, journal, parent.thread_id)
    elif parts.cache is not None and spared is not None:
        yield from put_back(parts.cache, parent, spared, cache_failed=journal.cache_failed)


def rescue(backend: Backend, journal: Journal, leaf: Ref, parent_id: str) -> Steps[int]:
    """Move what was written for a leaf that is gone to its heir; return how many rows moved."""
    moved = 0
    with reported(journal, DeleteFailed, leaf):
        moved = yield from call(backend.rescue, backend.arescue, leaf, parent_id)
        if moved:
            journal.note(Readdressed, leaf, parent_id=parent_id, count=moved)
    return moved


def heir(parts: Parts, backend: Backend, ref: Ref) -> Steps[str | None]:
    """Find the checkpoint that holds the state of ``ref`` since that was reclaimed, by whomever."""
    known = parts.known.parent_of(ref.thread_id, ref.id)
    if known is not None:
        return known
    return (yield from call(backend.reclaimed_into, backend.areclaimed_into, ref))


def learn_heir(parts: Parts, ref: Ref) -> Steps[bool]:
    """Tell whether ``ref`` was reclaimed, and remember by what if another process did it."""
    if parts.backend is None or ref.checkpoint_ns != ROOT_NS:
        return False
    holder = yield from heir(parts, parts.backend, ref)
    if holder is None:
        return False
    parts.known.reclaimed(ref.thread_id, ref.id, holder)
    return True


def _heal_parent(
    parts: Parts, backend: Backend, journal: Journal, thread_id: str, head: Row
) -> Steps[None]:
    """Re-address a head that a writer stored for a leaf that was reclaimed meanwhile."""
    if head.parent_id is None:
        return
    parent = Ref(thread_id, ROOT_NS, head.parent_id)
    if (yield from call(backend.exists, backend.aexists, parent)):
        return
    holder = yield from heir(parts, backend, parent)
    if holder is not None:
        yield from rescue(backend, journal, parent, holder)


def reclaim_known(parts: Parts, journal: Journal, leaf: Ref, terms: Terms) -> Steps[bool]:
    """Reclaim a leaf that this process knows, as far as storage allows; failures are reported."""
    backend = parts.storage
    with reported(journal, DeleteFailed, leaf):
        row = yield from call(backend.row, backend.arow, leaf)
        if row is not None:
            done = yield from reclaim(parts, journal, leaf.thread_id, row, terms)
            return done.outcome == "reclaimed"
    return False


def look_for_leaf(parts: Parts, backend: Backend, journal: Journal, leaf: Ref) -> Steps[bool]:
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
