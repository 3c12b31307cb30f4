"""Close the gaps that dropped checkpoints leave: grafts, and carriers for delta channels. Pure.

A read of a delta channel walks the parents and collects their writes up to the nearest stored
value. Where a dropped stretch held such writes, or that value, one synthetic checkpoint takes
them over and stands between the kept child and its nearest kept ancestor.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

from retaining_saver.branches import Choice
from retaining_saver.entries import FORKED, SENDS
from retaining_saver.planned import Carry, Entries, Graft
from retaining_saver.tree import Tree, needs

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_LOW_BITS = (1 << 62) - 1


@dataclass(slots=True)
class Grafts:
    """The fields of ``Graft``, each a list: there may be one for every few checkpoints."""

    names: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    parents: list[str | None] = field(default_factory=list)
    moved: list[str | None] = field(default_factory=list)

    def add(self, ns: Tree, child: int, reason: str, parent: str | None, moved: int | None) -> None:
        """Add one."""
        self.names.append(ns.name)
        self.ids.append(ns.ids[child])
        self.reasons.append(reason)
        self.parents.append(parent)
        self.moved.append(_id(ns, moved))

    def entries(self) -> Entries[Graft]:
        """Return all of them."""
        return Entries(Graft, self.names, self.ids, self.reasons, self.parents, self.moved)


@dataclass(slots=True)
class Cut:
    """What is to be done about the gaps, and which carriers of before stay."""

    graft: Grafts = field(default_factory=Grafts)
    carry: list[Carry] = field(default_factory=list)
    carriers: set[int] = field(default_factory=set)


def cut(ns: Tree, choice: Choice, done: Cut, replayed: Sequence[Sequence[str]] = ()) -> None:
    """Close every gap in one namespace: add to ``done``.

    ``replayed`` are, for the root namespace, the sorted ids that stay of each subgraph that a
    replay reads as of a root checkpoint.
    """
    orphaned = _orphaned(ns, choice)
    if not orphaned:
        return
    made: set[str] = set()
    needed = needs(ns, choice.keep, set(orphaned))
    for parent, group in groupby(orphaned, key=ns.parent.__getitem__):
        assert parent is not None  # By which they are orphaned.
        stretch, ancestor = _stretch(ns, choice, parent)
        if stretch == [parent] and ns.carrier[parent]:
            done.carriers.add(parent)
            continue
        children = list(_without_copies(ns, group, ancestor, done))
        if not children:
            continue
        read = frozenset[str]().union(*(needed.get(child, ()) for child in children))
        carry = _carry(ns, choice, stretch, ancestor, children, read)
        forks = [child for child in children if ns.source[child] in FORKED and replayed]
        if carry is None and _bounds_replays(ns, parent, forks, ancestor, replayed):
            carry = _carrier(ns, "bound", ancestor, children)
        if carry is not None:
            near = ns.ids[parent] if forks else None
            carry = replace(carry, checkpoint_id=_id_below(ns, carry, made, near))
            made.add(carry.checkpoint_id)
            done.carry.append(carry)
        onto = carry.checkpoint_id if carry else _id(ns, ancestor)
        reason = carry.reason if carry else "graft" if onto else "cut"
        moved = next((i for i in stretch if i in choice.moving), None)
        for child in children:
            done.graft.add(ns, child, reason, onto, moved)


def _without_copies(
    ns: Tree, children: Iterable[int], ancestor: int | None, done: Cut
) -> Iterator[int]:
    """Graft annotations onto the ancestor; return the other children.

    Between an annotation and what it annotates goes nothing but other annotations, without rows.
    A carrier there would hide what it is: it would be taken for the newest state.
    """
    for child in children:
        if ns.annotation[child] and not _shields(ns, [child], ancestor):
            done.graft.add(ns, child, "graft", _id(ns, ancestor), None)
        else:
            yield child


def _shields(ns: Tree, children: Iterable[int], ancestor: int | None) -> bool:
    """Tell whether a child of an old format would read the ancestor's sends as its own."""
    if not ns.old_format or ancestor is None or SENDS not in ns.rows[ancestor].writes.channels:
        return False
    return any(ns.rows[child].v < 4 for child in children)


def _id(ns: Tree, i: int | None) -> str | None:
    return None if i is None else ns.ids[i]


def _orphaned(ns: Tree, choice: Choice) -> list[int]:
    """List the kept checkpoints whose parent is not kept; those of one parent stand together."""
    keep, parents = choice.keep, ns.parent
    return [
        i
        for i in ns.order
        if keep[i] is not None and (parent := parents[i]) is not None and keep[parent] is None
    ]


def _stretch(ns: Tree, choice: Choice, i: int | None) -> tuple[list[int], int | None]:
    """List what goes from ``i`` upwards, newest first, and the first ancestor that stays."""
    stretch = []
    while i is not None and choice.keep[i] is None:
        stretch.append(i)
        i = ns.parent[i]
    return stretch, i


def _carry(
    ns: Tree,
    choice: Choice,
    stretch: list[int],
    ancestor: int | None,
    children: list[int],
    read: frozenset[str],
) -> Carry | None:
    writes, seeds = _taken(ns, (i for i in stretch if i not in choice.moving), read)
    if not (writes or seeds or _shields(ns, children, ancestor)):
        return None
    used = {*seeds.values(), *(i for places in writes.values() for i in places)}
    return replace(
        _carrier(ns, "carried" if used else "shielded", ancestor, children),
        sources=tuple(ns.ids[i] for i in reversed(stretch) if i in used),
        writes={c: tuple(ns.ids[i] for i in reversed(writes[c])) for c in sorted(writes)},
        seeds={c: ns.ids[seeds[c]] for c in sorted(seeds)},
    )


def _carrier(ns: Tree, reason: str, ancestor: int | None, children: list[int]) -> Carry:
    """Say where a carrier stands; it has no id yet and carries nothing."""
    ids = tuple(ns.ids[child] for child in children)
    return Carry(ns.name, "", reason, _id(ns, ancestor), ids, (), {}, {})


def _taken(
    ns: Tree, stretch: Iterable[int], read: frozenset[str]
) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Find who wrote what is read, newest first, and who stores the value that ends each read."""
    writes: dict[str, list[int]] = {}
    seeds: dict[str, int] = {}
    for i in stretch:
        if not read:
            break
        row = ns.rows[i]
        for channel in read & row.writes.channels:
            writes.setdefault(channel, []).append(i)
        for channel in read & row.stored:
            seeds[channel] = i
        read -= row.stored
    return writes, seeds


def _bounds_replays(
    ns: Tree,
    parent: int,
    forks: list[int],
    ancestor: int | None,
    replayed: Sequence[Sequence[str]],
) -> bool:
    """Tell whether a replay of a fork would read another state of a subgraph without its parent.

    It reads what was newest before the fork's parent, not before the fork.
    """
    return any(
        bisect_left(ids, ns.ids[parent]) != bisect_left(ids, _id(ns, ancestor) or ns.ids[fork])
        for ids in replayed
        for fork in forks
    )


def _id_below(ns: Tree, carry: Carry, made: Collection[str], near: str | None) -> str:
    """Make an id so close below the children that nothing a replay looks for lies between.

    For forks that is below ``near``, the parent that goes, unless clocks disagreed and its id
    does not lie between those of the children and the ancestor.
    """
    child, ancestor = min(carry.children), carry.parent_id
    if near is not None and near < child and (ancestor is None or ancestor < near):
        chosen = _preceding(near)
    else:
        chosen = _preceding(child)
    while ns.find(chosen) is not None or chosen in made:
        chosen = _preceding(chosen)
    if ancestor is not None and ancestor < child and chosen <= ancestor:
        raise ValueError(f"No checkpoint id fits between {ancestor} and {child}.")
    return chosen


def _preceding(checkpoint_id: str) -> str:
    if not _UUID.fullmatch(checkpoint_id):
        return checkpoint_id[:-1] + chr(ord(checkpoint_id[-1]) - 1) + "~"
    number = int(checkpoint_id.replace("-", ""), 16)
    if number & _LOW_BITS:
        number -= 1
    else:
        # The clock tick before, and the largest id in it; version and variant stay as they are.
        ticks = (number >> 80 << 12 | number >> 64 & 0xFFF) - 1
        fixed = number & (0xF << 76 | 0x3 << 62)
        number = ticks >> 12 << 80 | fixed | (ticks & 0xFFF) << 64 | _LOW_BITS
    digits = f"{number:032x}"
    cuts = (0, 8, 12, 16, 20, 32)
    return "-".join(digits[start:end] for start, end in pairwise(cuts))
