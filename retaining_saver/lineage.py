"""What a thread's records say of the thread as a whole: its namespaces, ages, what waits. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from retaining_saver import tree
from retaining_saver.entries import StoredCheckpoint, StoredThread
from retaining_saver.tree import Columns, Tree, grown

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


def newest(times: Iterable[datetime | None]) -> datetime | None:
    """Return the newest time; ``None``, which counts as now, if any is unknown or there is none."""
    latest: datetime | None = None
    for time in times:
        if time is None:
            return None
        if latest is None or time > latest:
            latest = time
    return latest


def is_call(checkpoint_ns: str) -> bool:
    """Tell whether a namespace belongs to one subgraph call rather than to every call of it."""
    return ":" in checkpoint_ns


@dataclass(frozen=True, slots=True)
class Lineage:
    """A whole thread: its namespaces as trees by name, and the sentences on what is broken."""

    thread: StoredThread
    columns: Columns
    trees: dict[str, Tree]
    problems: tuple[str, ...]

    @property
    def namespaces(self) -> dict[str, Namespace]:
        """The namespaces, to be looked at by id."""
        return {name: Namespace(ns) for name, ns in self.trees.items()}

    def waits(self) -> bool:
        """Tell whether any namespace's head waits."""
        return any(ns.waits() for ns in self.trees.values())

    def last_active(self) -> datetime | None:
        """Return the time of the newest sign of life, ``None`` if one of them has no time.

        Annotations and carriers are no activity. Writes whose checkpoint is not stored are: a
        run's writes may commit before their checkpoint.
        """
        return newest(self._times())

    def _times(self) -> Iterator[datetime | None]:
        for ns in self.trees.values():
            yield from (time_of(ns.rows[i]) for i in ns.real)
        yield from (time_in(orphan.checkpoint_id) for orphan in self.thread.orphan_writes)


def lineage(thread: StoredThread) -> Lineage:
    """Build the trees of a thread."""
    columns, trees, broken = grown(thread.checkpoints)
    return Lineage(thread, columns, {ns.name: ns for ns in trees}, (*thread.problems, *broken))


@dataclass(frozen=True, slots=True)
class Namespace:
    """One namespace by id, for whoever looks at a thread without planning it."""

    tree: Tree

    @property
    def name(self) -> str:
        """The ``checkpoint_ns``."""
        return self.tree.name

    @property
    def head(self) -> str | None:
        """The newest real checkpoint."""
        return self._id(self.tree.head)

    @property
    def real(self) -> list[str]:
        """The real ones, parents before children."""
        return [self.tree.ids[i] for i in self.tree.real]

    @property
    def annotations(self) -> set[str]:
        """The annotations."""
        return {self.tree.ids[i] for i in self.tree.order if self.tree.annotation[i]}

    @property
    def base(self) -> dict[str, str | None]:
        """For each the nearest real ancestor."""
        return {self.tree.ids[i]: self._id(self.tree.base[i]) for i in self.tree.order}

    @property
    def children(self) -> dict[str, list[str]]:
        """The real tree downwards."""
        ids = self.tree.ids
        return {ids[i]: [ids[c] for c in self.tree.real_below(i)] for i in self.tree.real}

    @property
    def delta_channels(self) -> frozenset[str]:
        """The channels of which a checkpoint stores only what it writes."""
        return self.tree.delta_channels

    def in_flight(self, checkpoint_id: str) -> bool:
        """Tell whether something was begun from a tip and is not finished."""
        i = self.tree.find(checkpoint_id)
        assert i is not None
        return next(self.tree.real_below(i), None) is None and self.tree.begun(i)

    def _id(self, place: int | None) -> str | None:
        return None if place is None else self.tree.ids[place]


@dataclass(frozen=True, slots=True)
class Turns:
    """Which turn each real checkpoint belongs to, by id; the rest as in ``tree.Turns``."""

    of: dict[str, str]
    marked: bool
    told_apart: bool


def turns(ns: Namespace) -> Turns:
    """Divide a namespace into turns."""
    ids, divided = ns.tree.ids, tree.turns(ns.tree)
    of = {ids[i]: ids[divided.of[i]] for i in ns.tree.real}
    return Turns(of, divided.marked, divided.told_apart)


def needs(ns: Namespace, kept: Collection[str]) -> dict[str, frozenset[str]]:
    """Tell what each kept checkpoint has to find above it: ``tree.needs``, by id."""
    stays = [i in kept for i in ns.tree.ids]
    needed = tree.needs(ns.tree, stays, ns.tree.places)
    return {ns.tree.ids[i]: channels for i, channels in needed.items()}
