"""Close the gaps that dropped checkpoints leave: grafts, and carriers for delta channels. Pure.

A read of a delta channel walks the parents and collects their writes up to the nearest stored
value. Where a dropped stretch held such writes, or that value, one synthetic checkpoint takes
them over and stands between the kept child and its nearest kept ancestor.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from retaining_saver.branches import Choice
from retaining_saver.entries import FORKED, SENDS
from retaining_saver.lineage import Namespace, needs
from retaining_saver.planned import Carry, Graft

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_LOW_BITS = (1 << 62) - 1


@dataclass(slots=True)
class Cut:
    """What is to be done about the gaps of one namespace, and which carriers of before stay."""

    graft: list[Graft] = field(default_factory=list)
    carry: list[Carry] = field(default_factory=list)
    carriers: set[str] = field(default_factory=set)


def cut(ns: Namespace, choice: Choice, replayed: Sequence[Sequence[str]] = ()) -> Cut:
    """Close every gap in one namespace.

    ``replayed`` are, for the root namespace, the sorted ids that stay of each subgraph that a
    replay reads as of a root checkpoint.
    """
    done = Cut()
    made: set[str] = set()
    needed = needs(ns, set(choice.keep))
    for parent, children in _gaps(ns, choice).items():
        stretch, ancestor = _stretch(ns, choice, parent)
        if stretch == [parent] and parent in ns.carriers:
            done.carriers.add(parent)
            continue
        read = frozenset[str]().union(*(needed.get(child, ()) for child in children))
        carry = _carry(ns, choice, stretch, ancestor, children, read)
        forks = [child for child in children if ns.rows[child].source in FORKED and replayed]
        if carry is None and _bounds_replays(parent, forks, ancestor, replayed):
            carry = Carry(ns.name, "", "bound", ancestor, tuple(children), (), {}, {})
        if carry is not None:
            near = parent if forks else None
            carry = replace(carry, checkpoint_id=_id_below(carry, made, ns.rows, near))
            made.add(carry.checkpoint_id)
            done.carry.append(carry)
        onto = ancestor if carry is None else carry.checkpoint_id
        reason = carry.reason if carry else "graft" if ancestor else "cut"
        moved = next((i for i in stretch if i in choice.moving), None)
        for child in children:
            done.graft.append(Graft(ns.name, child, reason, onto, moved))
    return done


def _gaps(ns: Namespace, choice: Choice) -> dict[str, list[str]]:
    """Group the kept checkpoints whose parent is not kept by that parent."""
    gaps: dict[str, list[str]] = {}
    for i in ns.order:
        parent = ns.rows[i].parent_id
        if i in choice.keep and parent is not None and parent not in choice.keep:
            gaps.setdefault(parent, []).append(i)
    return gaps


def _stretch(ns: Namespace, choice: Choice, i: str | None) -> tuple[list[str], str | None]:
    """List what goes from ``i`` upwards, newest first, and the first ancestor that stays."""
    stretch = []
    while i is not None and i not in choice.keep:
        stretch.append(i)
        i = ns.rows[i].parent_id
    return stretch, i


def _carry(
    ns: Namespace,
    choice: Choice,
    stretch: list[str],
    ancestor: str | None,
    children: list[str],
    read: frozenset[str],
) -> Carry | None:
    writes, seeds = _taken(ns, [i for i in stretch if i not in choice.moving], read)
    old_format = any(ns.rows[child].v < 4 for child in children)
    shields = old_format and ancestor is not None and SENDS in ns.rows[ancestor].writes.channels
    if not (writes or seeds or shields):
        return None
    used = {*seeds.values(), *(i for ids in writes.values() for i in ids)}
    return Carry(
        ns.name,
        "",
        "carried" if used else "shielded",
        ancestor,
        tuple(children),
        tuple(i for i in reversed(stretch) if i in used),
        {channel: tuple(reversed(writes[channel])) for channel in sorted(writes)},
        {channel: seeds[channel] for channel in sorted(seeds)},
    )


def _taken(
    ns: Namespace, stretch: Iterable[str], read: frozenset[str]
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Find who wrote what is read, newest first, and who stores the value that ends each read."""
    writes: dict[str, list[str]] = {}
    seeds: dict[str, str] = {}
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
    parent: str, forks: list[str], ancestor: str | None, replayed: Sequence[Sequence[str]]
) -> bool:
    """Tell whether a replay of a fork would read another state of a subgraph without its parent.

    It reads what was newest before the fork's parent, not before the fork.
    """
    return any(
        bisect_left(ids, parent) != bisect_left(ids, ancestor or fork)
        for ids in replayed
        for fork in forks
    )


def _id_below(carry: Carry, made: Collection[str], rows: Collection[str], near: str | None) -> str:
    """Make an id so close below the children that nothing a replay looks for lies between.

    For forks that is below ``near``, the parent that goes, unless clocks disagreed and its id
    does not lie between those of the children and the ancestor.
    """
    child, ancestor = min(carry.children), carry.parent_id
    if near is not None and near < child and (ancestor is None or ancestor < near):
        chosen = _preceding(near)
    else:
        chosen = _preceding(child)
    while chosen in rows or chosen in made:
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
