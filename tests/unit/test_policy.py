"""A policy is checked before anything is read, and says itself in a sentence."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import pytest

from retaining_saver.errors import PolicyError
from retaining_saver.policy import RetentionPolicy

DAY = timedelta(days=1)

SENTENCES = [
    ({}, "Remove metadata-only checkpoints; keep every turn."),
    ({"drop_annotations": False}, "Leave metadata-only checkpoints; keep every turn."),
    ({"keep_last_turns": 1}, "Remove metadata-only checkpoints; keep the newest turn."),
    (
        {"keep_last_turns": 20, "keep_within": 7 * DAY, "keep_where": {"starred": True}},
        (
            "Remove metadata-only checkpoints; keep the newest 20 turns, turns younger than 7 days "
            "and turns whose metadata contains {'starred': True}."
        ),
    ),
    (
        {"drop_siblings_after": timedelta(hours=1, minutes=30), "compact_supersteps": True},
        (
            "Remove metadata-only checkpoints; keep every turn; drop branches off the main line "
            "after 1 hour 30 minutes; of turns older than the newest keep only the checkpoint at "
            "rest."
        ),
    ),
    (
        {"keep_last_turns": 0, "delete_idle_after": 30 * DAY},
        (
            "Remove metadata-only checkpoints; keep nothing but the newest checkpoints; delete the "
            "whole thread after 30 days without activity, unless it waits for an answer."
        ),
    ),
    (
        {"delete_idle_after": timedelta(microseconds=1), "delete_waiting": True},
        (
            "Remove metadata-only checkpoints; keep every turn; delete the whole thread after "
            "1 microsecond without activity, even if it waits for an answer."
        ),
    ),
]

REFUSED = [
    ({"keep_last_turns": -1}, "keep_last_turns cannot be negative (-1); use None for no limit."),
    ({"keep_within": timedelta(0)}, "keep_within has to be longer than nothing"),
    ({"drop_siblings_after": -DAY}, "drop_siblings_after has to be longer than nothing"),
    ({"delete_idle_after": timedelta(0)}, "delete_idle_after has to be longer than nothing"),
    ({"keep_where": {}}, "keep_where is empty and would match every checkpoint"),
    ({"keep_last_turns": 0}, "set delete_idle_after as well, or keep at least 1 turn."),
    (
        {"keep_within": 2 * DAY, "delete_idle_after": DAY},
        "delete_idle_after (1 day) would delete turns that keep_within (2 days) promises to keep",
    ),
]

OF_ANOTHER_TYPE = [
    {"keep_last_turns": True},
    {"keep_last_turns": "5"},
    {"keep_last_turns": 1.0},
    {"keep_within": 7},
    {"drop_siblings_after": "7d"},
    {"delete_idle_after": True},
    {"keep_where": ["starred"]},
    {"keep_where": {1: 2}},
    {"drop_annotations": 1},
    {"compact_supersteps": None},
    {"delete_waiting": "yes"},
]

MATCHES = [
    ({"a": 1}, {"a": 1, "b": 2}, True),
    ({"a": 1}, {"b": 2}, False),
    ({"a": 1}, {"a": True}, False),
    ({"a": None}, {}, False),
    ({"a": None}, {"a": None}, True),
    ({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}}, True),
    ({"a": {"b": 1}}, {"a": 1}, False),
    ({"a": [1]}, {"a": [1, 2]}, False),
    ({"a": 1, "b": 2}, {"a": 1}, False),
]


@pytest.mark.parametrize(("fields", "sentence"), SENTENCES)
def test_a_policy_says_itself(fields: dict[str, Any], sentence: str) -> None:
    assert sentence == str(RetentionPolicy(**fields))


@pytest.mark.parametrize(("fields", "sentence"), REFUSED)
def test_what_contradicts_itself_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PolicyError) as refused:
        RetentionPolicy(**fields)
    assert sentence in str(refused.value)
    assert isinstance(refused.value, ValueError)


@pytest.mark.parametrize("fields", OF_ANOTHER_TYPE)
def test_another_type_is_a_type_error(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(TypeError, match=name):
        RetentionPolicy(**fields)


def test_zero_is_a_count() -> None:
    policy = RetentionPolicy(keep_last_turns=0, delete_idle_after=DAY)
    assert 0 == policy.keep_last_turns
    assert not policy.keeps_every_turn


@pytest.mark.parametrize(("wanted", "metadata", "matches"), MATCHES)
def test_metadata_matches_if_it_contains_what_is_wanted(
    wanted: dict[str, Any], metadata: dict[str, Any], matches: bool
) -> None:
    assert matches is RetentionPolicy(keep_where=wanted).matches(metadata)


def test_without_keep_where_nothing_matches() -> None:
    assert RetentionPolicy().matches({"a": 1}) is False


def test_a_policy_does_not_change_with_the_mapping_it_was_given() -> None:
    wanted = {"a": {"b": 1}}
    policy = RetentionPolicy(keep_where=wanted)
    wanted["a"]["b"] = 2
    assert {"a": {"b": 1}} == policy.keep_where


def test_equal_policies_are_equal_and_survive_pickling() -> None:
    policy = RetentionPolicy(keep_where={"a": 1}, keep_within=DAY)
    assert policy == pickle.loads(pickle.dumps(policy))
    assert {policy} == {RetentionPolicy(keep_where={"a": 1}, keep_within=DAY)}
    assert policy != RetentionPolicy(keep_where={"a": 2}, keep_within=DAY)


def test_a_policy_is_frozen() -> None:
    with pytest.raises(AttributeError):
        RetentionPolicy().keep_last_turns = 1  # type: ignore[misc]  # The assignment is the test.
