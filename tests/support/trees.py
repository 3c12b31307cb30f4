"""Threads as records, built by hand; what a plan leaves of one; and both drawn as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from typing import Any

from retaining_saver.entries import (
    CARRIER,
    ERROR,
    INTERRUPT,
    NO_WRITES,
    NULL_TASK_ID,
    RESUME,
    OrphanWrites,
    StoredCheckpoint,
    StoredThread,
    Writes,
)
from retaining_saver.planned import RetentionPlan, Rollback
from retaining_saver.records import Ref

START_OF_TIME = datetime(2024, 1, 1, tzinfo=timezone.utc)
Key = tuple[str, str]


@dataclass
class Tree:
    """A thread that grows as a graph's runs would make it grow; ids count upwards.

    ``start_version`` follows LangGraph: an input changes it, and so does the step that takes the
    input; a run that stores only its end does both at once.
    """

    thread_id: str = "t"
    pace: timedelta = timedelta(minutes=1)
    now: datetime = START_OF_TIME
    rows: dict[Key, StoredCheckpoint] = field(default_factory=dict)

    def add(
        self, parent: str | None = None, ns: str = "", *, named: str | None = None, **facts: Any
    ) -> str:
        """Add a checkpoint; facts that are not given are those of its parent, or nothing."""
        self.now += self.pace
        made = named or f"c{len(self.rows) + 1:03d}"
        above = self.rows[ns, parent] if parent is not None else None
        defaults: dict[str, Any] = {
            "source": "loop",
            "step": above.step + 1 if above is not None and above.step is not None else -1,
            "ts": self.now,
            "v": 4,
            "run_id": None,
            "claim": None,
            "annotates": False,
            "has_history": False,
            "matches": False,
            "parents": above.parents if above is not None else (),
            "start_version": above.start_version if above is not None else None,
            "versioned": above.versioned if above is not None else frozenset(),
            "stored": frozenset(),
            "snapshots": frozenset(),
            "counted": above.counted if above is not None else frozenset(),
            "fingerprint": made.encode(),
            "writes": NO_WRITES,
        }
        row = StoredCheckpoint(ns, made, parent, **{**defaults, **facts})
        self.rows[ns, made] = row
        return made

    def input(self, parent: str | None = None, **facts: Any) -> str:
        return self.add(parent, source="input", start_version=self._start(parent, 1), **facts)

    def step(self, parent: str, ns: str = "", **facts: Any) -> str:
        takes = self.rows[ns, parent].source == "input"
        version = self._start(parent, 1, ns) if takes else self._start(parent, 0, ns)
        return self.add(parent, ns, start_version=version, **facts)

    def turn(self, parent: str | None = None, steps: int = 2, **facts: Any) -> str:
        """Add an input and its steps, each leaving rows on the one it ran from."""
        last = self.input(parent, **facts)
        for _ in range(steps):
            self.wrote(last)
            last = self.step(last, **facts)
        return last

    def exit_turn(self, parent: str | None = None, **facts: Any) -> str:
        """Add a turn as ``durability="exit"`` stores it."""
        base = parent or self.add(source=None, step=-2)
        return self.add(base, start_version=self._start(base, 2), **facts)

    def leaf(self, parent: str, ns: str = "", **facts: Any) -> str:
        """Put a metadata-only checkpoint on another."""
        above = self.rows[ns, parent]
        copied = replace(above, matches=False, annotates=False)
        names = ("source", "step", "v", "run_id", "start_version", "versioned", "counted", "stored")
        like = {name: getattr(copied, name) for name in (*names, "snapshots", "fingerprint")}
        marked = {"claim": "duration", "has_history": True}
        return self.add(parent, ns, **{**like, **marked, **facts})

    def change(self, checkpoint_id: str, ns: str = "", **facts: Any) -> str:
        """Change facts of a stored checkpoint."""
        self.rows[ns, checkpoint_id] = replace(self.rows[ns, checkpoint_id], **facts)
        return checkpoint_id

    def wrote(self, checkpoint_id: str, *channels: str, ns: str = "", task: str = "task") -> str:
        """Give a checkpoint rows in the writes table."""
        rows = [(task, channel) for channel in channels or ("out",)]
        before = self.rows[ns, checkpoint_id].writes
        return self.change(checkpoint_id, ns, writes=_joined(before, Writes.of(rows)))

    def thread(
        self, orphans: Iterable[OrphanWrites] = (), problems: Iterable[str] = ()
    ) -> StoredThread:
        rows = tuple(self.rows[key] for key in sorted(self.rows))
        return StoredThread(self.thread_id, rows, tuple(orphans), tuple(problems))

    def _start(self, parent: str | None, more: int, ns: str = "") -> int | None:
        before = None if parent is None else self.rows[ns, parent].start_version
        return before if before is None and not more else int(before or 0) + more


def _joined(one: Writes, other: Writes) -> Writes:
    return Writes(
        one.rows + other.rows,
        one.channels | other.channels,
        tuple(dict.fromkeys(one.asked + other.asked)),
        tuple(dict.fromkeys(one.failed + other.failed)),
        one.null_task or other.null_task,
    )


def pin(checkpoint_id: str, ns: str = "") -> Ref:
    return Ref("t", ns, checkpoint_id)


def ids(entries: Iterable[Any]) -> list[str]:
    return [entry.checkpoint_id for entry in entries]


def reasons(entries: Iterable[Any]) -> dict[str, str]:
    return {entry.checkpoint_id: entry.reason for entry in entries}


@dataclass(frozen=True)
class World:
    """A thread, and who originally wrote what its checkpoints hold.

    ``writers`` names per checkpoint and channel the original writers, oldest first; ``seeders``
    whose stored value it is. Missing means the checkpoint itself.
    """

    thread: StoredThread
    writers: Mapping[Key, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    seeders: Mapping[Key, Mapping[str, str]] = field(default_factory=dict)

    def row(self, ns: str, checkpoint_id: str) -> StoredCheckpoint:
        return {(c.checkpoint_ns, c.checkpoint_id): c for c in self.thread.checkpoints}[
            ns, checkpoint_id
        ]

    def wrote(self, row: StoredCheckpoint, channel: str) -> tuple[str, ...]:
        key = (row.checkpoint_ns, row.checkpoint_id)
        if channel not in row.writes.channels:
            return ()
        return self.writers.get(key, {}).get(channel, (row.checkpoint_id,))

    def seeded(self, row: StoredCheckpoint, channel: str) -> str:
        key = (row.checkpoint_ns, row.checkpoint_id)
        # Metadata-only checkpoints store the values of what they repeat.
        return self.seeders.get(key, {}).get(channel, row.fingerprint.decode())

    def reads(self, channels: Iterable[str]) -> dict[tuple[str, str, str], tuple[str, ...]]:
        """Read channels from every checkpoint but carriers, as a walk over parents does."""
        rows = {(c.checkpoint_ns, c.checkpoint_id): c for c in self.thread.checkpoints}
        found: dict[tuple[str, str, str], tuple[str, ...]] = {}
        for (ns, i), row in rows.items():
            for channel in channels if row.claim != CARRIER else ():
                if channel in row.versioned:
                    found[ns, i, channel] = self._read(rows, row, channel)
        return found

    def _read(
        self, rows: Mapping[Key, StoredCheckpoint], row: StoredCheckpoint, channel: str
    ) -> tuple[str, ...]:
        if channel in row.stored:
            return (f"={self.seeded(row, channel)}",)
        read: tuple[str, ...] = ()
        while row.parent_id is not None:
            row = rows[row.checkpoint_ns, row.parent_id]
            read = self.wrote(row, channel) + read
            if channel in row.stored:
                return (f"={self.seeded(row, channel)}", *read)
        return read


def applied(world: World, plan: RetentionPlan) -> World:
    """Do what a plan says, in memory."""
    if plan.delete_thread:
        return World(StoredThread(world.thread.thread_id))
    rows = {(c.checkpoint_ns, c.checkpoint_id): c for c in world.thread.checkpoints}
    writers, seeders = dict(world.writers), dict(world.seeders)
    made: dict[Key, StoredCheckpoint] = {}
    for carry in plan.carry:
        key = (carry.checkpoint_ns, carry.checkpoint_id)
        made[key] = _carrier(rows, carry)
        writers[key] = {
            channel: tuple(
                origin
                for i in sources
                for origin in world.wrote(rows[carry.checkpoint_ns, i], channel)
            )
            for channel, sources in carry.writes.items()
        }
        seeders[key] = {
            channel: world.seeded(rows[carry.checkpoint_ns, i], channel)
            for channel, i in carry.seeds.items()
        }
    rows.update(made)  # What a link wrote may move to a new carrier.
    for graft in plan.graft:
        key = (graft.checkpoint_ns, graft.checkpoint_id)
        if graft.moves_writes is not None and graft.parent_id is not None:
            _move(world, rows, writers, (graft.checkpoint_ns, graft.moves_writes), graft.parent_id)
            onto = (graft.checkpoint_ns, graft.parent_id)
            made |= {onto: rows[onto]} if onto in made else {}
        rows[key] = replace(rows[key], parent_id=graft.parent_id)
    for fold in plan.fold:
        key = (fold.checkpoint_ns, fold.into)
        marks, row = fold.reason == "marked", rows[key]
        claim = "duration" if marks else row.claim
        annotates = row.annotates and not marks
        rows[key] = replace(row, has_history=True, claim=claim, annotates=annotates)
    for back in plan.rollback:
        key = (back.checkpoint_ns, back.checkpoint_id)
        rows[key] = replace(rows[key], writes=_rolled_back(rows[key].writes, back))
    for entry in plan.drop:
        del rows[entry.checkpoint_ns, entry.checkpoint_id]
    rows.update(made)
    gone = {(o.checkpoint_ns, o.checkpoint_id) for o in plan.orphans}
    orphans = tuple(
        o for o in world.thread.orphan_writes if (o.checkpoint_ns, o.checkpoint_id) not in gone
    )
    ordered = tuple(rows[key] for key in sorted(rows))
    return World(StoredThread(world.thread.thread_id, ordered, orphans), writers, seeders)


def _carrier(rows: Mapping[Key, StoredCheckpoint], carry: Any) -> StoredCheckpoint:
    child = rows[carry.checkpoint_ns, carry.children[0]]
    return replace(
        child,
        checkpoint_id=carry.checkpoint_id,
        parent_id=carry.parent_id,
        source=None,
        claim=CARRIER,
        v=4,
        annotates=False,
        has_history=False,
        matches=False,
        stored=frozenset(carry.seeds),
        snapshots=frozenset(carry.seeds),
        counted=frozenset(),
        fingerprint=carry.checkpoint_id.encode(),
        writes=Writes(len(carry.sources), frozenset(carry.writes)),
    )


def _move(
    world: World,
    rows: dict[Key, StoredCheckpoint],
    writers: dict[Key, Mapping[str, tuple[str, ...]]],
    link: Key,
    parent_id: str,
) -> None:
    target = (link[0], parent_id)
    moved = rows[link].writes
    rows[target] = replace(rows[target], writes=moved)
    writers[target] = {channel: world.wrote(rows[link], channel) for channel in moved.channels}


def _rolled_back(writes: Writes, back: Rollback) -> Writes:
    if not back.commands:
        return writes  # Nothing here tells whose rows they are.
    if back.tasks is None:
        return NO_WRITES
    stays = writes.channels & {INTERRUPT, ERROR}
    return Writes(len(stays), stays, writes.asked, writes.failed)


def draw(thread: StoredThread, plan: RetentionPlan | None = None) -> str:
    """Draw a thread; with a plan, say of each checkpoint whether it stays and by which rule."""
    return "\n".join(line.rstrip() for line in _lines(thread, plan)) + "\n"


def _lines(thread: StoredThread, plan: RetentionPlan | None) -> Iterator[str]:
    fates = _fates(plan)
    for ns in sorted({c.checkpoint_ns for c in thread.checkpoints}):
        if ns:
            yield f"in {ns!r}"
        rows = {c.checkpoint_id: c for c in thread.checkpoints if c.checkpoint_ns == ns}
        for i in sorted(rows):
            if rows[i].parent_id not in rows:
                yield from _branch(rows, i, "", fates)


def _fates(plan: RetentionPlan | None) -> dict[Key, str]:
    fates: dict[Key, str] = {}
    if plan is not None:
        for fate, entries in (("keep", plan.keep), ("drop", plan.drop)):
            for e in entries:
                fates[e.checkpoint_ns, e.checkpoint_id] = f"{fate}  {e.reason}"
    return fates


def _branch(
    rows: Mapping[str, StoredCheckpoint], i: str | None, indent: str, fates: Mapping[Key, str]
) -> Iterator[str]:
    while i is not None:
        row = rows[i]
        label = f"{indent}{i}"
        yield f"{label:<14}{_kind(row):<22}{fates.get((row.checkpoint_ns, i), '')}"
        children = sorted(c for c in rows if rows[c].parent_id == i)
        # The newest line goes straight on; older ones are set off to the right.
        children.sort(key=lambda c: _newest_below(rows, c))
        for child in children[:-1]:
            yield from _branch(rows, child, indent + "   ", fates)
        i = children[-1] if children else None


def _newest_below(rows: Mapping[str, StoredCheckpoint], i: str) -> str:
    below = [_newest_below(rows, c) for c in rows if rows[c].parent_id == i]
    return max([i, *below])


def _kind(row: StoredCheckpoint) -> str:
    if row.claim == CARRIER:
        return "carrier"
    kind = "leaf" if row.claim is not None else row.source or "start"
    notes = [
        word
        for word, holds in (
            ("asks", bool(row.writes.asked)),
            ("failed", bool(row.writes.failed)),
            ("answered", RESUME in row.writes.channels),
            ("snapshot", bool(row.snapshots) and row.claim is None),
        )
        if holds
    ]
    return ", ".join([kind, *notes])


__all__ = ["NULL_TASK_ID", "Tree", "World", "applied", "draw", "ids", "pin", "reasons"]
