"""Which checkpoints stay, and by which rule. Pure.

The root namespace decides first: turns, branches, heads, pins. Subgraph namespaces follow the
root checkpoints that stay, and annotations follow the checkpoint they annotate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import datetime

from retaining_saver.annotated import place_annotations
from retaining_saver.branches import Choice, chosen, protect
from retaining_saver.entries import FORKED, SENDS, StoredCheckpoint
from retaining_saver.lineage import Lineage, is_call
from retaining_saver.policy import RetentionPolicy
from retaining_saver.records import ROOT_NS
from retaining_saver.tree import Tree

Key = tuple[str, str]
# How to choose in a subgraph's namespace, given what was chosen in those that enclose it.
InSubgraph = Callable[[Lineage, Tree, Choice, Collection[Key]], None]


@dataclass(slots=True)
class Selection:
    """The choice, and sentences on rules that could not be applied."""

    choice: Choice
    notes: tuple[str, ...] = ()


def by_policy(
    lin: Lineage, policy: RetentionPolicy, pins: Collection[Key], now: datetime
) -> Selection:
    """Select by a policy, but for the deletion of the whole thread."""
    root = lin.trees.get(ROOT_NS)
    removes = policy.drop_annotations
    if root is None:
        return _finished(lin, _nothing(lin), pins, _untouched, annotations=removes)
    choice, notes = chosen(root, policy, _pinned(root, pins), now)
    # Annotations have no subgraphs: one that has does not go.
    subgraph = _in_use if any(choice.drop) else _untouched
    return _finished(lin, choice, pins, subgraph, annotations=removes, notes=notes)


def heads_only(lin: Lineage, pins: Collection[Key]) -> Selection:
    """Select the newest state and what is pinned."""
    root = lin.trees.get(ROOT_NS)
    choice = _nothing(lin)
    if root is not None:
        protect(root, choice, _pinned(root, pins))
        choice.drop_rest(root, "superseded")
    return _finished(lin, choice, pins, _newest, annotations=True)


def without_runs(lin: Lineage, run_ids: Collection[str], pins: Collection[Key]) -> Selection:
    """Select everything but what the given runs wrote and the subgraph calls they made."""
    choice = _nothing(lin)
    gone: set[str] = set()
    for name, ns in lin.trees.items():
        _choose_other_runs(ns, choice, run_ids, _pinned(ns, pins), gone)
        _keep_pending_sends(ns, choice)
        if name == ROOT_NS:
            gone = {ns.ids[i] for i in ns.places if choice.drop[i]}
        _place_run_annotations(ns, choice, run_ids, _pins_in(ns, pins), lin.columns.referenced)
    return Selection(choice)


def _nothing(lin: Lineage) -> Choice:
    return Choice.among(lin.thread.checkpoints)


def _choose_other_runs(
    ns: Tree,
    choice: Choice,
    run_ids: Collection[str],
    pinned: Collection[int],
    gone: Collection[str],
) -> None:
    for i in ns.real:
        row = ns.rows[i]
        if i in pinned:
            choice.keep[i] = "pinned"
        elif row.run_id in run_ids or row.root_id in gone:
            choice.drop[i] = "run"
        else:
            choice.keep[i] = "other_run"


def _place_run_annotations(
    ns: Tree,
    choice: Choice,
    run_ids: Collection[str],
    pins: Collection[int],
    referenced: Collection[Key],
) -> None:
    drops = any(choice.drop[i] for i in ns.real)
    for i in ns.order:
        if not ns.annotation[i]:
            continue
        row, base = ns.rows[i], ns.base[i]
        bare = ns.child[i] is None and not row.writes.rows
        if i in pins:
            choice.keep[i] = "pinned"
        elif (base is not None and choice.drop[base]) or (row.run_id in run_ids and bare):
            choice.drop[i] = "run"
            drops = True
        elif drops and not row.writes.rows and (ns.name, ns.ids[i]) not in referenced:
            # It may repeat what the thread records of every run, also of those that go.
            choice.drop[i] = "leaf" if ns.child[i] is None else "link"
        else:
            choice.keep[i] = "annotation"


def _pins_in(ns: Tree, pins: Collection[Key]) -> set[int]:
    found = (ns.find(checkpoint_id) for name, checkpoint_id in pins if name == ns.name)
    return {i for i in found if i is not None}


def _pinned(ns: Tree, pins: Collection[Key]) -> set[int]:
    """Find the real checkpoints that pins keep; a pinned annotation keeps what it annotates."""
    named = (i for i in _pins_in(ns, pins) if not ns.carrier[i])
    resolved = (ns.base[i] if ns.annotation[i] else i for i in named)
    return {i for i in resolved if i is not None}


def _keep_pending_sends(ns: Tree, choice: Choice) -> None:
    # Before format v4 a checkpoint's pending sends were rows of its parent's, which may itself
    # have been sent to: hence from children to parents.
    for i in reversed(ns.real) if ns.old_format else ():
        parent = ns.parent[i]
        if choice.keep[i] is None or parent is None or not ns.is_real(parent):
            continue
        if ns.rows[i].v < 4 and SENDS in ns.rows[parent].writes.channels:
            choice.want(parent, "pending_sends")


def _finished(
    lin: Lineage,
    choice: Choice,
    pins: Collection[Key],
    subgraph: InSubgraph,
    *,
    annotations: bool,
    notes: tuple[str, ...] = (),
) -> Selection:
    """Complete the root's choice, and choose in every other namespace accordingly."""
    for name, ns in lin.trees.items():  # What encloses sorts before what is enclosed.
        if name != ROOT_NS:
            subgraph(lin, ns, choice, pins)
        _keep_pending_sends(ns, choice)
        place_annotations(ns, choice, _pins_in(ns, pins), lin.columns.referenced, annotations)
    return Selection(choice, notes)


def _untouched(_: Lineage, ns: Tree, choice: Choice, _pins: Collection[Key]) -> None:
    choice.keep_all(ns, "subgraphs_untouched")


def _in_use(lin: Lineage, ns: Tree, choice: Choice, pins: Collection[Key]) -> None:
    if not is_call(ns.name):
        _choose_persistent(lin, ns, choice, pins)
    elif reason := _why_call_stays(lin, ns, choice, pins):
        choice.keep_all(ns, reason)
    else:
        choice.drop_rest(ns, "subgraph_expired")


def _newest(lin: Lineage, ns: Tree, choice: Choice, pins: Collection[Key]) -> None:
    """Keep the newest of a namespace, unless it is a call's that goes with its caller."""
    if is_call(ns.name) and not (ns.real and _why_call_stays(lin, ns, choice, pins)):
        choice.drop_rest(ns, "subgraph_expired")
        return
    protect(ns, choice, _pinned(ns, pins))
    for i in () if is_call(ns.name) else _read_by_replays(lin, ns, choice):
        choice.want(i, "read_by_replay")
    choice.drop_rest(ns, "superseded")


def _why_call_stays(lin: Lineage, ns: Tree, choice: Choice, pins: Collection[Key]) -> str | None:
    roots = lin.trees.get(ROOT_NS)
    if roots is None or roots.head is None or ns.newest > roots.ids[roots.head]:
        # Newer than any state in the root namespace: whoever called has not finished.
        return "uncommitted"
    for i in ns.places:
        row = ns.rows[i]
        pinned = (ns.name, row.checkpoint_id) in pins or any(p in pins for p in row.parents)
        root = roots.find(row.root_id)
        if pinned or root is None or not choice.drop[root] or _is_called(lin, row, choice):
            return "call"
    return None


def _is_called(lin: Lineage, row: StoredCheckpoint, choice: Choice) -> bool:
    # The head of a subgraph that keeps its state outlives the root checkpoint that it ran under.
    # If it waits inside this call, whoever resumes it goes on here.
    for name, checkpoint_id in row.parents:
        ns = lin.trees.get(name)
        i = ns.find(checkpoint_id) if ns is not None else None
        if name != ROOT_NS and i is not None and choice.keep[i]:
            return True
    return False


def _choose_persistent(lin: Lineage, ns: Tree, choice: Choice, pins: Collection[Key]) -> None:
    protect(ns, choice, _pinned(ns, pins))
    roots = lin.trees.get(ROOT_NS)
    read = _read_by_replays(lin, ns, choice)
    for i in ns.real:
        started_by = ns.rows[i].root_id
        root = roots.find(started_by) if roots is not None else None
        late = root is None and (roots is None or ns.ids[i] > roots.newest)
        if i in read:
            choice.want(i, "read_by_replay")
        elif root is not None and choice.keep[root]:
            choice.want(i, "started_by_kept")
        elif started_by is None or late:
            choice.want(i, "uncommitted")
        elif choice.keep[i] is None:
            choice.drop[i] = "subgraph_expired"


def _read_by_replays(lin: Lineage, ns: Tree, choice: Choice) -> set[int | None]:
    """Find what a replay of each kept root checkpoint reads: the newest checkpoint before it.

    Of a fork it reads the newest before the fork's parent.
    """
    readable = [i for i in ns.places if not ns.carrier[i]]
    found: set[int | None] = set()
    count = 0
    for bound in sorted(_bounds(lin.trees.get(ROOT_NS), choice)):
        while count < len(readable) and ns.ids[readable[count]] < bound:
            count += 1
        if count:
            i = readable[count - 1]
            found.add(ns.base[i] if ns.annotation[i] else i)
    return found


def _bounds(roots: Tree | None, choice: Choice) -> Iterator[str]:
    if roots is None:
        return
    kept = [i for i in roots.places if choice.keep[i]]
    yield from (roots.ids[i] for i in kept)
    for i in kept:
        parent = roots.parent[i]
        if parent is not None and roots.source[i] in FORKED:
            yield roots.ids[parent]
