"""Decide what of a thread stays and what goes, with the reason for every checkpoint. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """One checkpoint and why it is listed; ``reason`` names a rule in ``RULES``."""

    checkpoint_ns: str
    checkpoint_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Graft(Entry):
    """A kept checkpoint (or a new carrier's child) that gets another parent.

    ``moves_writes``: the only dropped checkpoint between the two is ``moves_writes``, whose rows
    in the writes table move to ``parent_id``.
    """

    parent_id: str | None
    moves_writes: str | None = None


@dataclass(frozen=True, slots=True)
class Carry(Entry):
    """A synthetic checkpoint that replaces a dropped stretch.

    ``checkpoint_id`` is new and lies below its children's ids. ``sources`` are the dropped
    checkpoints of the stretch, oldest first, numbered by their place in it. ``writes`` names per
    delta channel the sources whose rows for it move to the carrier, oldest first; ``seeds`` the
    source whose stored value of the channel the carrier stores.
    """

    parent_id: str | None
    children: tuple[str, ...]
    sources: tuple[str, ...]
    writes: dict[str, tuple[str, ...]]
    seeds: dict[str, str]


@dataclass(frozen=True, slots=True)
class Fold(Entry):
    """What a dropped checkpoint recorded about runs moves into the metadata of ``into``."""

    into: str


@dataclass(frozen=True, slots=True)
class Rollback(Entry):
    """A kept checkpoint whose last child goes with its run: it is open again.

    Its ``__resume__`` rows and the rows of the null task go. Of ``tasks`` every row goes but
    ``__interrupt__`` and ``__error__``; with ``tasks`` ``None`` every row of the checkpoint goes.
    """

    tasks: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """What retention does to one thread. Every stored checkpoint is in ``keep`` or in ``drop``.

    ``problems`` are sentences on a broken thread; such a plan keeps everything. ``notes`` are
    sentences on rules that could not be applied. ``orphans`` are rows of the writes table that
    name no stored checkpoint and are older than the grace period. With ``delete_thread`` the
    whole thread goes, and ``drop`` lists all of it.
    """

    thread_id: str
    keep: tuple[Entry, ...] = ()
    drop: tuple[Entry, ...] = ()
    graft: tuple[Graft, ...] = ()
    carry: tuple[Carry, ...] = ()
    fold: tuple[Fold, ...] = ()
    rollback: tuple[Rollback, ...] = ()
    orphans: tuple[Entry, ...] = ()
    delete_thread: bool = False
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
