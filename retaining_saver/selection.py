"""Which checkpoints stay, and by which rule. Pure.

The root namespace decides first: turns, branches, heads, pins. Subgraph namespaces follow the
root checkpoints that stay, and annotations follow the checkpoint they annotate.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from retaining_saver.annotated import place_annotations
from retaining_saver.branches import Choice, chosen, protect
from retaining_saver.entries import FORKED, SENDS, StoredCheckpoint
from retaining_saver.lineage import Lineage, Namespace, is_call
from retaining_saver.policy import RetentionPolicy
from retaining_saver.records import ROOT_NS

Key = tuple[str, str]
Choices = Mapping[str, Choice]
# How to choose in a subgraph's namespace, given the root namespace and what was chosen there and
# in the other namespaces that enclose it.
InSubgraph = Callable[[Namespace, Namespace | None, Choices, Collection[Key]], Choice]


@dataclass(slots=True)
class Selection:
    """The choices by namespace, and sentences on rules that could not be applied."""

    choices: dict[str, Choice]
    notes: tuple[str, ...] = ()


def by_policy(
    lin: Lineage, policy: RetentionPolicy, pins: Collection[Key], now: datetime
) -> Selection:
    """Select by a policy, but for the deletion of the whole thread."""
    root = lin.namespaces.get(ROOT_NS)
    if root is None:
        return _finished(lin, Choice(), pins, _untouched, annotations=policy.drop_annotations)
    choice, notes = chosen(root, policy, _pinned(root, pins), now)
    # Annotations have no subgraphs: one that has does not go.
    subgraph = _in_use if choice.drop else _untouched
    removes = policy.drop_annotations
    return _finished(lin, choice, pins, subgraph, annotations=removes, notes=notes)


def heads_only(lin: Lineage, pins: Collection[Key]) -> Selection:
    """Select the newest state and what is pinned."""
    root = lin.namespaces.get(ROOT_NS)
    choice = Choice()
    if root is not None:
        protect(root, choice, _pinned(root, pins))
        choice.drop = {i: "superseded" for i in root.real if i not in choice.keep}
    return _finished(lin, choice, pins, _newest, annotations=True)


def without_runs(lin: Lineage, run_ids: Collection[str], pins: Collection[Key]) -> Selection:
    """Select everything but what the given runs wrote and the subgraph calls they made."""
    choices: dict[str, Choice] = {}
    gone: set[str] = set()
    referenced = {pair for row in lin.thread.checkpoints for pair in row.parents}
    for name in sorted(lin.namespaces):
        ns = lin.namespaces[name]
        choice = choices[name] = _other_runs(ns, run_ids, _pinned(ns, pins), gone)
        _keep_pending_sends(ns, choice)
        if name == ROOT_NS:
            gone = set(choice.drop)
        _place_run_annotations(ns, choice, run_ids, _pins_in(ns, pins), referenced)
    return Selection(choices)


def _other_runs(
    ns: Namespace, run_ids: Collection[str], pinned: Collection[str], gone: Collection[str]
) -> Choice:
    choice = Choice()
    for i in ns.real:
        row = ns.rows[i]
        if i in pinned:
            choice.keep[i] = "pinned"
        elif row.run_id in run_ids or row.root_id in gone:
            choice.drop[i] = "run"
        else:
            choice.keep[i] = "other_run"
    return choice


def _place_run_annotations(
    ns: Namespace,
    choice: Choice,
    run_ids: Collection[str],
    pins: Collection[str],
    referenced: Collection[Key],
) -> None:
    for i in ns.order:
        if i not in ns.annotations:
            continue
        row, base = ns.rows[i], ns.base[i]
        bare = not ns.direct[i] and not row.writes.rows
        if i in pins:
            choice.keep[i] = "pinned"
        elif base in choice.drop or (row.run_id in run_ids and bare):
            choice.drop[i] = "run"
        elif choice.drop and not row.writes.rows and (ns.name, i) not in referenced:
            # It may repeat what the thread records of every run, also of those that go.
            choice.drop[i] = "link" if ns.direct[i] else "leaf"
        else:
            choice.keep[i] = "annotation"


def _pins_in(ns: Namespace, pins: Collection[Key]) -> set[str]:
    return {i for name, i in pins if name == ns.name and i in ns.rows}


def _pinned(ns: Namespace, pins: Collection[Key]) -> set[str]:
    """Find the real checkpoints that pins keep; a pinned annotation keeps what it annotates."""
    named = _pins_in(ns, pins) - ns.carriers
    resolved = (ns.base[i] if i in ns.annotations else i for i in named)
    return {i for i in resolved if i is not None}


def _keep_pending_sends(ns: Namespace, choice: Choice) -> None:
    # Before format v4 a checkpoint's pending sends were rows of its parent's, which may itself
    # have been sent to: hence from children to parents.
    for i in reversed(ns.real):
        parent = ns.rows[i].parent_id
        if i in choice.keep and _sends_from_parent(ns, ns.rows[i]) and parent in ns.children:
            choice.want(parent, "pending_sends")


def _sends_from_parent(ns: Namespace, row: StoredCheckpoint) -> bool:
    parent = ns.rows.get(row.parent_id) if row.parent_id is not None else None
    return row.v < 4 and parent is not None and SENDS in parent.writes.channels


def _finished(
    lin: Lineage,
    root: Choice,
    pins: Collection[Key],
    subgraph: InSubgraph,
    *,
    annotations: bool,
    notes: tuple[str, ...] = (),
) -> Selection:
    """Complete the root's choice, and choose in every other namespace accordingly."""
    referenced = {pair for row in lin.thread.checkpoints for pair in row.parents}
    choices = {ROOT_NS: root}
    roots = lin.namespaces.get(ROOT_NS)
    for name in sorted(lin.namespaces):  # What encloses sorts before what is enclosed.
        ns = lin.namespaces[name]
        choice = root if name == ROOT_NS else subgraph(ns, roots, choices, pins)
        _keep_pending_sends(ns, choice)
        place_annotations(ns, choice, _pins_in(ns, pins), referenced, annotations)
        choices[name] = choice
    return Selection(choices, notes)


def _untouched(ns: Namespace, *_: object) -> Choice:
    return Choice(keep=dict.fromkeys(ns.real, "subgraphs_untouched"))


def _in_use(
    ns: Namespace, roots: Namespace | None, choices: Choices, pins: Collection[Key]
) -> Choice:
    if is_call(ns.name):
        return _call(ns, roots, choices, pins)
    return _persistent(ns, roots, choices[ROOT_NS], pins)


def _newest(
    ns: Namespace, roots: Namespace | None, choices: Choices, pins: Collection[Key]
) -> Choice:
    """Keep the newest of a namespace, unless it is a call's that goes with its caller."""
    root = choices[ROOT_NS]
    if is_call(ns.name) and not _call(ns, roots, choices, pins).keep:
        return Choice(drop=dict.fromkeys(ns.real, "subgraph_expired"))
    choice = Choice()
    protect(ns, choice, _pinned(ns, pins))
    for i in () if is_call(ns.name) else _read_by_replays(ns, roots, root):
        choice.want(i, "read_by_replay")
    choice.drop = {i: "superseded" for i in ns.real if i not in choice.keep}
    return choice


def _call(
    ns: Namespace, roots: Namespace | None, choices: Choices, pins: Collection[Key]
) -> Choice:
    if roots is None or ns.newest > roots.newest:
        # Newer than anything in the root namespace: whoever called has not finished.
        return Choice(keep=dict.fromkeys(ns.real, "uncommitted"))
    for row in ns.rows.values():
        pinned = (ns.name, row.checkpoint_id) in pins or any(p in pins for p in row.parents)
        if pinned or row.root_id not in choices[ROOT_NS].drop or _is_called(row, choices):
            return Choice(keep=dict.fromkeys(ns.real, "call"))
    return Choice(drop=dict.fromkeys(ns.real, "subgraph_expired"))


def _is_called(row: StoredCheckpoint, choices: Choices) -> bool:
    # The head of a subgraph that keeps its state outlives the root checkpoint that it ran under.
    # If it waits inside this call, whoever resumes it goes on here.
    enclosing = ((name, i) for name, i in row.parents if name != ROOT_NS)
    return any(name in choices and i in choices[name].keep for name, i in enclosing)


def _persistent(
    ns: Namespace, roots: Namespace | None, root: Choice, pins: Collection[Key]
) -> Choice:
    choice = Choice()
    protect(ns, choice, _pinned(ns, pins))
    stored, newest_root = (roots.rows, roots.newest) if roots is not None else ({}, "")
    read = _read_by_replays(ns, roots, root)
    for i in ns.real:
        started_by = ns.rows[i].root_id
        late = started_by not in stored and i > newest_root
        if i in read:
            choice.want(i, "read_by_replay")
        elif started_by in root.keep:
            choice.want(i, "started_by_kept")
        elif started_by is None or late:
            choice.want(i, "uncommitted")
        elif i not in choice.keep:
            choice.drop[i] = "subgraph_expired"
    return choice


def _read_by_replays(ns: Namespace, roots: Namespace | None, root: Choice) -> set[str | None]:
    """Find what a replay of each kept root checkpoint reads: the newest checkpoint before it.

    Of a fork it reads the newest before the fork's parent.
    """
    ids = sorted(i for i in ns.rows if i not in ns.carriers)
    read: set[str | None] = set()
    for bound in (*root.keep, *_parents_of_forks(roots, root)):
        place = bisect_left(ids, bound)
        if place:
            i = ids[place - 1]
            read.add(ns.base[i] if i in ns.annotations else i)
    return read


def _parents_of_forks(roots: Namespace | None, root: Choice) -> Iterator[str]:
    if roots is None:
        return
    for i in root.keep:
        row = roots.rows[i]
        if row.source in FORKED and row.parent_id is not None:
            yield row.parent_id
