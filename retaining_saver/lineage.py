"""The tree over a thread's records: heads, turns, ages, and what each checkpoint needs. Pure.

Three kinds of checkpoint are told apart. *Annotations* are metadata-only, proved. *Carriers* are
synthetic and hold the writes of a stretch that was dropped. All others are *real*: turns, heads,
tips and branches consist of these, and the tree of real checkpoints steps over the other two.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone

from retaining_saver.entries import BRANCH, CARRIER, StoredCheckpoint, StoredThread

_UUID6 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-6[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
_GREGORIAN = datetime(1582, 10, 15, tzinfo=timezone.utc)


def time_in(checkpoint_id: str) -> datetime | None:
    """Return the time inside a UUIDv6 id; ``None`` for an id of another form."""
    if not _UUID6.fullmatch(checkpoint_id):
        return None
    digits = checkpoint_id.replace("-", "")
    ticks = int(digits[:12] + digits[13:16], 16)
    return _GREGORIAN + timedelta(microseconds=ticks // 10)


def time_of(checkpoint: StoredCheckpoint) -> datetime | None:
    """Return when a checkpoint was made, ``None`` if nothing tells; such a one counts as young."""
    return checkpoint.ts or time_in(checkpoint.checkpoint_id)


def is_call(checkpoint_ns: str) -> bool:
    """Tell whether a namespace belongs to one subgraph call rather than to every call of it."""
    return ":" in checkpoint_ns


@dataclass(slots=True)
class Namespace:
    """One namespace's checkpoints as a tree. Built by ``namespace``, not changed afterwards.

    - ``rows``: every checkpoint by id; ``order``: every id, parents before children.
    - ``real``: ids of the real ones, parents before children.
    - ``base``: for each real one and each annotation the nearest real ancestor.
    - ``children``: the real tree downwards; ``direct``: the stored one, with annotations.
    - ``head``: the newest real checkpoint; ``newest``: the newest of any kind.
    """

    name: str
    rows: dict[str, StoredCheckpoint]
    direct: dict[str, list[str]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    annotations: set[str] = field(default_factory=set)
    carriers: set[str] = field(default_factory=set)
    real: list[str] = field(default_factory=list)
    base: dict[str, str | None] = field(default_factory=dict)
    children: dict[str, list[str]] = field(default_factory=dict)
    head: str | None = None
    newest: str = ""
    delta_channels: frozenset[str] = frozenset()
    problems: list[str] = field(default_factory=list)

    def line(self, checkpoint_id: str | None) -> Iterator[str]:
        """Walk the real tree from a checkpoint to its first ancestor."""
        while checkpoint_id is not None:
            yield checkpoint_id
            checkpoint_id = self.base[checkpoint_id]

    def leading_to(self, kept: Collection[str]) -> set[str]:
        """Find what is kept or has something kept below it."""
        leading: set[str] = set()
        for i in reversed(self.order):
            parent = self.rows[i].parent_id
            if i in kept:
                leading.add(i)
            if i in leading and parent is not None:
                leading.add(parent)
        return leading

    def begun(self, checkpoint_id: str) -> bool:
        """Tell whether something was begun from a checkpoint, or is about to run from it.

        It or a leaf over it has rows in the writes table, or it is due. Only on a tip does that
        mean in flight: rows on a checkpoint with a child were consumed by it.
        """
        hanging = [checkpoint_id]
        for each in hanging:
            hanging += [leaf for leaf in self.direct[each] if leaf in self.annotations]
        tips = (i for i in hanging if i == checkpoint_id or not self.direct[i])
        return self.rows[checkpoint_id].due or any(self.rows[i].writes.rows for i in tips)

    def in_flight(self, checkpoint_id: str) -> bool:
        """Tell whether something was begun from a tip and is not finished."""
        return not self.children[checkpoint_id] and self.begun(checkpoint_id)

    def waits(self) -> bool:
        """Tell whether the head waits for an answer, or stopped at a breakpoint or by a kill."""
        if self.head is None:
            return False
        row = self.rows[self.head]
        return bool(row.writes.asked) or (row.due and not row.writes.failed)


def namespace(name: str, checkpoints: Iterable[StoredCheckpoint]) -> Namespace:
    """Build the tree of one namespace. Holes and cycles are named in its ``problems``."""
    ns = Namespace(name, {c.checkpoint_id: c for c in checkpoints})
    _link(ns)
    for checkpoint_id in ns.order:
        _place(ns, ns.rows[checkpoint_id])
    ns.head = max(ns.real, default=None)
    ns.newest = max(ns.rows)
    ns.delta_channels = frozenset().union(*(_shown_delta(ns, row) for row in ns.rows.values()))
    return ns


def _shown_delta(ns: Namespace, row: StoredCheckpoint) -> frozenset[str]:
    """Name the channels that a row shows to be delta channels.

    Before LangGraph 1.2.15 an update counted none. It shows them all the same: it has a version
    of what was written for it, and no value. Of a carrier, its writes tell.
    """
    shown = row.counted | row.snapshots
    if row.claim == CARRIER:
        return shown | row.writes.channels
    parent = ns.rows.get(row.parent_id or "")
    if row.source != "update" or row.counted or parent is None:
        return shown
    unstored = (parent.writes.channels & row.versioned) - row.stored
    return shown | {c for c in unstored if not c.startswith((BRANCH, "__"))}


def _link(ns: Namespace) -> None:
    ns.direct = {checkpoint_id: [] for checkpoint_id in ns.rows}
    for row in ns.rows.values():
        if row.parent_id is None:
            ns.order.append(row.checkpoint_id)
        elif row.parent_id in ns.direct:
            ns.direct[row.parent_id].append(row.checkpoint_id)
        else:
            ns.problems.append(_about(ns, row, f"its parent {row.parent_id} is not stored"))
            ns.order.append(row.checkpoint_id)
    # Grows while it is walked: each id appends its children.
    for checkpoint_id in ns.order:
        ns.order.extend(ns.direct[checkpoint_id])
    unreached = ns.rows.keys() - ns.order if len(ns.order) < len(ns.rows) else ()
    for checkpoint_id in sorted(unreached):
        ns.problems.append(_about(ns, ns.rows[checkpoint_id], "its parents form a cycle"))


def _about(ns: Namespace, row: StoredCheckpoint, what: str) -> str:
    where = f"namespace {ns.name!r}" if ns.name else "the root namespace"
    return f"Checkpoint {row.checkpoint_id} in {where}: {what}."


def _place(ns: Namespace, row: StoredCheckpoint) -> None:
    """Put a checkpoint, whose parent is placed, among the three kinds and into the real tree."""
    parent = ns.rows.get(row.parent_id) if row.parent_id is not None else None
    above = None
    if parent is not None:
        above = parent.checkpoint_id
        if above in ns.annotations or above in ns.carriers:
            above = ns.base[above]
    ns.base[row.checkpoint_id] = above
    if row.claim == CARRIER:
        ns.carriers.add(row.checkpoint_id)
    elif parent is not None and _is_annotation(row, parent, ns):
        ns.annotations.add(row.checkpoint_id)
    else:
        ns.real.append(row.checkpoint_id)
        ns.children[row.checkpoint_id] = []
        if above is not None:
            ns.children[above].append(row.checkpoint_id)


def _is_annotation(row: StoredCheckpoint, parent: StoredCheckpoint, ns: Namespace) -> bool:
    # A claim or the shape says that it may be one; only the equal state proves it.
    claimed = row.claim is not None or row.annotates
    proved = row.fingerprint == parent.fingerprint and row.source != "fork"
    return claimed and proved and parent.checkpoint_id not in ns.carriers


@dataclass(frozen=True, slots=True)
class Turns:
    """Which turn each real checkpoint belongs to, named by the turn's first checkpoint.

    ``told_apart`` is false where nothing separates turns: a graph without ``__start__`` whose
    runs store only their last checkpoint. ``marked`` tells that runs leave ``__start__``.
    """

    of: dict[str, str]
    starts: frozenset[str]
    marked: bool
    told_apart: bool


def turns(ns: Namespace) -> Turns:
    """Divide a namespace into turns."""
    of: dict[str, str] = {}
    starts = set()
    for checkpoint_id in ns.real:
        above = ns.base[checkpoint_id]
        if _starts_turn(ns.rows[checkpoint_id], ns.rows[above] if above is not None else None):
            starts.add(checkpoint_id)
            of[checkpoint_id] = checkpoint_id
        else:
            of[checkpoint_id] = checkpoint_id if above is None else of[above]
    real = [ns.rows[checkpoint_id] for checkpoint_id in ns.real]
    marked = any(row.start_version is not None for row in real)
    inputs = any(row.source == "input" for row in real)
    return Turns(of, frozenset(starts), marked, marked or inputs or len(real) < 2)


def _starts_turn(row: StoredCheckpoint, parent: StoredCheckpoint | None) -> bool:
    if row.source == "input":
        return True
    if parent is None:
        return row.start_version is not None
    return row.start_version != parent.start_version and parent.source != "input"


def begins_the_thread(ns: Namespace) -> bool:
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


@dataclass(frozen=True, slots=True)
class Lineage:
    """A whole thread: its namespaces by name, and the sentences on what is broken."""

    thread: StoredThread
    namespaces: dict[str, Namespace]
    problems: tuple[str, ...]

    def waits(self) -> bool:
        """Tell whether any namespace's head waits."""
        return any(ns.waits() for ns in self.namespaces.values())

    def last_active(self) -> datetime | None:
        """Return the time of the newest sign of life, ``None`` if one of them has no time.

        Annotations and carriers are no activity. Writes whose checkpoint is not stored are: a
        run's writes may commit before their checkpoint.
        """
        times = [time_of(ns.rows[i]) for ns in self.namespaces.values() for i in ns.real]
        times += [time_in(orphan.checkpoint_id) for orphan in self.thread.orphan_writes]
        return newest(times)


def lineage(thread: StoredThread) -> Lineage:
    """Build the trees of a thread."""
    grouped: dict[str, list[StoredCheckpoint]] = {}
    for checkpoint in thread.checkpoints:
        grouped.setdefault(checkpoint.checkpoint_ns, []).append(checkpoint)
    namespaces = {name: namespace(name, grouped[name]) for name in sorted(grouped)}
    broken = [problem for ns in namespaces.values() for problem in ns.problems]
    return Lineage(thread, namespaces, (*thread.problems, *broken))


def newest(times: Iterable[datetime | None]) -> datetime | None:
    """Return the newest time; ``None``, which counts as now, if any is unknown or there is none."""
    known = []
    for time in times:
        if time is None:
            return None
        known.append(time)
    return max(known, default=None)


def needs(ns: Namespace, kept: set[str]) -> dict[str, frozenset[str]]:
    """Tell for each kept checkpoint which delta channels it or a kept descendant reads above it.

    Empty for a namespace without delta channels. A read ends at the first stored value, so a
    checkpoint that stores a channel needs nothing of it, nor does anything below need it above.
    """
    needed: dict[str, frozenset[str]] = {}
    if not ns.delta_channels:
        return needed
    below: dict[str, frozenset[str]] = {}
    nothing: frozenset[str] = frozenset()
    for checkpoint_id in reversed(ns.order):
        row = ns.rows[checkpoint_id]
        read = below.pop(checkpoint_id, nothing)
        if checkpoint_id in kept:
            read |= ns.delta_channels & row.versioned
            needed[checkpoint_id] = read - row.stored
        read -= row.stored
        if read and row.parent_id is not None:
            below[row.parent_id] = below.get(row.parent_id, nothing) | read
    return needed
