"""A thread's trees by id, where the planner names checkpoints by their places."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from retaining_saver import tree
from retaining_saver.entries import StoredThread
from retaining_saver.lineage import lineage
from retaining_saver.tree import Tree


def namespaces(thread: StoredThread) -> dict[str, Namespace]:
    """Build the trees of a thread."""
    return {name: Namespace(ns) for name, ns in lineage(thread).trees.items()}


@dataclass(frozen=True, slots=True)
class Namespace:
    """One namespace by id."""

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
