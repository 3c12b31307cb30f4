"""Which metadata-only checkpoints stay: they follow what they annotate or go alone. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from retaining_saver.branches import Choice
from retaining_saver.entries import ERROR, INTERRUPT, RESUME, SENDS, Writes
from retaining_saver.lineage import Namespace


def place_annotations(
    ns: Namespace,
    choice: Choice,
    pins: Collection[str],
    referenced: Collection[tuple[str, str]],
    removes: bool,
) -> None:
    """Add the annotations to a choice that is complete for the real checkpoints.

    One goes by itself if nothing was begun from it: no pin, no subgraph call (``referenced``),
    no rows in the writes table. Rows that its only child has read may move to its parent, and
    rows that were read by dropped checkpoints only go, or are carried, like theirs.
    """
    free = {i for i in ns.annotations if i not in pins and (ns.name, i) not in referenced}
    going, moving = _going(ns, choice, free, pins) if removes else (set(), set())
    choice.moving |= moving
    for i in ns.order:
        if i not in ns.annotations:
            continue
        base = ns.base[i]
        if i in pins:
            choice.keep[i] = "pinned"
        elif i in going or i in moving:
            choice.drop[i] = "link" if ns.direct[i] else "leaf"
        elif base in choice.keep:
            choice.keep[i] = "annotation"
        else:
            choice.drop[i] = choice.drop[base] if base is not None else "expired"


def _going(
    ns: Namespace, choice: Choice, free: set[str], pins: Collection[str]
) -> tuple[set[str], set[str]]:
    """Find those that go with what rows they have, and those whose rows move to their parents.

    What is found must not depend on what this same plan removes around it: a second plan would
    find more.
    """
    going = {i for i in free if not ns.rows[i].writes.rows}
    with_rows = [i for i in reversed(ns.order) if i in free and i not in going]
    with_rows = [i for i in with_rows if _are_plain(ns.rows[i].writes)]
    for i in with_rows:
        heirs = list(_heirs(ns, i, going))
        if heirs and all(heir in choice.drop for heir in heirs):
            going.add(i)
    leading = ns.leading_to(choice.keep) if with_rows else set[str]()

    def lasting_heirs(i: str) -> list[str]:
        return [h for h in _heirs(ns, i, going) if h in leading or h in ns.annotations]

    moving = set()
    for i in with_rows:
        target = _first_not_in(ns, i, going)
        if i in going or target is None or target not in choice.keep or target in pins:
            continue
        heirs = lasting_heirs(i)
        alone = lasting_heirs(target) == [i] and len(heirs) == 1 and heirs[0] in choice.keep
        if alone and target not in ns.annotations and not ns.rows[target].writes.rows:
            moving.add(i)
    return going, moving


def _are_plain(writes: Writes) -> bool:
    """Tell whether rows read the same wherever they stand on the walk of a delta channel."""
    # Readers apply the null task's rows as the checkpoint's own state.
    special = {INTERRUPT, ERROR, RESUME, SENDS} & writes.channels
    return not special and not writes.null_task


def _heirs(ns: Namespace, i: str, going: Collection[str]) -> Iterator[str]:
    """Find whose parent a checkpoint is once ``going`` is gone."""
    hanging = list(ns.direct[i])
    for child in hanging:
        if child in going:
            hanging += ns.direct[child]
        else:
            yield child


def _first_not_in(ns: Namespace, i: str, going: Collection[str]) -> str | None:
    parent = ns.rows[i].parent_id
    while parent is not None and parent in going:
        parent = ns.rows[parent].parent_id
    return parent
