"""Random trees under random policies: what survives reads what a small model says it must.

Two delta channels take their snapshots at different places; leaves, forks and pins are anywhere.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.serde.types import _DeltaSnapshot

from retaining_saver import CheckpointNotFoundError, Entry, RetentionPolicy
from tests.support.leaves import put_leaf
from tests.support.retained import RECORDED, Retained, is_carrier, key_of, lines, open_retained
from tests.support.savers import Saver, Where
from tests.support.threads import dangling, named

CHANNELS = ("often", "seldom")
NULL_TASK = "00000000-0000-0000-0000-000000000000"
HOUR = timedelta(hours=1)
Rows = dict[str, CheckpointTuple]


@dataclass(frozen=True)
class Step:
    """How one checkpoint comes about. ``up`` counts back from the newest to its parent.

    ``rows`` says how many rows each task writes into each channel from it; ``null`` lets the
    last of them belong to no task.
    """

    up: int
    kind: str
    rows: tuple[tuple[int, int], ...]
    null: bool
    snapshots: frozenset[str]


@dataclass
class Node:
    """What the model knows of a checkpoint: its values, and what was written from it."""

    parent: str | None
    reads: dict[str, list[str]]
    wrote: dict[str, list[str]] = field(default_factory=dict)
    kind: str = ""
    is_leaf: bool = False


steps = st.builds(
    Step,
    up=st.sampled_from([0, 0, 0, 0, 1, 2, 5]),
    kind=st.sampled_from(["input", "step", "step", "step", "leaf", "leaf", "update"]),
    rows=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=2).map(tuple),
    null=st.booleans(),
    snapshots=st.one_of(
        st.just(frozenset[str]()),
        st.just(frozenset[str]()),
        st.frozensets(st.sampled_from(CHANNELS)),
    ),
)
policies = st.one_of(
    st.none(),  # A prune.
    st.builds(
        RetentionPolicy,
        drop_annotations=st.booleans(),
        keep_last_turns=st.sampled_from([None, 1, 2]),
        keep_where=st.sampled_from([None, {"step": 2}]),
        drop_siblings_after=st.sampled_from([None, HOUR]),
        compact_supersteps=st.booleans(),
    ),
)


# Writers of their own may name one task at two checkpoints.
INPUT = Step(0, "input", (), null=False, snapshots=frozenset())
WRITES = Step(0, "input", ((0, 0), (0, 1)), null=False, snapshots=frozenset())
# A leaf on a leaf repeats what that one records.
LEAF = Step(0, "leaf", (), null=False, snapshots=frozenset())
LEAF_BELOW = Step(2, "leaf", (), null=False, snapshots=frozenset())


class Tree:
    """A thread that grows by the saver's own puts, as a graph's loop would make them.

    Everything that is written from a checkpoint is there before its first child.
    """

    def __init__(self, saver: Saver, thread_id: str) -> None:
        self.saver = saver
        self.thread_id = thread_id
        self.nodes: dict[str, Node] = {}
        self._facts: dict[str, tuple[dict[str, str], int]] = {}
        self._count = 0

    def grow(self, step: Step) -> None:
        ids = list(self.nodes)
        parent = ids[max(len(ids) - 1 - step.up, 0)] if ids else None
        if step.kind == "leaf" and parent is not None and not self.nodes[parent].wrote:
            made = self._leaf(parent)
        else:
            made = self.put(parent, step.kind, step.snapshots)
        self._write(made, step)

    def _leaf(self, parent: str) -> str:
        at = named(self.thread_id, parent)
        _, made = put_leaf(self.saver, self.thread_id, run_id=f"run-{len(self.nodes)}", at=at)
        self.nodes[made] = Node(parent, self.nodes[parent].reads, is_leaf=True)
        self._facts[made] = self._facts[parent]
        return made

    def put(self, parent: str | None, kind: str, snapshots: frozenset[str] = frozenset()) -> str:
        """Put a checkpoint that has taken in what was written from its parent."""
        above = self.nodes[parent] if parent is not None else Node(None, {})
        versions, number = self._facts[parent] if parent is not None else ({}, -2)
        reads = {c: above.reads.get(c, []) + above.wrote.get(c, []) for c in CHANNELS}
        values: dict[str, Any] = {c: _DeltaSnapshot(reads[c]) for c in snapshots}
        starts = kind == "input" or (parent is not None and above.kind == "input")
        if kind == "input":
            values["__start__"] = "said"
        changed = {*snapshots, *above.wrote, *(["__start__"] if starts else ())}
        new_versions: Any = {channel: self._next() for channel in sorted(changed)}
        made = str(uuid6())
        checkpoint: Any = {
            "v": 4,
            "id": made,
            "ts": "2024-01-01T00:00:00+00:00",
            "channel_values": values,
            "channel_versions": {**versions, **new_versions},
            "versions_seen": {"node": {"often": self._next()}},
            "updated_channels": None,
        }
        metadata: Any = {
            "source": {"input": "input", "update": "update"}.get(kind, "loop"),
            "step": number + 1,
            "parents": {},
            "counters_since_delta_snapshot": {c: [1, 1] for c in CHANNELS if c not in snapshots},
        }
        config: Any = named(self.thread_id, checkpoint_ns="")
        if parent is not None:
            config["configurable"]["checkpoint_id"] = parent
        self.saver.put(config, checkpoint, metadata, new_versions)
        self.nodes[made] = Node(parent, reads, kind=kind)
        self._facts[made] = (checkpoint["channel_versions"], number + 1)
        return made

    def _write(self, made: str, step: Step) -> None:
        wrote: dict[str, list[str]] = {}
        for task, counts in enumerate(step.rows):
            writes = [
                (channel, [f"{len(self.nodes)}.{task}.{n}"])
                for channel, count in zip(CHANNELS, counts, strict=True)
                for n in range(count)
            ]
            if writes:
                # Readers order rows by path, or where none is stored by task; both are equal here.
                null = step.null and task == 0
                task_id = NULL_TASK if null else f"{task + 1:08x}-0000-0000-0000-000000000000"
                path = "" if null else f"~{task}"
                self.saver.put_writes(named(self.thread_id, made), writes, task_id, path)
            for channel, value in writes:
                wrote.setdefault(channel, []).extend(value)
        self.nodes[made].wrote = wrote

    def _next(self) -> str:
        self._count += 1
        return f"{self._count:032}.0"

    def head(self) -> str:
        return max(i for i, node in self.nodes.items() if not node.is_leaf)

    def expected(self) -> dict[str, dict[str, list[str]]]:
        return {i: node.reads for i, node in self.nodes.items()}


def _reads(saver: Saver, thread_id: str, i: str) -> dict[str, list[str]]:
    found = saver.get_tuple(named(thread_id, i))
    assert found is not None
    values, versions = found.checkpoint["channel_values"], found.checkpoint["channel_versions"]
    missing = [c for c in CHANNELS if c in versions and c not in values]
    histories = saver.get_delta_channel_history(config=found.config, channels=missing)
    read = {c: _plain(values[c]) for c in CHANNELS if c in values}
    for channel, history in histories.items():
        read[channel] = [
            *_plain(history.get("seed", [])),
            *(text for _, _, value in history["writes"] for text in value),
        ]
    return {c: read.get(c, []) for c in CHANNELS}


def _plain(value: Any) -> list[str]:
    return list(value.value) if isinstance(value, _DeltaSnapshot) else list(value)


def _check(
    thread: Retained, grown: list[Step], policy: RetentionPolicy | None, pins: list[int]
) -> None:
    tree = Tree(thread.bare, thread.thread_id)
    for step in grown:
        tree.grow(step)
    ids = list(tree.nodes)
    ours, thread_id = thread.ours, thread.thread_id
    before = _stored(thread)
    for saver in (thread.bare, ours):
        assert tree.expected() == {i: _reads(saver, thread_id, i) for i in ids}
    pinned = {ids[n % len(ids)] for n in pins}
    for i in pinned:
        ours.pin(named(thread_id, i), ttl=None)
    kept = _retained(thread, policy, tree, before)
    assert pinned | {tree.head()} <= set(kept) <= set(ids)
    for i in pinned:
        ours.unpin(named(thread_id, i))
    kept_then = _retained(thread, policy, tree, before)
    assert {tree.head()} <= set(kept_then) <= set(kept)
    _check_children(thread, tree, kept_then)


def _retained(
    thread: Retained, policy: RetentionPolicy | None, tree: Tree, before: Rows
) -> list[str]:
    """Retain the thread, twice; check what is left of it, and return its ids."""
    ours, thread_id = thread.ours, thread.thread_id
    _retain(thread, policy)
    once = thread.dump()
    assert not _retain(thread, policy)
    assert once == thread.dump()
    rows = _stored(thread)
    assert [] == dangling(rows.values())
    assert (set(), set()) == asyncio.run(thread.orphans())
    kept = [i for i, row in rows.items() if not is_carrier(row)]
    assert sorted(kept) == sorted(key_of(f)[1] for f in ours.list(named(thread_id)))
    expected = {i: tree.nodes[i].reads for i in kept}
    for saver in (thread.bare, ours):
        assert expected == {i: _reads(saver, thread_id, i) for i in kept}
        for i in kept:
            _check_content(before[i], saver.get_tuple(named(thread_id, i)))
    # The line of each goes over all that stayed of its line before.
    walked, lines_before = lines(rows.values()), lines(before.values())
    for i in kept:
        line = [above for above in walked["", i] if above in kept]
        assert [above for above in lines_before["", i] if above in kept] == line
    for i in rows.keys() - set(kept):
        with pytest.raises(CheckpointNotFoundError):
            ours.get_tuple(named(thread_id, i))
    return kept


def _check_children(thread: Retained, tree: Tree, kept: list[str]) -> None:
    """Check that what was written from those that stay is there for their next children.

    One that took over a leaf's rows is left out: LangGraph stores a snapshot in whatever starts
    there again.
    """
    rows = _stored(thread)
    for i in kept:
        wrote = sum(map(len, tree.nodes[i].wrote.values()))
        if wrote == len(rows[i].pending_writes or ()) and not tree.nodes[i].is_leaf:
            child = tree.put(i, "step")
            assert tree.nodes[child].reads == _reads(thread.ours, thread.thread_id, child)


def _stored(thread: Retained) -> Rows:
    return {key_of(f)[1]: f for f in thread.bare.list(named(thread.thread_id))}


def _check_content(before: CheckpointTuple, after: CheckpointTuple | None) -> None:
    """Check that a checkpoint is as it was, but for what was folded and a leaf's rows."""
    assert after is not None
    assert before.checkpoint == after.checkpoint
    assert _unfolded(before) == _unfolded(after)
    assert not before.pending_writes or before.pending_writes == after.pending_writes


def _unfolded(found: CheckpointTuple) -> dict[str, Any]:
    return {k: v for k, v in found.metadata.items() if k not in RECORDED}


def _retain(thread: Retained, policy: RetentionPolicy | None) -> tuple[Entry, ...]:
    """Retain the thread; return what a policy dropped."""
    ours, thread_id = thread.ours, thread.thread_id
    if policy is None:
        ours.prune([thread_id])
        return ()
    dry = ours.enforce_thread_retention(thread_id, policy, dry_run=True)
    real = ours.enforce_thread_retention(thread_id, policy)
    assert (dry.before, dry.after, dry.dropped) == (real.before, real.after, real.dropped)
    assert () == real.problems
    return real.dropped


@pytest.mark.parametrize(("kind", "examples"), [("memory", 150), ("sqlite", 50), ("pg", 30)])
async def test_whatever_survives_of_a_random_tree_reads_as_the_model_says(
    kind: str, examples: int, where: Where, thread_id: str
) -> None:
    async with open_retained(kind, where, thread_id, lambda saver: None) as opened:

        @settings(
            max_examples=examples,
            deadline=None,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow],
        )
        @given(
            grown=st.lists(steps, min_size=1, max_size=14),
            policy=policies,
            pins=st.lists(st.integers(0, 13), max_size=2),
        )
        @example(grown=[INPUT, WRITES, WRITES, INPUT], policy=None, pins=[])
        @example(grown=[INPUT, LEAF, INPUT, INPUT, LEAF_BELOW], policy=None, pins=[1])
        def search(grown: list[Step], policy: RetentionPolicy | None, pins: list[int]) -> None:
            _check(opened.named(str(uuid.uuid4())), grown, policy, pins)

        await asyncio.to_thread(search)
