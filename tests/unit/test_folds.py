"""What a leaf recorded survives the leaf, whatever order leaves are folded in."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retaining_saver.folds import (
    MARK,
    RECLAIMED_KEPT,
    added_names,
    adds_history,
    folded_into,
    has_legacy_marker,
    history_of,
    is_whole,
    kind_of,
    leaf_metadata,
    merged_history,
    reclaimed_ids,
    tagged,
)

Data = dict[str, Any]

PARENT: Data = {
    "source": "loop",
    "step": 3,
    "parents": {},
    "run_id": "run-1",
    "run_durations": {"run-0": 4},
    "title": "old",
}


def leaf_on(parent: Data, **added: Any) -> Data:
    """Copy a head's metadata as applications do, and add entries to it."""
    metadata = {**deepcopy(parent), "source": "update", "step": parent.get("step", 0) + 1}
    for key, value in added.items():
        if isinstance(value, dict):
            metadata[key] = {**metadata.get(key, {}), **value}
        else:
            metadata[key] = value
    return metadata


def tagged_leaf(parent: Data, leaf_id: str, **added: Any) -> Data:
    return tagged(leaf_on(parent, **added), leaf_id, "duration", parent)


def names_in(names: dict[str, list[str] | None]) -> dict[str, set[str] | None]:
    return {key: None if value is None else set(value) for key, value in names.items()}


# The mark


def test_a_mark_names_the_kind_of_its_own_checkpoint() -> None:
    leaf = tagged_leaf(PARENT, "L", run_durations={"run-1": 2})
    assert "duration" == kind_of("L", leaf)
    assert {"kind": "duration", "id": "L", "added": {"run_durations": ["run-1"]}} == leaf[MARK]


def test_a_mark_that_was_copied_from_another_checkpoint_says_nothing() -> None:
    leaf = tagged_leaf(PARENT, "L", run_durations={"run-1": 2})
    assert kind_of("M", leaf) is None
    assert kind_of("M", PARENT) is None


def test_tagging_replaces_a_mark_that_came_along() -> None:
    folded = folded_into(PARENT, "P", tagged_leaf(PARENT, "L", title="new"), "L")
    again = tagged_leaf(folded, "M", run_durations={"run-2": 1})
    assert {"kind": "duration", "id": "M", "added": {"run_durations": ["run-2"]}} == again[MARK]


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"writes": {"runtime_run_duration": {"run-1": 2}}}, True),
        ({"writes": {"runtime_run_duration": None}}, True),
        ({"writes": {"agent": {}}}, False),
        ({"writes": None}, False),
        ({}, False),
    ],
)
def test_the_older_marker_is_a_write_of_its_own(metadata: Data, expected: bool) -> None:
    assert expected == has_legacy_marker(metadata)


# What a checkpoint adds


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ({}, {}),
        ({"run_durations": {"run-1": 2}}, {"run_durations": ["run-1"]}),
        ({"run_durations": {"run-0": 4}}, {}),
        ({"run_durations": {"run-0": 5}}, {"run_durations": ["run-0"]}),
        ({"run_message_ids": {"m": "run-1"}}, {"run_message_ids": ["m"]}),
        ({"title": "new", "tags": ["x"]}, {"title": None, "tags": None}),
        ({"title": "old"}, {}),
        ({"extra": {}}, {"extra": []}),
        ({"source": "fork", "step": 99, "run_id": "other", "parents": {"": "x"}}, {}),
        ({"writes": {"x": 1}, "counters_since_delta_snapshot": {"c": [1, 2]}, MARK: {}}, {}),
    ],
)
def test_added_names_are_of_entries_that_the_parent_lacks(added: Data, expected: Data) -> None:
    assert expected == added_names(leaf_on(PARENT, **added), PARENT)


def test_a_mapping_in_place_of_a_plain_value_is_added() -> None:
    assert {"title": ["en"]} == added_names({"title": {"en": "x"}}, PARENT)


# Recognition by structure


def test_a_copy_with_a_new_run_adds_history() -> None:
    assert adds_history("L", leaf_on(PARENT, run_durations={"run-1": 2}), PARENT)
    assert adds_history("L", leaf_on(PARENT, run_message_ids={"m": None}), PARENT)
    assert adds_history("L", leaf_on(PARENT, run_durations={"run-0": 9}), PARENT)


def test_a_copy_without_a_new_run_adds_none() -> None:
    assert not adds_history("L", leaf_on(PARENT), PARENT)
    assert not adds_history("L", leaf_on(PARENT, title="new"), PARENT)


def test_without_a_parent_any_run_counts() -> None:
    assert adds_history("L", leaf_on(PARENT))
    assert not adds_history("L", {"source": "update", "run_durations": {}})


@pytest.mark.parametrize("tag", [True, False])
def test_a_checkpoint_that_was_folded_into_is_not_taken_for_a_leaf(tag: bool) -> None:
    # An update that changed nothing: it was given to a caller and must stay.
    update = leaf_on(PARENT)
    leaf = leaf_on(update, run_durations={"run-1": 2}, run_message_ids={"m": "run-1"})
    if tag:
        leaf = tagged(leaf, "L", "duration", update)
    folded = folded_into(update, "U", leaf, "L")
    assert {"run-0": 4, "run-1": 2} == folded["run_durations"]
    assert not adds_history("U", folded, PARENT)
    assert kind_of("U", folded) is None


def test_legacy_entries_that_were_folded_in_do_not_make_a_leaf() -> None:
    update = leaf_on(PARENT)
    leaf = {**leaf_on(update), "writes": {"runtime_run_duration": {"run-1": 2}}}
    assert not adds_history("U", folded_into(update, "U", leaf, "L"), PARENT)


def test_a_leaf_that_was_folded_into_is_still_one() -> None:
    leaf = leaf_on(PARENT, run_durations={"run-1": 2})
    folded = folded_into(leaf, "L", leaf_on(leaf, run_durations={"run-2": 3}), "M")
    assert adds_history("L", folded, PARENT)


def test_a_copied_fold_mark_hides_no_new_run() -> None:
    folded = folded_into(PARENT, "P", tagged_leaf(PARENT, "L", run_durations={"run-1": 2}), "L")
    copied = leaf_on(folded, run_durations={"run-1": 2})
    assert not adds_history("M", copied, folded)
    assert adds_history("M", copied, PARENT)


# Writing leaves


def test_a_leaf_of_ours_adds_entries_and_carries_the_whole_history() -> None:
    head = {**PARENT, "writes": {"x": 1}, "counters_since_delta_snapshot": {"c": [1, 2]}}
    leaf = leaf_metadata(
        head,
        "L",
        "duration",
        {"run_durations": {"run-1": 2}, "title": "new"},
        {"run_durations": {"run-a": 1}, "run_message_ids": {"m": "run-a"}},
    )
    assert {
        "source": "update",
        "step": 3,
        "parents": {},
        "run_id": "run-1",
        "counters_since_delta_snapshot": {"c": [1, 2]},
        "run_durations": {"run-0": 4, "run-a": 1, "run-1": 2},
        "run_message_ids": {"m": "run-a"},
        "title": "new",
        MARK: {
            "kind": "duration",
            "id": "L",
            "added": {"run_durations": ["run-1"], "title": None},
            "whole": True,
        },
    } == leaf
    assert is_whole("L", leaf)
    assert not is_whole("M", leaf)


def test_only_what_a_whole_leaf_added_is_folded() -> None:
    history = {"run_durations": {"run-a": 1}}
    leaf = leaf_metadata(PARENT, "L", "duration", {"run_durations": {"run-1": 2}}, history)
    assert {"run-0": 4, "run-1": 2} == folded_into(PARENT, "P", leaf, "L")["run_durations"]


def test_a_checkpoint_without_the_claim_is_not_whole() -> None:
    assert not is_whole("L", tagged_leaf(PARENT, "L", run_durations={"run-1": 2}))
    assert not is_whole("P", PARENT)


# Older payloads


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ({"run_id": "run-1", "duration": 2}, {"run-1": 2}),
        ({"run-1": 2, "run-2": 3.5}, {"run-1": 2, "run-2": 3.5}),
        ({"run_id": "run-1"}, {}),
        ({"run-1": "long"}, {}),
        (None, {}),
        ("2 s", {}),
    ],
)
def test_older_payloads_are_read_and_folded(payload: Any, expected: Data) -> None:
    leaf = {**leaf_on(PARENT), "writes": {"runtime_run_duration": payload}}
    folded = folded_into(PARENT, "P", leaf, "L")
    assert {"run-0": 4, **expected} == history_of(leaf)[0] == folded["run_durations"]
    assert "writes" not in folded


def test_a_duration_that_is_recorded_twice_is_the_recorded_one() -> None:
    leaf = {
        **leaf_on(PARENT, run_durations={"run-1": 2}),
        "writes": {"runtime_run_duration": {"run_id": "run-1", "duration": 9}},
    }
    assert 2 == history_of(leaf)[0]["run-1"]
    assert 2 == folded_into(PARENT, "P", leaf, "L")["run_durations"]["run-1"]


def test_history_is_read_from_what_is_there() -> None:
    assert ({}, {}) == history_of({"run_durations": None, "run_message_ids": 3})
    assert ({"r": 1}, {"m": None}) == history_of(
        {"run_durations": {"r": 1}, "run_message_ids": {"m": None}}
    )


# Folding


def test_folding_moves_what_the_leaf_added_and_nothing_that_is_the_leafs_own() -> None:
    leaf = tagged_leaf(PARENT, "L", run_durations={"run-1": 2}, title="new", tags=["x"])
    assert {
        **PARENT,
        "run_durations": {"run-0": 4, "run-1": 2},
        "title": "new",
        "tags": ["x"],
        MARK: {
            "folded": {
                "id": "P",
                "entries": {"run_durations": ["run-1"], "title": None, "tags": None},
            },
            "reclaimed": ["L"],
        },
    } == folded_into(PARENT, "P", leaf, "L")


def test_entries_without_a_checkpoint_are_folded_and_no_id_is_remembered() -> None:
    folded = folded_into(PARENT, "P", {"run_durations": {"run-1": 2}}, None)
    assert {"run-0": 4, "run-1": 2} == folded["run_durations"]
    assert [] == reclaimed_ids("P", folded)
    assert not adds_history("P", folded, {**PARENT, "run_durations": {"run-0": 4}})


def test_a_tagged_leaf_does_not_undo_what_its_parent_was_given_meanwhile() -> None:
    one = tagged_leaf(PARENT, "L1", title="new")
    other = tagged_leaf(PARENT, "L2", run_durations={"run-1": 2})
    assert "old" == other["title"]
    folded = folded_into(folded_into(PARENT, "P", one, "L1"), "P", other, "L2")
    assert "new" == folded["title"]


def test_a_claim_to_have_added_what_is_a_checkpoints_own_is_ignored() -> None:
    leaf = leaf_on(PARENT, run_id="other")
    leaf[MARK] = {"id": "L", "kind": "duration", "added": {"run_id": None, "source": None}}
    folded = folded_into(PARENT, "P", leaf, "L")
    assert ("run-1", "loop") == (folded["run_id"], folded["source"])


def test_a_claim_to_have_added_what_is_not_there_is_ignored() -> None:
    leaf = tagged_leaf(PARENT, "L", run_durations={"run-1": 2})
    leaf[MARK]["added"] = {"run_durations": ["run-1", "gone"], "nothing": None}
    folded = folded_into(PARENT, "P", leaf, "L")
    assert {"run-0": 4, "run-1": 2} == folded["run_durations"]
    assert "nothing" not in folded


def test_a_copied_mark_is_not_taken_for_what_a_leaf_added() -> None:
    first = tagged_leaf(PARENT, "L1", run_durations={"run-1": 2})
    parent = folded_into(PARENT, "P", first, "L1")
    # A writer copied L1's metadata, mark included.
    copied = leaf_on(first, run_durations={"run-2": 3})
    folded = folded_into(parent, "P", copied, "L2")
    assert {"run-0": 4, "run-1": 2, "run-2": 3} == folded["run_durations"]
    assert ["L1", "L2"] == reclaimed_ids("P", folded)


def test_a_mark_that_was_copied_onto_the_parent_is_dropped_by_the_fold() -> None:
    parent = leaf_metadata(PARENT, "other", "duration", {"title": "new"}, {})
    folded = folded_into(parent, "P", tagged_leaf(parent, "L", tags=["x"]), "L")
    assert {
        "folded": {"id": "P", "entries": {"tags": None}},
        "reclaimed": ["L"],
    } == folded[MARK]


def test_reclaimed_ids_that_were_copied_are_another_checkpoints() -> None:
    folded = folded_into(PARENT, "P", tagged_leaf(PARENT, "L", title="new"), "L")
    assert ["L"] == reclaimed_ids("P", folded)
    assert [] == reclaimed_ids("M", leaf_on(folded))
    assert [] == reclaimed_ids("P", PARENT)


def test_the_newest_reclaimed_ids_are_remembered() -> None:
    parent: Data = PARENT
    for number in range(RECLAIMED_KEPT + 3):
        leaf = tagged_leaf(parent, f"L{number}", run_durations={f"run-{number}": number})
        parent = folded_into(parent, "P", leaf, f"L{number}")
    expected = [f"L{number}" for number in range(3, RECLAIMED_KEPT + 3)]
    assert expected == reclaimed_ids("P", parent)
    assert RECLAIMED_KEPT + 3 == len(parent["run_durations"])


def test_a_leaf_whose_mark_cannot_be_read_loses_nothing_when_it_is_folded_into() -> None:
    leaf = tagged_leaf(PARENT, "L1", run_durations={"run-1": 2})
    leaf[MARK]["added"] = "unreadable"
    above = tagged_leaf(leaf, "L2", run_durations={"run-2": 3})
    folded = folded_into(PARENT, "P", folded_into(leaf, "L1", above, "L2"), "L1")
    assert {"run-0": 4, "run-1": 2, "run-2": 3} == folded["run_durations"]


# Properties

# A busy machine is no defect.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

RUNS = [f"run-{n}" for n in range(6)]
MESSAGES = [f"m-{n}" for n in range(6)]


def recorded(runs: list[str], messages: list[str]) -> st.SearchStrategy[Data]:
    return st.fixed_dictionaries(
        {},
        optional={
            "run_durations": st.dictionaries(st.sampled_from(runs), st.integers(0, 9), min_size=1),
            "run_message_ids": st.dictionaries(
                st.sampled_from(messages), st.sampled_from([*runs, None]), min_size=1
            ),
            "title": st.just("new"),
        },
    )


parents = st.builds(
    lambda history, mark: {**PARENT, **history, **mark},
    recorded(RUNS[:2], MESSAGES[:2]),
    st.sampled_from(
        [
            {},
            {MARK: {"kind": "duration", "id": "copied", "added": {"title": None}}},
            {MARK: {"folded": {"id": "copied", "entries": {"run_durations": ["run-2"]}}}},
            {MARK: {"folded": {"id": "P", "entries": {"run_durations": ["run-0"]}}}},
            {MARK: {"reclaimed": ["L0"], "folded": {"id": "P", "entries": {}}}},
        ]
    ),
)
ones = recorded(RUNS[2:4], MESSAGES[2:4])
others = recorded(RUNS[4:], MESSAGES[4:])
makers = st.sampled_from(
    [
        tagged_leaf,
        lambda parent, leaf_id, **added: leaf_on(parent, **added),
        lambda parent, leaf_id, **added: leaf_metadata(parent, leaf_id, "duration", added, {}),
    ]
)
Maker = Callable[..., Data]


def everything(metadata: Data) -> Data:
    """Everything that is recorded, without the mark."""
    return {key: value for key, value in metadata.items() if key != MARK}


@unhurried
@given(parent=parents, one=ones, other=others, make_one=makers, make_other=makers)
def test_two_leaves_fold_to_the_same_in_either_order(
    parent: Data, one: Data, other: Data, make_one: Maker, make_other: Maker
) -> None:
    leaf, sibling = make_one(parent, "L1", **one), make_other(parent, "L2", **other)
    # An unmarked copy cannot tell an old title from one that it took back.
    leaf["title"] = sibling["title"] = "the same"
    first = folded_into(folded_into(parent, "P", leaf, "L1"), "P", sibling, "L2")
    second = folded_into(folded_into(parent, "P", sibling, "L2"), "P", leaf, "L1")
    assert everything(first) == everything(second)
    assert names_in(first[MARK]["folded"]["entries"]) == names_in(second[MARK]["folded"]["entries"])
    assert set(reclaimed_ids("P", first)) == set(reclaimed_ids("P", second))
    assert {"L1", "L2"} <= set(reclaimed_ids("P", first))
    for key in ("run_durations", "run_message_ids"):
        told = {**parent.get(key, {}), **one.get(key, {}), **other.get(key, {})}
        assert told == first.get(key, {})


@unhurried
@given(parent=parents, one=ones, make=makers)
def test_folding_twice_is_folding_once(parent: Data, one: Data, make: Maker) -> None:
    leaf = make(parent, "L", **one)
    folded = folded_into(parent, "P", leaf, "L")
    assert folded == folded_into(folded, "P", leaf, "L")


@unhurried
@given(parent=parents, one=ones, other=others, make_one=makers, make_other=makers)
def test_a_chain_of_leaves_loses_nothing_from_either_end(
    parent: Data, one: Data, other: Data, make_one: Maker, make_other: Maker
) -> None:
    leaf = make_one(parent, "L1", **one)
    above = make_other(leaf, "L2", **other)
    # From the head down: the upper leaf into the lower one, then that into the parent.
    down = folded_into(parent, "P", folded_into(leaf, "L1", above, "L2"), "L1")
    # As a link: the lower leaf goes first, and the upper one is left on the parent.
    up = folded_into(folded_into(parent, "P", leaf, "L1"), "P", above, "L2")
    for key in ("run_durations", "run_message_ids"):
        told = {**parent.get(key, {}), **one.get(key, {}), **other.get(key, {})}
        assert told == down.get(key, {}) == up.get(key, {})
    assert everything(down) == everything(up)
    assert {"L1", "L2"} <= set(reclaimed_ids("P", down))
    assert {"L1", "L2"} <= set(reclaimed_ids("P", up))


@unhurried
@given(parent=parents, one=ones, make=makers)
def test_folding_changes_neither_argument(parent: Data, one: Data, make: Maker) -> None:
    leaf = make(parent, "L", **one)
    before = deepcopy((parent, leaf))
    folded_into(parent, "P", leaf, "L")
    folded_into(leaf, "L", parent, "P")
    assert before == (parent, leaf)


@unhurried
@given(grandparent=parents, one=ones, other=others, make_one=makers, make_other=makers)
def test_folds_never_make_a_leaf_of_an_update_that_changed_nothing(
    grandparent: Data, one: Data, other: Data, make_one: Maker, make_other: Maker
) -> None:
    update = leaf_on(grandparent)
    update = folded_into(update, "U", make_one(update, "L1", **one), "L1")
    update = folded_into(update, "U", make_other(update, "L2", **other), "L2")
    assert kind_of("U", update) is None
    assert not adds_history("U", update, grandparent)


words = st.sampled_from(["", "id", "P", "L", "run-1"])
plain_values = st.none() | st.booleans() | st.integers(-1, 1) | words
flat_values = st.lists(plain_values, max_size=2) | st.dictionaries(words, plain_values, max_size=2)
json_values = (
    plain_values
    | flat_values
    | st.lists(flat_values, max_size=2)
    | st.dictionaries(words, flat_values, max_size=2)
)
keys = st.sampled_from(["run_durations", "title", "source"])
marks = json_values | st.fixed_dictionaries(
    {},
    optional={
        "kind": json_values,
        "id": st.sampled_from(["P", "L", "X"]),
        "added": json_values | st.dictionaries(keys, json_values),
        "whole": json_values,
        "folded": st.fixed_dictionaries(
            {"id": st.sampled_from(["P", "L"])},
            optional={"entries": json_values | st.dictionaries(keys, json_values)},
        ),
        "reclaimed": json_values,
    },
)
mangled = st.fixed_dictionaries(
    {},
    optional={
        "run_durations": json_values,
        "run_message_ids": json_values,
        "title": json_values,
        "writes": json_values | st.fixed_dictionaries({"runtime_run_duration": json_values}),
        MARK: marks,
    },
)


@unhurried
@given(parent=mangled, leaf=mangled)
def test_metadata_that_anybody_may_have_written_is_read_without_an_error(
    parent: Data, leaf: Data
) -> None:
    before = deepcopy((parent, leaf))
    folded = folded_into(parent, "P", leaf, "L")
    assert before == (parent, leaf)
    assert "L" in reclaimed_ids("P", folded)
    tagged_again = tagged(folded, "M", "duration", parent)
    assert "duration" == kind_of("M", tagged_again)
    for reader in (has_legacy_marker, history_of):
        reader(folded)
    for judge in (kind_of, is_whole, adds_history, reclaimed_ids):
        judge("P", folded)
        judge("L", leaf)


def test_a_merged_history_has_the_runs_of_older_checkpoints_first_and_the_newest_word() -> None:
    newest = {"run_durations": {"c": 3, "a": 9}, "run_message_ids": {"m2": "c"}}
    oldest = {"run_durations": {"a": 1, "b": 2}, "run_message_ids": {"m1": "a"}}
    durations, messages = merged_history([newest, oldest])
    assert [("a", 9), ("b", 2), ("c", 3)] == list(durations.items())
    assert [("m1", "a"), ("m2", "c")] == list(messages.items())
