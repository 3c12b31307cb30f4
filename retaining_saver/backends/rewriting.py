"""What applying a plan writes, alike for every backend: metadata, carriers and their rows. Pure.

A carrier is a synthetic checkpoint in the shape of the stub that LangGraph itself stores for
``durability="exit"``: no values but seeds, no versions but those of its seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from retaining_saver import folds
from retaining_saver.entries import CARRIER, NULL_TASK_ID
from retaining_saver.planned import Carry, Fold, RetentionPlan

Key = tuple[str, str]  # checkpoint_ns, checkpoint_id
FORMAT = 4
"""The checkpoint format that carriers are written in: sends are channel values, not writes."""

_RENAMED = "00000000-0000-0000-0001-"


def merged_metadata(
    plan: RetentionPlan, metadata_of: Callable[[Key], Mapping[str, Any]]
) -> dict[Key, dict[str, Any]]:
    """Return the new metadata of every checkpoint that the plan folds something into."""
    merged: dict[Key, dict[str, Any]] = {}
    for fold in plan.fold:
        into = (fold.checkpoint_ns, fold.into)
        current = merged.get(into) or metadata_of(into)
        merged[into] = _folded(plan, fold, current, metadata_of)
    return merged


def _folded(
    plan: RetentionPlan,
    fold: Fold,
    current: Mapping[str, Any],
    metadata_of: Callable[[Key], Mapping[str, Any]],
) -> dict[str, Any]:
    dropped = metadata_of((fold.checkpoint_ns, fold.checkpoint_id))
    if fold.whole:
        return folds.folded_into(current, fold.into, dropped, fold.checkpoint_id)
    return folds.history_into(current, fold.into, dropped, plan.keep_runs)


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
    writes by task path, then by task id: the prefix sorts by age, ``~`` after every real path.
    Rows of the null task would be applied as the carrier's own state, and those of two sources
    would collide; they get ids that sort where the null task's did.
    """
    renamed = 0
    for number, source in enumerate(carry.sources):
        channels = tuple(c for c, sources in carry.writes.items() if source in sources)
        if not channels:
            continue
        for task_id in sorted(tasks_at(source, channels)):
            new_task_id = task_id
            if task_id == NULL_TASK_ID or task_id.startswith(_RENAMED):
                new_task_id = f"{_RENAMED}{renamed:012x}"
                renamed += 1
            yield Taken(source, channels, task_id, new_task_id, f"~~{number:010d}")


def ordered_by_task(rows: Iterable[Taken]) -> list[Taken]:
    """Rename tasks so that their ids alone sort by age, for tables without a task path."""
    return [replace(row, new_task_id=f"{_RENAMED}{n:012x}") for n, row in enumerate(rows)]
