"""Decide what of a thread stays and what goes, with the reason for every checkpoint. Pure.

``plan`` follows a policy, ``plan_prune`` keeps the newest state only, ``plan_without_runs``
removes runs. All three select, close the gaps, and list what is to be folded. They see nothing
but the records given; the clock is an argument. A broken thread is never half planned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from datetime import datetime, timedelta
from typing import Protocol

from retaining_saver.branches import Choice
from retaining_saver.cut import Cut, cut
from retaining_saver.entries import StoredThread
from retaining_saver.lineage import (
    Lineage,
    Namespace,
    begins_the_thread,
    is_call,
    lineage,
    time_in,
)
from retaining_saver.planned import (
    RULES,
    Carry,
    Entry,
    Fold,
    Graft,
    RetentionPlan,
    Rollback,
)
from retaining_saver.policy import RetentionPolicy
from retaining_saver.records import ROOT_NS
from retaining_saver.selection import (
    Key,
    Selection,
    by_policy,
    heads_only,
    without_runs,
)

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
    root = lin.namespaces.get(ROOT_NS)
    if root is None or not root.real or begins_the_thread(root):
        return False
    return selection.choices[ROOT_NS].drop.keys() >= set(root.real)


_NOTHING_LEFT = (
    "The runs wrote all that retention has left of the thread; without them the conversation would "
    "be lost. Use delete_thread if that is meant."
)


def _refused(lin: Lineage, reason: str = "broken", *problems: str) -> RetentionPlan:
    thread = lin.thread
    keep = (Entry(c.checkpoint_ns, c.checkpoint_id, reason) for c in thread.checkpoints)
    return RetentionPlan(thread.thread_id, tuple(keep), problems=(*lin.problems, *problems))


def _whole_thread(lin: Lineage, orphans: tuple[Entry, ...]) -> RetentionPlan:
    thread = lin.thread
    drop = (Entry(c.checkpoint_ns, c.checkpoint_id, "idle") for c in thread.checkpoints)
    return RetentionPlan(thread.thread_id, drop=tuple(drop), orphans=orphans, delete_thread=True)


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
    keep: list[Entry] = []
    drop: list[Entry] = []
    graft: list[Graft] = []
    carry: list[Carry] = []
    fold: list[Fold] = []
    replayed = [sorted(c.keep) for n, c in selection.choices.items() if n and not is_call(n)]
    for name, ns in lin.namespaces.items():
        choice = selection.choices[name]
        gaps = cut(ns, choice, replayed if name == ROOT_NS else ())
        _list_entries(ns, choice, gaps, keep, drop)
        graft += gaps.graft
        carry += gaps.carry
        fold += _folds(ns, choice)
    return RetentionPlan(
        lin.thread.thread_id,
        tuple(keep),
        tuple(drop),
        tuple(graft),
        tuple(carry),
        tuple(fold),
        rollback,
        orphans,
        keep_runs=keep_runs,
        notes=selection.notes,
    )


def _list_entries(
    ns: Namespace, choice: Choice, gaps: Cut, keep: list[Entry], drop: list[Entry]
) -> None:
    for i in sorted(ns.rows):
        if i in gaps.carriers:
            keep.append(Entry(ns.name, i, "carrier"))
        elif i in choice.keep:
            keep.append(Entry(ns.name, i, choice.keep[i]))
        else:
            drop.append(Entry(ns.name, i, choice.drop.get(i, "carrier_replaced")))


def _folds(ns: Namespace, choice: Choice) -> Iterator[Fold]:
    """Find a place for what dropped checkpoints recorded, oldest first.

    What an annotation added goes to the checkpoint that it annotates. Where that one goes as
    well, run history moves to the oldest kept checkpoint of the main line; a branch that goes
    takes its history along.
    """
    line = list(ns.line(ns.head))
    main = set(line) if ns.name == ROOT_NS else set()
    oldest = next((i for i in reversed(line) if i in choice.keep), None)
    for i in sorted(choice.drop):
        base = ns.base[i] if i in ns.annotations else i
        if choice.drop[i] == "run" or base is None:
            continue
        if base in choice.keep:
            yield Fold(ns.name, i, "folded", base, whole=True)
        elif base in main and oldest is not None and ns.rows[i].has_history:
            yield Fold(ns.name, i, "folded", oldest, whole=False)


def _rollbacks(lin: Lineage, selection: Selection) -> Iterator[Rollback]:
    """Find the checkpoints that lose their last child, and those that enclose them."""
    opened: set[Key] = set()
    for name in sorted(lin.namespaces, reverse=True):  # What is enclosed before what encloses.
        ns, keep = lin.namespaces[name], selection.choices[name].keep
        leading = ns.leading_to({i for i in keep if i in ns.children})
        for i in ns.order:
            # A child that goes may leave its own children to this one.
            if i not in keep or any(child in leading for child in _below(ns, i)):
                continue
            loses, row = bool(_below(ns, i)), ns.rows[i]
            if loses:
                opened.update(row.parents)
            # A question asked inside a subgraph shows as one of the checkpoint that called it.
            if row.writes.rows and (loses or (row.writes.asked and (name, i) in opened)):
                yield _rollback(ns, i)


def _below(ns: Namespace, i: str) -> list[str]:
    if i in ns.annotations:
        return [child for child in ns.direct[i] if child in ns.children]
    return ns.children[i]


def _rollback(ns: Namespace, i: str) -> Rollback:
    writes = ns.rows[i].writes
    if writes.asked:
        return Rollback(ns.name, i, "reopened", writes.asked)
    if writes.failed:
        return Rollback(ns.name, i, "retried", writes.failed)
    return Rollback(ns.name, i, "undone", None)
