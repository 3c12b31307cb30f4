"""The entries of a plan are made when they are asked for, and look like a tuple all the same."""

from __future__ import annotations

import pickle

from retaining_saver.planned import Entries, Entry, Fold, RetentionPlan

TWO = (Entry("", "a", "head"), Entry("sub", "b", "pinned"))
LISTED = Entries(Entry, ["", "sub"], ["a", "b"], ["head", "pinned"])


def test_entries_are_those_of_their_columns() -> None:
    assert TWO == tuple(LISTED)
    assert (2, TWO[0], TWO[-1]) == (len(LISTED), LISTED[0], LISTED[-1])
    assert TWO[1:] == LISTED[1:]
    assert TWO[0] in LISTED
    assert repr(TWO) == repr(LISTED)


def test_entries_equal_a_tuple_and_other_entries() -> None:
    again = Entries(Entry, ["", "sub"], ["a", "b"], ["head", "pinned"])
    assert TWO == LISTED == again
    assert 1 == len({TWO, LISTED, again})
    assert LISTED != Entries(Entry, ["", "sub"], ["a", "b"], ["head", "base"])
    assert TWO[:1] != LISTED
    assert list(TWO) != LISTED
    assert RetentionPlan("t", TWO) == RetentionPlan("t", LISTED)


def test_no_entries_are_false() -> None:
    none = Entries(Entry, [], [], [])
    assert not none
    assert () == none == tuple(none)
    assert not RetentionPlan("t", none, none).changes


def test_entries_survive_being_copied_to_another_process() -> None:
    assert LISTED == pickle.loads(pickle.dumps(LISTED))


def test_a_plan_is_plain_json_whichever_way_its_entries_are_kept() -> None:
    fold = Fold("", "c", "folded", "a", whole=True)
    folds = Entries(Fold, [""], ["c"], ["folded"], ["a"], [True])
    by_hand = RetentionPlan("t", TWO, fold=(fold,)).to_dict()
    assert by_hand == RetentionPlan("t", LISTED, fold=folds).to_dict()
    assert [{"checkpoint_ns": "", "checkpoint_id": "a", "reason": "head"}] == by_hand["keep"][:1]
    assert [True] == [entry["whole"] for entry in by_hand["fold"]]
