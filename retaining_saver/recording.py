"""Storing what is recorded about runs: as a leaf, or folded where a leaf would do harm.

A head that carries the whole run history is told whatever is folded under it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from langchain_core.runnables import RunnableConfig

from retaining_saver import folds, leaves
from retaining_saver._steps import Steps, call
from retaining_saver.admission import Terms, heir, look_for_leaf, reclaim_known
from retaining_saver.backends.base import Backend, Row
from retaining_saver.events import DeleteFailed, Folded, LeafTagged
from retaining_saver.parts import Journal, Parts, reported
from retaining_saver.puts import Put
from retaining_saver.records import ROOT_NS, Ref

MORE_THAN_ITS_OWN = 2
"""From so many new runs on, an annotation is taken to repeat what others recorded."""


def put_annotation(parts: Parts, journal: Journal, put: Put) -> Steps[RunnableConfig]:
    """Store a metadata-only checkpoint as a tagged leaf, or fold it where a leaf would do harm."""
    backend = parts.storage
    ref = Ref.of(put.config)
    parent: Row | None = None
    annotates = harmful = False
    with reported(journal, DeleteFailed, ref) as lookup:
        parent = yield from _stored_parent(parts, backend, ref)
        if parent is not None and _annotates(parts, put, parent):
            annotates = True
            harmful = parts.annotations == "fold" or not backend.same_values(parent, put.checkpoint)
            if not harmful:
                around = yield from call(
                    backend.surroundings, backend.asurroundings, ref.at(parent.checkpoint_id)
                )
                harmful = leaves.would_harm(parent, around)
    if lookup.failed or parent is None:
        return (yield from put.steps(parts))
    put = put.under(parent.checkpoint_id)
    if not annotates:
        return (yield from put.steps(parts))
    leaf_id = put.checkpoint["id"]
    if folds.kind_of(leaf_id, put.metadata) is None:
        before = yield from _repeated_history(backend, journal, put, parent)
        kind = put.kind or ""
        tagged: Any = folds.tagged(put.metadata, leaf_id, kind, parent.metadata, before)
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
        yield from look_for_leaf(parts, backend, journal, ref.at(holder))
        holder = parts.known.parent_of(ref.thread_id, holder) or holder
    version = put.checkpoint["channel_versions"].get("__start__")
    parts.known.saw(ref.thread_id, leaf_id, holder, version)
    journal.note(LeafTagged, ref.at(leaf_id), parent_id=holder)
    return (yield from _look_again(parts, backend, journal, put.under(holder), stored))


def _repeated_history(
    backend: Backend, journal: Journal, put: Put, parent: Row
) -> Steps[dict[str, Any] | None]:
    """Read the run history up to ``parent`` if the annotation seems to repeat more than one run."""
    ref = Ref.of(put.config)
    if folds.runs_added(put.metadata, parent.metadata) < MORE_THAN_ITS_OWN:
        return None
    before: dict[str, Any] | None = None
    with reported(journal, DeleteFailed, ref):
        line = yield from call(backend.lineage, backend.alineage, ref)
        told = folds.merged_history([parent.metadata, *(recorded for _, recorded in line)])
        before = dict(zip(folds.HISTORY_MAPS, told, strict=True))
    return before


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
