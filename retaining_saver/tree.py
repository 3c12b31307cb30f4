"""A thread's checkpoints as trees, one for each namespace, in flat lists. Pure.

Three kinds of checkpoint are told apart. *Annotations* are metadata-only, proved. *Carriers* are
synthetic and hold the writes of a stretch that was dropped. All others are *real*: turns, heads,
tips and branches consist of these, and the tree of real checkpoints steps over the other two.

Here, and in what plans with it, a checkpoint is named by its *place*: its number in the thread,
ordered by namespace and id. What is known of each stands at that place of a list that all
namespaces share. Dicts by id, and a list of children for each, took longer for a thread of
100,000 than their contents did: the garbage collector goes through them again and again, and no
processor's cache holds them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Any

from retaining_saver.entries import BRANCH, CARRIER, StoredCheckpoint


@dataclass(slots=True)
class Columns:
    """What is known of every checkpoint of a thread, by place.

    - ``rows``, ``ids``, ``source``, ``start``: the record, and what is asked of it most: its
      ``checkpoint_id``, ``source`` and ``start_version``.
    - ``parent``: the stored parent, ``None`` without one.
    - ``base``: for each real one and each annotation the nearest real ancestor.
    - ``annotation``, ``carrier``: whether it is one; those that are neither are real.
    - ``recording``: the places, in order, of what may record something about runs.
    - ``referenced``: the checkpoints that others were written under, by namespace and id.
    - ``child``: the oldest stored child; ``sibling``: for those that have one, the next younger
      child of the same parent.
    """

    rows: Sequence[StoredCheckpoint]
    ids: list[str]
    annotation: bytearray
    carrier: bytearray
    parent: list[int | None] = field(default_factory=list)
    base: list[int | None] = field(default_factory=list)
    source: list[str | None] = field(default_factory=list)
    start: list[Any] = field(default_factory=list)
    recording: list[int] = field(default_factory=list)
    referenced: set[tuple[str, str]] = field(default_factory=set)
    child: list[int | None] = field(default_factory=list)
    sibling: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Tree:
    """One namespace. Built by ``grown``, not changed afterwards.

    - ``places``: those of its checkpoints, in the order of ids.
    - ``order``: its places, parents before children; ``real``: those of the real ones.
    - ``head``: the newest real checkpoint.
    - ``old_format``: some of it was stored before format v4.

    The other fields are the thread's ``Columns``.
    """

    name: str
    places: list[int]
    rows: Sequence[StoredCheckpoint]
    ids: list[str]
    parent: list[int | None]
    base: list[int | None]
    source: list[str | None]
    start: list[Any]
    annotation: bytearray
    carrier: bytearray
    child: list[int | None]
    sibling: dict[int, int]
    order: list[int] = field(default_factory=list)
    real: list[int] = field(default_factory=list)
    head: int | None = None
    old_format: bool = False
    delta_channels: frozenset[str] = frozenset()

    def find(self, checkpoint_id: str | None) -> int | None:
        """Return the place of an id; ``None`` if it is not stored."""
        if checkpoint_id is None:
            return None
        # A dict of all ids takes longer to make than the few searches that most threads need.
        after = self.places[-1] + 1
        i = bisect_left(self.ids, checkpoint_id, self.places[0], after)
        return i if i < after and self.ids[i] == checkpoint_id else None

    @property
    def newest(self) -> str:
        """The newest id of any kind."""
        return self.ids[self.places[-1]]

    def is_real(self, i: int) -> bool:
        """Tell whether a checkpoint is neither an annotation nor a carrier."""
        return not (self.annotation[i] or self.carrier[i])

    def line(self, i: int | None) -> Iterator[int]:
        """Walk the real tree from a checkpoint to its first ancestor."""
        while i is not None:
            yield i
            i = self.base[i]

    def stored_below(self, i: int) -> Iterator[int]:
        """List the stored children of a checkpoint, oldest first."""
        child = self.child[i]
        while child is not None:
            yield child
            child = self.sibling.get(child)

    def real_below(self, i: int) -> Iterator[int]:
        """List the children of a checkpoint in the real tree, stepping over the other kinds."""
        hanging = [*self.stored_below(i)]
        for child in hanging:
            if self.is_real(child):
                yield child
            else:
                hanging += self.stored_below(child)

    def leading_to(self, kept: Sequence[object]) -> set[int]:
        """Find what is kept (truth, by place) or has something kept below it."""
        leading: set[int] = set()
        for i in reversed(self.order):
            if kept[i]:
                leading.add(i)
            parent = self.parent[i]
            if parent is not None and i in leading:
                leading.add(parent)
        return leading

    def begun(self, i: int) -> bool:
        """Tell whether something was begun from a checkpoint, or is about to run from it.

        It or a leaf over it has rows in the writes table, or it is due. Only on a tip does that
        mean in flight: rows on a checkpoint with a child were consumed by it.
        """
        hanging = [i]
        for each in hanging:
            hanging += [leaf for leaf in self.stored_below(each) if self.annotation[leaf]]
        tips = (each for each in hanging if each == i or self.child[each] is None)
        return self.rows[i].due or any(self.rows[each].writes.rows for each in tips)

    def waits(self) -> bool:
        """Tell whether the head waits for an answer, or stopped at a breakpoint or by a kill."""
        if self.head is None:
            return False
        row = self.rows[self.head]
        return bool(row.writes.asked) or (row.due and not row.writes.failed)


def grown(checkpoints: Sequence[StoredCheckpoint]) -> tuple[Columns, list[Tree], list[str]]:
    """Build the trees of a thread, ordered by name, and sentences on holes and cycles."""
    rows, ids, starts = _ordered(checkpoints)
    count = len(rows)
    columns = Columns(rows, ids, bytearray(count), bytearray(count))
    problems: list[str] = []
    trees = [
        _tree(columns, list(range(start, end)), problems)
        for start, end in pairwise([*starts, count])
    ]
    return columns, trees, problems


def _ordered(
    checkpoints: Sequence[StoredCheckpoint],
) -> tuple[Sequence[StoredCheckpoint], list[str], list[int]]:
    """Order by namespace and id, list the ids, and tell where each namespace starts.

    Backends give records in this order, but nothing rests on it.
    """
    starts: list[int] = []
    ids: list[str] = []
    name, before = "", ""
    for row in checkpoints:
        checkpoint_id = row.checkpoint_id
        if not starts or row.checkpoint_ns != name:
            starts.append(len(ids))
            in_order = row.checkpoint_ns >= name
            name = row.checkpoint_ns
        else:
            in_order = checkpoint_id >= before
        if not in_order:
            key = attrgetter("checkpoint_ns", "checkpoint_id")
            return _ordered(sorted(checkpoints, key=key))
        ids.append(checkpoint_id)
        before = checkpoint_id
    return checkpoints, ids, starts


def _tree(columns: Columns, places: list[int], problems: list[str]) -> Tree:
    ns = Tree(
        columns.rows[places[0]].checkpoint_ns,
        places,
        columns.rows,
        columns.ids,
        columns.parent,
        columns.base,
        columns.source,
        columns.start,
        columns.annotation,
        columns.carrier,
        columns.child,
        columns.sibling,
    )
    all_real = _read(ns, columns)
    _link(ns, problems)
    _tell_kinds(ns, all_real)
    ns.head = max(ns.real, default=None)
    return ns


def _read(ns: Tree, columns: Columns) -> bool:
    """Fill in what the records say by themselves; tell whether there are none but real ones.

    Each record is looked at once: in a long thread, fetching it into the processor costs more
    than the look. Places are the same objects throughout, for the same reason.
    """
    all_real = True
    shown: set[frozenset[str]] = set()
    last, before = None, None
    for i in ns.places:
        row = ns.rows[i]
        # Most continue from the one before.
        parent = last if row.parent_id == before else ns.find(row.parent_id)
        last, before = i, row.checkpoint_id
        ns.parent.append(parent)
        ns.source.append(row.source)
        ns.start.append(row.start_version)
        if row.claim == CARRIER:
            ns.carrier[i], all_real = True, False
        elif parent is not None and _is_copy(row, ns.rows[parent]):
            ns.annotation[i], all_real = True, False
        if row.has_history or ns.annotation[i]:
            columns.recording.append(i)
        if row.parents:
            columns.referenced.update(row.parents)
        if row.v < 4:
            ns.old_format = True
        shown.add(row.counted)
        shown.add(row.snapshots)
    ns.delta_channels = frozenset().union(*shown, *_shown_by_writes(ns))
    return all_real


def _is_copy(row: StoredCheckpoint, parent: StoredCheckpoint) -> bool:
    # A claim or the shape says that it annotates; only the equal state proves it.
    claimed = row.claim is not None or row.annotates
    return claimed and row.fingerprint == parent.fingerprint and row.source != "fork"


def _shown_by_writes(ns: Tree) -> Iterator[Iterable[str]]:
    """Name the delta channels that rows of the writes table show.

    Those of a carrier do. And before LangGraph 1.2.15 an update counted no channel: it has a
    version of what was written for it, and no value.
    """
    for i in ns.places:
        if ns.carrier[i]:
            yield ns.rows[i].writes.channels
        elif ns.source[i] == "update":
            yield _shown_by_update(ns, i)


def _shown_by_update(ns: Tree, i: int) -> Iterable[str]:
    row, parent = ns.rows[i], ns.parent[i]
    if row.counted or parent is None:
        return ()
    unstored = (ns.rows[parent].writes.channels & row.versioned) - row.stored
    return [c for c in unstored if not c.startswith((BRANCH, "__"))]


def _link(ns: Tree, problems: list[str]) -> None:
    """Link parents to children, and order a namespace by the distance from the first ancestor."""
    ns.child += [None] * len(ns.places)
    for i in reversed(ns.places):
        parent = ns.parent[i]
        if parent is not None:
            younger = ns.child[parent]
            if younger is not None:
                ns.sibling[i] = younger
            ns.child[parent] = i
    ns.order = [i for i in ns.places if ns.parent[i] is None]
    for i in ns.order:
        parent_id = ns.rows[i].parent_id
        if parent_id is not None:
            problems.append(_about(ns, i, f"its parent {parent_id} is not stored"))
    # Grows while it is walked: each appends its children.
    for i in ns.order:
        child = ns.child[i]
        while child is not None:
            ns.order.append(child)
            child = ns.sibling.get(child)
    if len(ns.order) < len(ns.places):
        unreached = sorted(set(ns.places).difference(ns.order))
        problems += [_about(ns, i, "its parents form a cycle") for i in unreached]


def _about(ns: Tree, i: int, what: str) -> str:
    where = f"namespace {ns.name!r}" if ns.name else "the root namespace"
    return f"Checkpoint {ns.ids[i]} in {where}: {what}."


def _tell_kinds(ns: Tree, all_real: bool) -> None:
    """Tell the three kinds apart, and put the real ones into their tree."""
    ns.base += ns.parent[ns.places[0] :]
    if all_real:
        ns.real = ns.order
        return
    for i in ns.order:
        above = ns.parent[i]
        if above is not None and (ns.annotation[above] or ns.carrier[above]):
            ns.base[i] = ns.base[above]
            if ns.carrier[above]:
                ns.annotation[i] = False
        if not ns.annotation[i] and not ns.carrier[i]:
            ns.real.append(i)


@dataclass(frozen=True, slots=True)
class Turns:
    """Which turn each real checkpoint belongs to, named by the turn's first checkpoint.

    ``of``, and ``starts``, which tells whether one starts here, are by place. ``told_apart`` is
    false where nothing separates turns: a graph without ``__start__`` whose runs store only their
    last checkpoint. ``marked`` tells that runs leave ``__start__``.
    """

    of: list[int]
    starts: bytearray
    marked: bool
    told_apart: bool


def turns(ns: Tree) -> Turns:
    """Divide a namespace into turns; nothing is said of the places of others."""
    of = [0] * len(ns.rows)
    starts = bytearray(len(ns.rows))
    for i in ns.real:
        above = ns.base[i]
        if _starts_turn(ns, i, above):
            starts[i] = True
            of[i] = i
        else:
            of[i] = i if above is None else of[above]
    marked = any(ns.start[i] is not None for i in ns.real)
    inputs = any(ns.source[i] == "input" for i in ns.real)
    return Turns(of, starts, marked, marked or inputs or len(ns.real) < 2)


def _starts_turn(ns: Tree, i: int, above: int | None) -> bool:
    if ns.source[i] == "input":
        return True
    if above is None:
        return ns.start[i] is not None
    return bool(ns.start[i] != ns.start[above]) and ns.source[above] != "input"


def begins_the_thread(ns: Tree) -> bool:
    """Tell whether the oldest checkpoint of a namespace may be the first that it ever had.

    A first turn leaves ``__start__`` at its second version at most: the input, and its consumption.
    Where nothing tells, it may be.
    """
    oldest = ns.rows[min(ns.real)]
    if oldest.parent_id is not None:
        return False
    try:
        return oldest.start_version is None or int(str(oldest.start_version).split(".")[0]) <= 2
    except ValueError:
        return True


def needs(ns: Tree, kept: Sequence[object], asked: Collection[int]) -> dict[int, frozenset[str]]:
    """Tell which delta channels a kept checkpoint or a kept descendant of it reads above it.

    ``kept`` is truth by place; the answer names the kept ones of ``asked``. It is empty for a
    namespace without delta channels. A read ends at the first stored value, so a checkpoint that
    stores a channel needs nothing of it, nor does anything below need it above.
    """
    needed: dict[int, frozenset[str]] = {}
    if not ns.delta_channels:
        return needed
    below: dict[int, frozenset[str]] = {}
    nothing: frozenset[str] = frozenset()
    one = {nothing: nothing}  # Of each set, so that there are not as many as checkpoints.
    for i in reversed(ns.order):
        read = below.pop(i, nothing)
        row = ns.rows[i] if read or kept[i] else None
        if row is None:
            continue
        if kept[i]:
            read |= ns.delta_channels & row.versioned
        read -= row.stored
        if kept[i] and i in asked:
            needed[i] = one.setdefault(read, read)
        parent = ns.parent[i]
        if read and parent is not None:
            below[parent] = below.get(parent, nothing) | read
    return needed
