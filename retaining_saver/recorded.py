"""Who takes over what dropped checkpoints recorded about runs. Pure.

What an annotation added goes to the checkpoint that it annotates. Where that one goes as well,
run history moves along the branch: for the main line to the oldest checkpoint that stays of it,
for every other branch of which something stays to the first that stays below. A branch of which
nothing stays takes its history along.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from retaining_saver.branches import Choice
from retaining_saver.lineage import Lineage
from retaining_saver.planned import Entries, Fold
from retaining_saver.records import ROOT_NS
from retaining_saver.tree import Columns, Tree


@dataclass(slots=True)
class _Folds:
    """What is folded into what, by place."""

    folded: list[int] = field(default_factory=list)
    reason: list[str] = field(default_factory=list)
    into: list[int] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)

    def add(self, i: int, into: int, reason: str = "folded", *, whole: bool = False) -> None:
        self.folded.append(i)
        self.reason.append(reason)
        self.into.append(into)
        self.whole.append(whole)

    def entries(self, columns: Columns) -> Entries[Fold]:
        return Entries(
            Fold,
            [columns.rows[i].checkpoint_ns for i in self.folded],
            [columns.ids[i] for i in self.folded],
            self.reason,
            [columns.ids[i] for i in self.into],
            self.whole,
        )


def folds(lin: Lineage, choice: Choice, keep_runs: int) -> Entries[Fold]:
    """Find a place for what dropped checkpoints recorded, oldest first."""
    columns, keep = lin.columns, choice.keep
    recording = [i for i in columns.recording if choice.drop[i] and choice.drop[i] != "run"]
    bases = [columns.base[i] if columns.annotation[i] else i for i in recording]
    moved = {
        i: base
        for i, base in zip(recording, bases, strict=True)
        if base is not None and not keep[base] and columns.rows[i].has_history
    }
    # The line may be long, and often all that goes are annotations of what stays.
    root = lin.trees.get(ROOT_NS) if moved else None
    main = [] if root is None else list(root.line(root.head))
    on_main, oldest = set(main), next((i for i in reversed(main) if keep[i]), None)
    beside = {} if root is None else _heirs_beside(root, choice, main, oldest, moved, keep_runs)
    done = _Folds()
    for i, base in zip(recording, bases, strict=True):
        if base is not None and keep[base]:
            done.add(i, base, whole=True)
        elif i in moved:
            if base in on_main and oldest is not None:
                done.add(i, oldest)
            for heir in beside.get(i, ()):
                done.add(i, heir)
    _mark(columns, choice, done)
    return done.entries(columns)


def _mark(columns: Columns, choice: Choice, done: _Folds) -> None:
    """Mark the annotations that stay and that only their structure tells from state.

    That is what they record and their parents do not: once their parents take it over as well,
    from others that repeat it, nothing would tell it any more.
    """
    taking = set(done.into)
    for i in columns.recording if taking else ():
        parent = columns.parent[i]
        if not (choice.keep[i] and columns.annotation[i]) or parent is None:
            continue
        above: int | None = parent
        while above is not None and not choice.keep[above]:
            above = columns.parent[above]
        if above in taking and columns.rows[i].claim is None:
            done.add(parent, i, "marked")


def _heirs_beside(
    root: Tree,
    choice: Choice,
    main: list[int],
    oldest: int | None,
    moved: dict[int, int],
    keep_runs: int,
) -> dict[int, list[int]]:
    """Find what stays off the main line right below dropped checkpoints that recorded runs.

    What the oldest of the main line takes over is told on every branch below that one.
    """
    keep, on_main = choice.keep, set(main)
    beside = [i for i in root.real if keep[i] and i not in on_main]
    if not beside:
        return {}
    covered = set(main[: main.index(oldest)]) if oldest is not None else set[int]()
    recorded: dict[int, list[int]] = {}
    for i, of in moved.items():
        recorded.setdefault(of, []).append(i)
    above: dict[int, int | None] = {}
    for i in root.real:
        base = root.base[i]
        if base is None or keep[base] or base in covered:
            above[i] = None
        else:
            above[i] = base if base in recorded else above[base]
    heirs: dict[int, list[int]] = {}
    for i in beside:
        for each in _newest(above, recorded, i, keep_runs):
            heirs.setdefault(each, []).append(i)
    return heirs


def _newest(
    above: dict[int, int | None], recorded: dict[int, list[int]], i: int, keep_runs: int
) -> Iterator[int]:
    # Each records at least one run, and no more than the newest are to be remembered.
    found, at = 0, above[i]
    while at is not None and found < keep_runs:
        yield from recorded[at]
        found += len(recorded[at])
        at = above[at]
