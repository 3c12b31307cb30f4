"""What a plan says: one entry per checkpoint, and the sentence behind every reason. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from operator import eq
from typing import Any, TypeVar, overload

RULES: dict[str, str] = {
    # Why a checkpoint stays.
    "head": "the newest of its namespace is what the next run reads",
    "pinned": "a pin keeps it addressable",
    "every_turn": "no rule limits the turns that are kept",
    "last_turns": "it belongs to one of the newest turns of its branch",
    "young_turn": "its turn is younger than the policy's limit",
    "matching_turn": "a checkpoint of its turn has the metadata that the policy looks for",
    "unknown_turns": "nothing stored tells the turns of this thread apart",
    "rest": "the turn that it ends was at rest here",
    "match": "it has the metadata that its turn is kept for",
    "turn_start": "without it the turn would look like a part of the one before",
    "base": "the oldest kept turn of its branch starts from it",
    "pending_sends": "a child of an old format reads its pending sends from it",
    "annotation": "it annotates a checkpoint that stays and cannot be removed now",
    "subgraphs_untouched": "no root checkpoint goes, so no subgraph's does",
    "call": "a checkpoint that started its call stays, or its root one is not stored yet",
    "read_by_replay": "a replay of a kept root checkpoint reads it",
    "started_by_kept": "a kept root checkpoint started it",
    "uncommitted": "the run that started it is unknown, or may not have stored all of its own yet",
    "carrier": "it carries what a kept checkpoint's delta channels need",
    "other_run": "it belongs to none of the deleted runs",
    "broken": "the thread is broken and left alone",
    "all_that_is_left": "without the deleted runs nothing of the conversation would be left",
    # Why a checkpoint goes.
    "idle": "the whole thread has been idle for longer than the policy allows",
    "expired": "no rule keeps its turn",
    "superseded": "only the newest state is kept",
    "sibling": "its branch is off the main line and older than the policy allows",
    "superstep": "its turn is older than the newest and was not at rest here",
    "leaf": "it is metadata-only; its parent holds the same state",
    "link": "it is metadata-only; its children continue from its parent",
    "subgraph_expired": "no kept root checkpoint started it or reads it",
    "run": "it belongs to a deleted run",
    "carrier_replaced": "what it carries is needed no longer or moves to a new carrier",
    # What else is done.
    "graft": "its parent goes, and this is its nearest ancestor that stays",
    "cut": "its parent goes, and no ancestor of it stays",
    "carried": "kept delta channels read what was written in the stretch that goes",
    "shielded": "without it a child of an old format would read foreign pending sends",
    "bound": "a replay of a fork reads subgraphs as they were before the parent that goes",
    "folded": "what it recorded about runs would be lost with it",
    "marked": "what shows that it is metadata-only may be folded into its parent, too",
    "reopened": "the run that answered its question is deleted",
    "retried": "the run that repeated its failed task is deleted",
    "undone": "the run that started from it is deleted",
    "orphan": "its checkpoint is not stored and is older than the grace period",
}
"""Every reason an entry can have, and its sentence."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One checkpoint and why it is listed; ``reason`` is a key of ``RULES``."""

    checkpoint_ns: str
    checkpoint_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Graft(Entry):
    """A kept checkpoint that gets another parent: an ancestor, a new carrier, or none.

    ``moves_writes`` is the only dropped checkpoint between the two, if it has rows in the writes
    table: they move to ``parent_id``.
    """

    parent_id: str | None
    moves_writes: str | None = None


@dataclass(frozen=True, slots=True)
class Carry(Entry):
    """A synthetic checkpoint that replaces a dropped stretch above ``children``.

    ``checkpoint_id`` is new: below the children's ids, and above ``parent_id`` wherever that one
    is below the children. ``sources`` are the dropped checkpoints that it takes from, oldest
    first. ``writes`` names for each delta channel the sources whose rows for it the carrier
    takes over, oldest first; ``seeds`` the source whose stored value it stores. A source may be
    a carrier itself. With no sources it only stands between its children and ``parent_id``.
    """

    parent_id: str | None
    children: tuple[str, ...]
    sources: tuple[str, ...]
    writes: dict[str, tuple[str, ...]]
    seeds: dict[str, str]


@dataclass(frozen=True, slots=True)
class Fold(Entry):
    """A dropped checkpoint whose record of runs moves into the metadata of ``into``.

    With ``whole`` everything moves that it recorded by itself, else its run history only. With
    the reason ``marked`` nothing moves: ``into``, which annotates ``checkpoint_id``, is marked as
    what it is.
    """

    into: str
    whole: bool


@dataclass(frozen=True, slots=True)
class Rollback(Entry):
    """A kept checkpoint whose last child goes with its run: it is open again.

    With ``commands`` goes what a ``Command`` gave it: ``__resume__`` rows and those of the null
    task. Of the others go those of ``tasks``, with ``None`` of all, and what runs that started
    from it stored there when they began or exited; but ``__interrupt__`` and ``__error__`` rows
    only with ``None``.
    """

    tasks: tuple[str, ...] | None
    commands: bool = True


E = TypeVar("E", bound=Entry)


class Entries(Sequence[E]):
    """The entries of a whole thread, each made when it is asked for. Equal to a tuple of them.

    A plan lists every checkpoint. As objects of their own, 100,000 entries would have the garbage
    collector go through everything in the process, which takes longer than deciding about them.
    """

    __slots__ = ("_columns", "_kind")

    def __init__(self, kind: Callable[..., E], *columns: Sequence[Any]) -> None:
        self._kind = kind
        self._columns = columns

    def __len__(self) -> int:
        return len(self._columns[0])

    def __iter__(self) -> Iterator[E]:
        return map(self._kind, *self._columns)

    @overload
    def __getitem__(self, index: int) -> E: ...
    @overload
    def __getitem__(self, index: slice) -> Entries[E]: ...
    def __getitem__(self, index: int | slice) -> E | Entries[E]:
        found = [column[index] for column in self._columns]
        return Entries(self._kind, *found) if isinstance(index, slice) else self._kind(*found)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (tuple, Entries)):
            return NotImplemented
        return len(self) == len(other) and all(map(eq, self, other))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """What retention does to one thread. Every stored checkpoint is in ``keep`` or in ``drop``.

    ``fold`` is ordered oldest first; of the dropped turns' runs the newest ``keep_runs`` are to
    be remembered. ``orphans`` are checkpoints that are not stored but have rows in the writes
    table, older than the grace period. ``problems`` are sentences on a broken thread: its plan
    changes nothing. ``notes`` are sentences on rules that could not be applied. With
    ``delete_thread`` the whole thread goes, and ``drop`` lists all of it.
    """

    thread_id: str
    keep: Sequence[Entry] = ()
    drop: Sequence[Entry] = ()
    graft: Sequence[Graft] = ()
    carry: tuple[Carry, ...] = ()
    fold: Sequence[Fold] = ()
    rollback: tuple[Rollback, ...] = ()
    orphans: tuple[Entry, ...] = ()
    delete_thread: bool = False
    keep_runs: int = 1000
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def refused(self) -> bool:
        """Tell whether the thread is broken and therefore left alone."""
        return bool(self.problems)

    @property
    def changes(self) -> bool:
        """Tell whether applying the plan changes anything."""
        return bool(self.drop or self.graft or self.carry or self.rollback or self.orphans)

    def describe(self) -> str:
        """Say the plan in sentences, one a line."""
        return "\n".join(_sentences(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}


def _plain(value: Any) -> Any:
    if isinstance(value, Entry):
        value = asdict(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, Entries)):
        return [_plain(item) for item in value]
    return value


def _sentences(plan: RetentionPlan) -> Iterator[str]:
    total = len(plan.keep) + len(plan.drop)
    name = f"Thread {plan.thread_id!r}"
    if plan.refused:
        yield f"{name} is broken and left alone ({_counted(total)})."
    elif plan.delete_thread:
        yield f"{name} goes as a whole ({_counted(total)})."
    else:
        yield f"{name}: {_counted(len(plan.keep))} stay, {len(plan.drop)} go."
    yield from plan.problems
    yield from plan.notes
    yield from _listed("Keep", plan.keep)
    yield from _listed("Drop", plan.drop)
    yield from _moves(plan)
    yield from _listed("Remove the writes of", plan.orphans)


def _moves(plan: RetentionPlan) -> Iterator[str]:
    for carry in plan.carry:
        whom = _ids(carry.children)
        what = f"Replace what went above {whom} by carrier {carry.checkpoint_id}"
        yield f"{_where(carry.checkpoint_ns)}{what}: {RULES[carry.reason]}."
    for graft in plan.graft:
        what = f"Graft {graft.checkpoint_id} onto {graft.parent_id or 'nothing'}"
        with_rows = f", with the writes of {graft.moves_writes}" if graft.moves_writes else ""
        yield f"{_where(graft.checkpoint_ns)}{what}{with_rows}: {RULES[graft.reason]}."
    for fold in plan.fold:
        marks = fold.reason == "marked"
        what = f"Mark {fold.into}" if marks else f"Fold {fold.checkpoint_id} into {fold.into}"
        yield f"{_where(fold.checkpoint_ns)}{what}: {RULES[fold.reason]}."
    for back in plan.rollback:
        what = f"Open {back.checkpoint_id} again"
        yield f"{_where(back.checkpoint_ns)}{what}: {RULES[back.reason]}."


def _listed(verb: str, entries: Sequence[Entry]) -> Iterator[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        groups.setdefault((entry.checkpoint_ns, entry.reason), []).append(entry.checkpoint_id)
    for (ns, reason), ids in groups.items():
        yield f"{_where(ns)}{verb} {_ids(ids)}: {RULES[reason]}."


def _where(checkpoint_ns: str) -> str:
    return f"In {checkpoint_ns!r}: " if checkpoint_ns else ""


def _ids(ids: Sequence[str]) -> str:
    if len(ids) > 4:
        return f"{len(ids)} checkpoints, {ids[0]} to {ids[-1]}"
    return ", ".join(ids[:-1]) + (" and " if ids[1:] else "") + ids[-1]


def _counted(count: int) -> str:
    return f"{count} checkpoint{'' if count == 1 else 's'}"
