"""Which metadata-only checkpoints stay: they follow what they annotate or go alone. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from retaining_saver.branches import Choice
from retaining_saver.entries import ERROR, INTERRUPT, RESUME, SENDS, Writes
from retaining_saver.tree import Tree


def place_annotations(
    ns: Tree,
    choice: Choice,
    pins: Collection[int],
    referenced: Collection[tuple[str, str]],
    removes: bool,
) -> None:
    """Add the annotations to a choice that is complete for the real checkpoints.

    One goes by itself if nothing was begun from it: no pin, no subgraph call (``referenced``),
    no rows in the writes table. Rows that its only child has read may move to its parent, and
    rows that were read by dropped checkpoints only go, or are carried, like theirs.
    """
    if len(ns.real) == len(ns.order):
        return
    annotations = [i for i in ns.order if ns.annotation[i]]
    free = [i for i in annotations if i not in pins and (ns.name, ns.ids[i]) not in referenced]
    going, moving = _going(ns, choice, free, pins) if removes else (set(), set())
    choice.moving |= moving
    for i in annotations:
        base = ns.base[i]
        if i in pins:
            choice.keep[i] = "pinned"
        elif i in going or i in moving:
            choice.drop[i] = "leaf" if ns.child[i] is None else "link"
        elif base is None:
            choice.drop[i] = "expired"
        elif choice.keep[base] is not None:
            choice.keep[i] = "annotation"
        else:
            choice.drop[i] = choice.drop[base]


def _going(
    ns: Tree, choice: Choice, free: list[int], pins: Collection[int]
) -> tuple[set[int], set[int]]:
    """Find those that go with what rows they have, and those whose rows move to their parents.

    What is found must not depend on what this same plan removes around it: a second plan would
    find more.
    """
    going = {i for i in free if not ns.rows[i].writes.rows}
    with_rows = [i for i in reversed(free) if i not in going and _are_plain(ns.rows[i].writes)]
    for i in with_rows:
        heirs = list(_heirs(ns, i, going))
        if heirs and all(choice.drop[heir] for heir in heirs):
            going.add(i)
    leading = ns.leading_to(choice.keep) if with_rows else set[int]()

    def lasting_heirs(i: int) -> list[int]:
        return [h for h in _heirs(ns, i, going) if h in leading or ns.annotation[h]]

    moving = set()
    for i in with_rows:
        target = _first_not_in(ns, i, going)
        if i in going or target is None or choice.keep[target] is None or target in pins:
            continue
        heirs = lasting_heirs(i)
        alone = lasting_heirs(target) == [i] and len(heirs) == 1 and choice.keep[heirs[0]]
        plain = not ns.annotation[target] and not ns.rows[target].writes.rows
        if alone and plain and not _are_hidden(ns, i, heirs[0]):
            moving.add(i)
    return going, moving


def _are_plain(writes: Writes) -> bool:
    """Tell whether rows read the same wherever they stand on the walk of a delta channel."""
    # Readers apply the null task's rows as the checkpoint's own state.
    special = {INTERRUPT, ERROR, RESUME, SENDS} & writes.channels
    return not special and not writes.null_task


def _are_hidden(ns: Tree, i: int, heir: int) -> bool:
    """Tell whether a link below ``i`` stores what its rows write: then the heir reads past them."""
    between = ns.parent[heir]
    while between is not None and between != i:
        if ns.rows[between].stored & ns.rows[i].writes.channels:
            return True
        between = ns.parent[between]
    return False


def _heirs(ns: Tree, i: int, going: Collection[int]) -> Iterator[int]:
    """Find whose parent a checkpoint is once ``going`` is gone."""
    hanging = [*ns.stored_below(i)]
    for child in hanging:
        if child in going:
            hanging += ns.stored_below(child)
        else:
            yield child


def _first_not_in(ns: Tree, i: int, going: Collection[int]) -> int | None:
    parent = ns.parent[i]
    while parent is not None and parent in going:
        parent = ns.parent[parent]
    return parent
