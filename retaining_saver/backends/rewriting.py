"""What applying a plan writes, alike for every backend: metadata, carriers and their rows. Pure.

A carrier is a synthetic checkpoint in the shape of the stub that LangGraph itself stores for
``durability="exit"``: no values but seeds, no versions but those of its seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from retaining_saver import folds
from retaining_saver.backends.moves import stored_from_below
from retaining_saver.entries import CARRIER, ERROR, INTERRUPT, NULL_TASK_ID, RESUME
from retaining_saver.errors import PlanRefused
from retaining_saver.planned import Carry, Fold, RetentionPlan, Rollback

Key = tuple[str, str]  # checkpoint_ns, checkpoint_id
FORMAT = 4
"""The checkpoint format that carriers are written in: sends are channel values, not writes."""

_NAMED = "00000000-0000-0000-0001-"


def require(plan: RetentionPlan, stored: Iterable[Key]) -> None:
    """Raise ``PlanRefused`` if a checkpoint that a copy was planned for is gone by now."""
    missing = {(e.checkpoint_ns, e.checkpoint_id) for e in (*plan.keep, *plan.drop)}.difference(
        stored
    )
    if missing:
        raise PlanRefused(
            f"Thread {plan.thread_id} lost {len(missing)} checkpoints while it was to be copied. "
            "Nothing was copied; try again."
        )


class Folding:
    """What one checkpoint's metadata becomes when others are folded into it, oldest first.

    Run history is gathered and folded at once: maps that repeat what earlier ones held would
    bring back, as the newest, what has just been found too old.
    """

    def __init__(self, into: str, metadata: Mapping[str, Any], keep_runs: int) -> None:
        self._into = into
        self._metadata = dict(metadata)
        self._keep_runs = keep_runs
        self._older: dict[str, dict[str, Any]] = {}
        self._newer: dict[str, dict[str, Any]] = {}

    def add(self, fold: Fold, dropped: Mapping[str, Any]) -> None:
        """Fold one dropped checkpoint's metadata."""
        if fold.reason == "marked":
            self._metadata = folds.tagged(self._metadata, self._into, folds.DURATION, dropped)
            return
        if fold.whole:
            merged = folds.folded_into(self.metadata(), self._into, dropped, fold.checkpoint_id)
            self._metadata = merged
            return
        durations, messages = folds.history_by_age(fold.checkpoint_id, dropped)
        history = self._older if fold.checkpoint_id < self._into else self._newer
        _gather(history, "run_durations", durations)
        _gather(history, "run_message_ids", messages)

    def metadata(self) -> dict[str, Any]:
        """Return the metadata with everything folded so far."""
        older, self._older, newer, self._newer = self._older, {}, self._newer, {}
        for history, is_older in ((older, True), (newer, False)):
            if history:
                self._metadata = folds.history_into(
                    self._metadata, self._into, history, self._keep_runs, older=is_older
                )
        return self._metadata


def _gather(history: dict[str, dict[str, Any]], key: str, entries: Mapping[str, Any]) -> None:
    gathered = history.setdefault(key, {})
    for name, value in entries.items():
        # What was recorded first stands; its place tells its age.
        gathered.setdefault(name, value)


def merged_metadata(
    plan: RetentionPlan, metadata_of: Callable[[Key], Mapping[str, Any]]
) -> dict[Key, dict[str, Any]]:
    """Return the new metadata of every checkpoint that the plan folds something into."""
    foldings: dict[Key, Folding] = {}
    for fold in plan.fold:
        into = (fold.checkpoint_ns, fold.into)
        if into not in foldings:
            foldings[into] = Folding(fold.into, metadata_of(into), plan.keep_runs)
        foldings[into].add(fold, metadata_of((fold.checkpoint_ns, fold.checkpoint_id)))
    return {into: folding.metadata() for into, folding in foldings.items()}


def is_undone(back: Rollback, task_id: str, channel: str) -> bool:
    """Tell whether a row of the writes table goes with a rollback."""
    if task_id == NULL_TASK_ID or channel == RESUME:
        return back.commands
    if back.tasks is None:
        return True
    if channel in (INTERRUPT, ERROR):
        return False
    return task_id in back.tasks or stored_from_below(task_id, back.checkpoint_id)


def carrier_metadata(carry: Carry) -> dict[str, Any]:
    """Return the metadata of a new carrier."""
    return {
        "step": -2,
        "parents": {},
        folds.MARK: {"kind": CARRIER, "id": carry.checkpoint_id},
    }


def carrier_checkpoint(
    carry: Carry, ts: str, versions: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the checkpoint dict of a new carrier.

    ``versions`` and ``values`` are those of the seeds; where values are stored apart, only what
    the saver inlines of them. ``ts`` is the time of the newest source: a carrier is as old as
    what it replaces.
    """
    return {
        "v": FORMAT,
        "id": carry.checkpoint_id,
        "ts": ts,
        "channel_values": dict(values),
        "channel_versions": dict(versions),
        "versions_seen": {},
        "updated_channels": None,
    }


@dataclass(frozen=True, slots=True)
class Taken:
    """One task's rows of one channel at one source, and how the carrier names them.

    The carrier's task path is ``prefix`` followed by the row's own; ``idx`` stays.
    """

    source: str
    channels: tuple[str, ...]
    task_id: str
    new_task_id: str
    prefix: str


def taken_rows(
    carry: Carry, tasks_at: Callable[[str, tuple[str, ...]], Iterable[str]]
) -> Iterator[Taken]:
    """Name the rows of the writes table that a carrier takes over, oldest source first.

    ``tasks_at(source, channels)`` returns the ids of the tasks with rows there. Readers order
    writes by task path, then by task id; those of releases before langgraph-checkpoint 4.3, and
    of SQLite tables without a task path, by task id alone. Both sort by age: the path by its
    prefix, ``~`` after every real path, the id because it counts up. New ids also keep rows of
    the null task from being applied as the carrier's own state, and those of a task that wrote
    from two sources from colliding: LangGraph derives a task's id from its checkpoint, but
    anybody may put writes.
    """
    named = 0
    for number, source in enumerate(carry.sources):
        channels = tuple(c for c, sources in carry.writes.items() if source in sources)
        if not channels:
            continue
        for task_id in sorted(tasks_at(source, channels)):
            yield Taken(source, channels, task_id, f"{_NAMED}{named:012x}", f"~~{number:010d}")
            named += 1
