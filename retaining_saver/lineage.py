"""What a thread's records say of the thread as a whole: its namespaces, ages, what waits. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

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
