"""Records become trees: kinds, heads, turns, ages, what waits, what delta channels need."""

from __future__ import annotations

import sys
from dataclasses import fields
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from langgraph.checkpoint.base.id import uuid6

from retaining_saver.entries import (
    BRANCH,
    CARRIER,
    ERROR,
    INTERRUPT,
    NO_WRITES,
    NULL_TASK_ID,
    OrphanWrites,
    StoredCheckpoint,
    ThreadRecords,
    Writes,
    fingerprint,
)
from retaining_saver.lineage import is_call, lineage, time_in, time_of
from tests.support.lineages import Namespace, namespaces, needs, turns
from tests.support.trees import Tree


def root(tree: Tree) -> Namespace:
    return namespaces(tree.thread())[""]


def grouped(tree: Tree) -> list[list[str]]:
    divided = turns(root(tree))
    names = dict.fromkeys(divided.of.values())
    return [[i for i in root(tree).real if divided.of[i] == name] for name in names]


def record(metadata: dict[str, Any], parent: dict[str, Any] | None = None) -> StoredCheckpoint:
    """Read one record from metadata, under the id that marks in this file name."""
    records = ThreadRecords("t", matches=lambda found: found.get("starred") is True)
    records.add(
        "",
        "me",
        "above",
        metadata=metadata,
        parent_metadata=lambda: parent,
        body={"v": 4, "channel_versions": {"__start__": "1", "a": "2"}},
        ts="2024-01-01T00:00:00+00:00",
        stored=["a"],
        snapshots=[],
        fingerprint=b"same",
    )
    return records.thread().checkpoints[0]


def test_a_record_takes_from_metadata_what_retention_looks_at() -> None:
    row = record(
        {
            "source": "loop",
            "step": 3,
            "run_id": "r",
            "parents": {"": "root"},
            "starred": True,
            "counters_since_delta_snapshot": {"d": [1, 2]},
            "retention": {"kind": "duration", "id": "me"},
        }
    )
    assert ("loop", 3, "r", "duration") == (row.source, row.step, row.run_id, row.claim)
    assert ("root", True, frozenset({"d"})) == (row.root_id, row.matches, row.counted)
    assert ("1", frozenset({"__start__", "a"})) == (row.start_version, row.versioned)
    assert datetime(2024, 1, 1, tzinfo=timezone.utc) == row.ts


MAP = {"run_durations": {"r1": 5}}
CLAIMS = [
    ({"retention": {"kind": "duration", "id": "another"}}, {}, None, False),
    ({"writes": {"runtime_run_duration": {"r1": 5}}}, {}, "legacy", False),
    ({"source": "update", **MAP}, {}, None, True),
    ({"source": "update", **MAP}, MAP, None, False),
    ({"source": "update", **MAP}, None, None, True),
    ({"source": "loop", **MAP}, {}, None, False),
    ({"source": "fork", **MAP}, {}, None, False),
    ({"source": "update"}, {}, None, False),
    (
        {
            "source": "update",
            **MAP,
            "retention": {"folded": {"id": "me", "entries": {"run_durations": ["r1"]}}},
        },
        {},
        None,
        False,
    ),
]


@pytest.mark.parametrize(("metadata", "parent", "claim", "annotates"), CLAIMS)
def test_what_a_record_claims(
    metadata: dict[str, Any], parent: dict[str, Any] | None, claim: str | None, annotates: bool
) -> None:
    row = record(metadata, parent)
    assert (claim, annotates) == (row.claim, row.annotates)


def test_the_parent_is_read_only_for_what_may_be_metadata_only() -> None:
    def unwanted() -> dict[str, Any]:
        raise AssertionError("The parent's metadata was read.")

    records = ThreadRecords("t")
    given: tuple[dict[str, Any], ...] = ({"source": "loop", **MAP}, {"source": "update"})
    for number, metadata in enumerate(given):
        records.add(
            "",
            f"c{number}",
            None,
            metadata=metadata,
            parent_metadata=unwanted,
            body={},
            ts=None,
            stored=(),
            snapshots=(),
            fingerprint=b"",
        )
    assert 2 == len(records.thread().checkpoints)


def test_a_record_stays_small_however_large_the_history_is() -> None:
    history = {f"run-{n}": n for n in range(5_000)}
    records = ThreadRecords("t")
    for number in range(100):
        records.add(
            "",
            f"1ef00000-0000-6000-8000-{number:012d}",
            None,
            metadata={"source": "loop", "run_durations": history},
            parent_metadata=lambda: None,
            body={"channel_versions": {f"channel-{n}": "1" for n in range(50)}},
            ts=datetime(2024, 1, 1, tzinfo=timezone.utc),
            stored=[f"channel-{n}" for n in range(50)],
            snapshots=[],
            fingerprint=b"0" * 16,
        )
    rows = records.thread().checkpoints
    shared = {id(getattr(rows[0], f.name)) for f in fields(StoredCheckpoint)}
    own = [getattr(rows[1], f.name) for f in fields(StoredCheckpoint)]
    size = sys.getsizeof(rows[1]) + sum(sys.getsizeof(v) for v in own if id(v) not in shared)
    assert size < 1024


def test_a_fingerprint_ignores_id_time_and_order_but_no_value() -> None:
    body = {"v": 4, "id": "a", "ts": "1", "channel_values": {"x": b"1", "y": [1, 2]}}
    same = {"channel_values": {"y": [1, 2], "x": b"1"}, "ts": "2", "id": "b", "v": 4}
    assert fingerprint(body) == fingerprint(same)
    for values in ({"x": b"1", "y": [12]}, {"x": "1", "y": [1, 2]}, {"x": b"1", "y": [True, 2]}):
        assert fingerprint(body) != fingerprint({**same, "channel_values": values})


def test_opaque_values_are_digested_only_as_bytes() -> None:
    value = complex(1, 2)
    with pytest.raises(TypeError, match="complex"):
        fingerprint({"x": value})
    assert fingerprint({"x": value}, repr_bytes) != fingerprint({"x": complex(2, 1)}, repr_bytes)


def repr_bytes(value: object) -> bytes:
    return repr(value).encode()


def test_writes_are_summarised() -> None:
    rows = [("a", "out"), ("a", INTERRUPT), ("b", ERROR), (NULL_TASK_ID, "x"), ("a", INTERRUPT)]
    channels = frozenset({"out", INTERRUPT, ERROR, "x"})
    assert Writes(5, channels, ("a",), ("b",), True) == Writes.of(rows)
    assert Writes.of([]) is NO_WRITES


def test_a_claim_counts_only_if_the_state_is_the_parents() -> None:
    tree = Tree()
    end = tree.turn()
    leaf = tree.leaf(end)
    liar = tree.leaf(end, fingerprint=b"other state")
    fork = tree.leaf(end, source="fork")
    assert {leaf} == root(tree).annotations
    assert fork == root(tree).head
    assert liar in root(tree).real


def test_leaves_on_leaves_are_annotations_of_the_same_checkpoint() -> None:
    tree = Tree()
    end = tree.turn()
    above = tree.leaf(tree.leaf(end))
    assert end == root(tree).base[above]
    assert end == root(tree).head


def test_the_head_is_the_newest_that_is_neither_annotation_nor_carrier() -> None:
    tree = Tree()
    first = tree.turn()
    second = tree.turn(first)
    tree.leaf(second)
    tree.add(second, claim=CARRIER)
    assert second == root(tree).head


def test_each_input_starts_a_turn() -> None:
    tree = Tree()
    tree.turn(tree.turn(steps=2), steps=1)
    assert [["c001", "c002", "c003"], ["c004", "c005"]] == grouped(tree)


def test_turns_that_were_stored_at_their_end_only_are_told_apart_by_their_start() -> None:
    tree = Tree()
    tree.exit_turn(tree.exit_turn())
    assert [["c001"], ["c002"], ["c003"]] == grouped(tree)


def test_a_resume_an_update_and_a_replay_belong_to_the_turn_they_continue() -> None:
    tree = Tree()
    asked = tree.turn()
    resumed = tree.step(asked)
    tree.add(resumed, source="update")
    tree.step(tree.add(asked, source="fork"))
    assert 1 == len(grouped(tree))


def test_a_turn_after_a_link_starts_where_it_would_without_it() -> None:
    tree = Tree()
    link = tree.leaf(tree.input())
    tree.step(link)
    assert [["c001", "c003"]] == grouped(tree)


def test_without_start_versions_or_inputs_turns_cannot_be_told_apart() -> None:
    tree = Tree()
    tree.add(tree.add())
    assert not turns(root(tree)).told_apart
    tree.add(None, source="input")
    assert turns(root(tree)).told_apart
    assert not turns(root(tree)).marked


WAITING = [
    ({}, False),
    ({"writes": Writes.of([("a", INTERRUPT)])}, True),
    ({"stored": frozenset({f"{BRANCH}a"})}, True),
    ({"stored": frozenset({"__pregel_tasks"})}, True),
    ({"stored": frozenset({"messages"})}, False),
    ({"stored": frozenset({f"{BRANCH}a"}), "writes": Writes.of([("a", ERROR)])}, False),
    ({"writes": Writes.of([("a", "out")])}, False),
]


@pytest.mark.parametrize(("facts", "waits"), WAITING)
@pytest.mark.parametrize("ns", ["", "call:1"])
def test_a_thread_waits_if_any_head_does(facts: dict[str, Any], waits: bool, ns: str) -> None:
    tree = Tree()
    first = tree.turn()
    head = tree.turn(first) if not ns else tree.add(None, ns, parents=(("", first),))
    tree.change(head, ns, **facts)
    tree.leaf(head, ns)
    assert waits is lineage(tree.thread()).waits()


def test_rows_of_a_checkpoint_with_a_child_are_not_in_flight() -> None:
    tree = Tree()
    tree.turn()
    assert not any(root(tree).in_flight(i) for i in root(tree).real)
    tree.wrote("c003")
    assert ["c003"] == [i for i in root(tree).real if root(tree).in_flight(i)]


def test_rows_on_a_leaf_are_in_flight_on_what_it_annotates() -> None:
    tree = Tree()
    end = tree.turn()
    tree.wrote(tree.leaf(tree.leaf(end)))
    assert root(tree).in_flight(end)


def test_an_annotation_is_no_activity_and_a_young_orphan_write_is() -> None:
    tree = Tree()
    tree.leaf(tree.turn())
    assert tree.rows["", "c003"].ts == lineage(tree.thread()).last_active()
    orphan = OrphanWrites("", str(uuid6()), 1)
    last = lineage(tree.thread([orphan])).last_active()
    assert last is not None
    assert abs(datetime.now(timezone.utc) - last) < timedelta(hours=1)


def test_what_has_no_time_counts_as_now() -> None:
    tree = Tree()
    tree.add(tree.turn(), ts=None)
    assert lineage(tree.thread()).last_active() is None


def test_the_time_is_the_one_in_the_id_where_none_is_stored() -> None:
    made = str(uuid6())
    inside = time_in(made)
    assert inside is not None
    assert abs(datetime.now(timezone.utc) - inside) < timedelta(minutes=1)
    assert inside == time_of(Tree().rows.setdefault(("", made), _bare(made)))
    assert time_in("c001") is None
    assert time_in(f"{made[:14]}4{made[15:]}") is None


def _bare(checkpoint_id: str) -> StoredCheckpoint:
    tree = Tree()
    return tree.rows["", tree.add(named=checkpoint_id, ts=None)]


def test_holes_and_cycles_are_problems() -> None:
    tree = Tree()
    tree.turn()
    tree.change("c001", parent_id="gone")
    tree.add("c003")
    tree.add(None, "sub", named="x", parents=())
    tree.change("x", "sub", parent_id="y")
    tree.add("x", "sub", named="y")
    assert (
        "Checkpoint c001 in the root namespace: its parent gone is not stored.",
        "Checkpoint x in namespace 'sub': its parents form a cycle.",
        "Checkpoint y in namespace 'sub': its parents form a cycle.",
    ) == lineage(tree.thread()).problems


def test_delta_channels_are_those_with_a_counter_or_a_snapshot() -> None:
    tree = Tree()
    tree.turn()
    tree.change("c001", counted=frozenset({"d"}))
    tree.change("c003", snapshots=frozenset({"e"}), versioned=frozenset({"x"}))
    assert {"d", "e"} == root(tree).delta_channels


def test_a_checkpoint_needs_what_it_or_a_kept_descendant_reads_above_it() -> None:
    tree = Tree()
    both = frozenset({"d", "e"})
    end = tree.turn(steps=3, versioned=both, counted=both)
    tree.change("c003", stored=frozenset({"d"}))
    tree.change(end, versioned=frozenset())
    needed = needs(root(tree), {"c001", "c003", "c004"})
    assert {"c004": set(), "c003": {"e"}, "c001": {"d", "e"}} == needed


def test_a_call_has_a_namespace_of_its_own() -> None:
    assert [False, True, True] == [is_call(ns) for ns in ("sub|inner", "sub:1", "sub:1|inner")]
