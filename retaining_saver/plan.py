"""Decide what of a thread stays and what goes, with the reason for every checkpoint. Pure.

``plan`` follows a policy, ``plan_prune`` keeps the newest state only, ``plan_without_runs``
removes runs. All three select, close the gaps, and list what is to be folded. They see nothing
but the records given; the clock is an argument. A broken thread is never half planned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from datetime import datetime, timedelta
from itertools import chain, compress, count, repeat
from typing import Protocol

from retaining_saver.branches import Choice
from retaining_saver.cut import Cut, cut
from retaining_saver.entries import StoredCheckpoint, StoredThread
from retaining_saver.lineage import Lineage, is_call, lineage, time_in
from retaining_saver.planned import (
    RULES,
    Carry,
    Entries,
    Entry,
    Fold,
    Graft,
    RetentionPlan,
    Rollback,
)
from retaining_saver.policy import RetentionPolicy
from retaining_saver.recorded import folds
from retaining_saver.records import ROOT_NS
from retaining_saver.selection import (
    Key,
    Selection,
    by_policy,
    heads_only,
    without_runs,
)
from retaining_saver.tree import Tree, begins_the_thread

__all__ = [
    "GRACE",
    "KEEP_RUNS",
    "RULES",
    "Carry",
    "Entry",
    "Fold",
    "Graft",
    "Named",
    "RetentionPlan",
    "Rollback",
    "plan",
    "plan_prune",
    "plan_without_runs",
]

GRACE = timedelta(hours=1)
"""How old writes have to be that name no stored checkpoint: they may commit before it."""
KEEP_RUNS = 1000
"""How many runs of dropped turns are remembered."""


class Named(Protocol):
    """Anything that names a checkpoint of the thread: a live pin, or a ``Ref``."""

    @property
    def checkpoint_ns(self) -> str: ...
    @property
    def checkpoint_id(self) -> str | None: ...


def plan(
    thread: StoredThread,
    policy: RetentionPolicy,
    pins: Iterable[Named],
    now: datetime,
    *,
    keep_runs: int = KEEP_RUNS,
    grace: timedelta = GRACE,
) -> RetentionPlan:
    """Plan what ``policy`` asks for.

    ``pins`` are the ones that live at ``now``, and the ids that an admitted run named. The
    records must have been made with ``policy.matches``.
    """
    lin, named = lineage(thread), _keys(pins)
    if lin.problems:
        return _refused(lin)
    if _is_idle(lin, policy, named, now):
        return _whole_thread(lin, _orphans(lin, now, grace))
    selection = by_policy(lin, policy, named, now)
    return _assembled(lin, selection, _orphans(lin, now, grace), keep_runs)


def plan_prune(
    thread: StoredThread,
    pins: Iterable[Named],
    now: datetime,
    *,
    keep_runs: int = KEEP_RUNS,
    grace: timedelta = GRACE,
) -> RetentionPlan:
    """Plan to keep the newest state of the thread, what it needs, and what is pinned.

    The namespaces of subgraph calls go with the root checkpoint that started them, if that one
    is stored and goes; a subgraph that keeps its state between calls keeps its newest.
    """
    lin, named = lineage(thread), _keys(pins)
    if lin.problems:
        return _refused(lin)
    return _assembled(lin, heads_only(lin, named), _orphans(lin, now, grace), keep_runs)


def plan_without_runs(
    thread: StoredThread,
    run_ids: Collection[str],
    pins: Iterable[Named],
    now: datetime,
    *,
    grace: timedelta = GRACE,
) -> RetentionPlan:
    """Plan to remove the checkpoints of some runs; what other runs left reads as before.

    A checkpoint that loses its last child is open again: see ``Rollback``. Where nothing of the
    conversation would be left, because retention has removed what was before, nothing is.
    """
    lin, named = lineage(thread), _keys(pins)
    if lin.problems:
        return _refused(lin)
    selection = without_runs(lin, frozenset(run_ids), named)
    if _takes_all_that_is_left(lin, selection):
        return _refused(lin, "all_that_is_left", _NOTHING_LEFT)
    back = tuple(_rollbacks(lin, selection))
    return _assembled(lin, selection, _orphans(lin, now, grace), rollback=back)


def _keys(pins: Iterable[Named]) -> frozenset[Key]:
    return frozenset((p.checkpoint_ns, p.checkpoint_id) for p in pins if p.checkpoint_id)


def _is_idle(lin: Lineage, policy: RetentionPolicy, pins: Collection[Key], now: datetime) -> bool:
    limit = policy.delete_idle_after
    if limit is None or pins:
        return False
    last = lin.last_active()
    if last is None:
        return False
    return now - last >= limit and (policy.delete_waiting or not lin.waits())


def _takes_all_that_is_left(lin: Lineage, selection: Selection) -> bool:
    root = lin.trees.get(ROOT_NS)
    if root is None or not root.real or begins_the_thread(root):
        return False
    return all(selection.choice.drop[i] for i in root.real)


_NOTHING_LEFT = (
    "The runs wrote all that retention has left of the thread; without them the conversation would "
    "be lost. Use delete_thread if that is meant."
)


def _refused(lin: Lineage, reason: str = "broken", *problems: str) -> RetentionPlan:
    thread = lin.thread
    keep = _alike(thread, reason)
    return RetentionPlan(thread.thread_id, keep, problems=(*lin.problems, *problems))


def _whole_thread(lin: Lineage, orphans: tuple[Entry, ...]) -> RetentionPlan:
    thread = lin.thread
    drop = _alike(thread, "idle")
    return RetentionPlan(thread.thread_id, drop=drop, orphans=orphans, delete_thread=True)


def _alike(thread: StoredThread, reason: str) -> Entries[Entry]:
    rows = thread.checkpoints
    names, ids = [row.checkpoint_ns for row in rows], [row.checkpoint_id for row in rows]
    return Entries(Entry, names, ids, [reason] * len(rows))


def _orphans(lin: Lineage, now: datetime, grace: timedelta) -> tuple[Entry, ...]:
    old = []
    for orphan in lin.thread.orphan_writes:
        made = time_in(orphan.checkpoint_id)
        if made is not None and now - made >= grace:
            old.append(Entry(orphan.checkpoint_ns, orphan.checkpoint_id, "orphan"))
    return tuple(old)


def _assembled(
    lin: Lineage,
    selection: Selection,
    orphans: tuple[Entry, ...],
    keep_runs: int = KEEP_RUNS,
    rollback: tuple[Rollback, ...] = (),
) -> RetentionPlan:
    choice, trees = selection.choice, lin.trees.values()
    replayed = [
        [ns.ids[i] for i in ns.places if choice.keep[i]]
        for ns in trees
        if ns.name != ROOT_NS and not is_call(ns.name)
    ]
    gaps = Cut()
    for ns in trees:
        cut(ns, choice, gaps, replayed if ns.name == ROOT_NS else ())
    # Carriers record nothing, and nothing is chosen of them yet.
    fold = folds(lin, choice, keep_runs)
    keep, drop = _entries(lin, choice, gaps.carriers)
    return RetentionPlan(
        lin.thread.thread_id,
        keep,
        drop,
        gaps.graft.entries(),
        tuple(gaps.carry),
        fold,
        rollback,
        orphans,
        keep_runs=keep_runs,
        notes=selection.notes,
    )


def _entries(
    lin: Lineage, choice: Choice, carriers: set[int]
) -> tuple[Entries[Entry], Entries[Entry]]:
    """Settle which carriers of before stay (``carriers``), and list what stays and what goes."""
    for i in compress(count(), lin.columns.carrier):
        if i in carriers:
            choice.keep[i] = "carrier"
        else:
            choice.drop[i] = "carrier_replaced"
    return _listed(lin, choice.keep), _listed(lin, choice.drop)


def _listed(lin: Lineage, reasons: list[str | None]) -> Entries[Entry]:
    """List the checkpoints that have a reason."""
    names = chain.from_iterable(repeat(ns.name, len(ns.places)) for ns in lin.trees.values())
    return Entries(
        Entry,
        list(compress(names, reasons)),
        list(compress(lin.columns.ids, reasons)),
        list(filter(None, reasons)),
    )


def _rollbacks(lin: Lineage, selection: Selection) -> Iterator[Rollback]:
    """Find the checkpoints that lose their last child, and those that enclose them."""
    keep, annotation = selection.choice.keep, lin.columns.annotation
    opened: set[Key] = set()
    # A kept annotation leads to nothing by itself.
    real = [reason is not None and not annotation[i] for i, reason in enumerate(keep)]
    for ns in reversed(lin.trees.values()):  # What is enclosed before what encloses.
        leading = ns.leading_to(real)
        for i in ns.order:
            if keep[i] is None:
                continue
            row, below = ns.rows[i], _below(ns, i)
            # A child that goes may leave its own children to this one.
            if any(child in leading for child in below):
                continue
            # A question asked inside a subgraph shows as one of the checkpoint that called it.
            answered = bool(row.writes.asked) and (ns.name, row.checkpoint_id) in opened
            if any(not _took_input(ns.rows[child], row) for child in below):
                opened.update(row.parents)
                answered = True
            if row.writes.rows and (below or answered):
                yield from _rollback(ns, row, answered)


def _below(ns: Tree, i: int) -> list[int]:
    if ns.annotation[i]:
        return [child for child in ns.stored_below(i) if ns.is_real(child)]
    return [*ns.real_below(i)]


def _took_input(row: StoredCheckpoint, parent: StoredCheckpoint) -> bool:
    """Tell whether a checkpoint began a turn of its own; such a run leaves its parent as it was.

    But for what it stores there at its exit; releases before 1.2.15 did so for the null task,
    where the parent's step was -1.
    """
    began = row.start_version != parent.start_version and row.start_version is not None
    return began and parent.source != "input" and parent.step != -1


def _rollback(ns: Tree, row: StoredCheckpoint, answered: bool) -> Iterator[Rollback]:
    writes, i = row.writes, row.checkpoint_id
    if not answered and (writes.asked or writes.failed):
        if writes.channels & ns.delta_channels:
            yield Rollback(ns.name, i, "undone", (), commands=False)
    elif writes.asked:
        yield Rollback(ns.name, i, "reopened", writes.asked)
    elif writes.failed:
        yield Rollback(ns.name, i, "retried", writes.failed)
    else:
        # What tasks of its own had finished is not of a run that was given an input.
        yield Rollback(ns.name, i, "undone", None if answered else (), commands=answered)
