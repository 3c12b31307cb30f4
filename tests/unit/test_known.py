"""The memory of leaves answers what it saw, forgets in order, and stays small."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retaining_saver.known import KnownLeaf, KnownLeaves


def test_nothing_is_known_at_first() -> None:
    known = KnownLeaves()
    assert known.leaf("t", "L") is None
    assert known.leaf_on("t", "P") is None
    assert known.parent_of("t", "L") is None
    known.forget("t", "L")
    known.forget_thread("t")
    assert 0 == len(known)


def test_a_leaf_that_was_seen_is_known_by_its_id_and_by_its_parent() -> None:
    known = KnownLeaves()
    known.saw("t", "L", "P", "v1")
    assert KnownLeaf("L", "P", "v1") == known.leaf("t", "L") == known.leaf_on("t", "P")
    assert known.leaf("t", "P") is None
    assert known.leaf_on("t", "L") is None
    assert known.leaf("other", "L") is None
    assert known.leaf_on("other", "P") is None


def test_the_input_version_is_the_memorys_own() -> None:
    known = KnownLeaves()
    version = ["1"]
    known.saw("t", "L", "P", version)
    version.append("2")
    assert KnownLeaf("L", "P", ["1"]) == known.leaf("t", "L")


def test_the_newest_leaf_on_a_parent_has_the_largest_id() -> None:
    known = KnownLeaves()
    known.saw("t", "L2", "P", None)
    known.saw("t", "L1", "P", None)
    known.saw("t", "L3", "Q", None)
    assert KnownLeaf("L2", "P", None) == known.leaf_on("t", "P")


def test_a_reclaimed_leaf_is_not_live_and_leads_to_its_parent() -> None:
    known = KnownLeaves()
    known.saw("t", "L", "P", None)
    known.reclaimed("t", "L", "P")
    assert known.leaf("t", "L") is None
    assert known.leaf_on("t", "P") is None
    assert "P" == known.parent_of("t", "L")
    assert known.parent_of("t", "P") is None
    assert known.parent_of("other", "L") is None


def test_reclaimed_parents_are_followed_to_the_end() -> None:
    known = KnownLeaves()
    known.reclaimed("t", "L2", "L1")
    assert "L1" == known.parent_of("t", "L2")
    known.reclaimed("t", "L1", "P")
    assert "P" == known.parent_of("t", "L2")


@pytest.mark.parametrize(
    "circle", [[("A", "A")], [("A", "B"), ("B", "A")], [("B", "C"), ("C", "B")]]
)
def test_a_circle_has_no_end(circle: list[tuple[str, str]]) -> None:
    known = KnownLeaves()
    known.reclaimed("t", "A", "B")
    for leaf, parent in circle:
        known.reclaimed("t", leaf, parent)
    assert known.parent_of("t", "A") is None


def test_a_leaf_that_is_stored_again_is_not_reclaimed_any_more() -> None:
    known = KnownLeaves()
    known.reclaimed("t", "L", "P")
    known.saw("t", "L", "P", None)
    assert known.parent_of("t", "L") is None
    assert KnownLeaf("L", "P", None) == known.leaf("t", "L")
    assert 1 == len(known)


def test_what_is_not_a_leaf_after_all_is_forgotten() -> None:
    known = KnownLeaves()
    known.saw("t", "L", "P", None)
    known.saw("t", "M", "P", None)
    known.forget("t", "L")
    known.forget("t", "L")
    assert known.leaf("t", "L") is None
    assert KnownLeaf("M", "P", None) == known.leaf_on("t", "P")
    assert 1 == len(known)


def test_forgetting_a_live_leaf_keeps_what_was_reclaimed() -> None:
    known = KnownLeaves()
    known.reclaimed("t", "L", "P")
    known.forget("t", "L")
    assert "P" == known.parent_of("t", "L")


def test_a_forgotten_thread_leaves_the_others() -> None:
    known = KnownLeaves()
    known.saw("t", "L", "P", None)
    known.reclaimed("t", "M", "P")
    known.saw("other", "L", "P", None)
    known.forget_thread("t")
    assert known.leaf("t", "L") is None
    assert known.parent_of("t", "M") is None
    assert KnownLeaf("L", "P", None) == known.leaf("other", "L")
    assert 1 == len(known)


def test_the_least_recently_used_is_forgotten_first() -> None:
    known = KnownLeaves(max_entries=2)
    known.saw("t", "L1", "P1", None)
    known.reclaimed("u", "L2", "P2")
    assert KnownLeaf("L1", "P1", None) == known.leaf("t", "L1")
    known.saw("v", "L3", "P3", None)
    assert known.parent_of("u", "L2") is None
    assert KnownLeaf("L1", "P1", None) == known.leaf_on("t", "P1")
    known.saw("v", "L4", "P4", None)
    assert known.leaf("v", "L3") is None
    assert 2 == len(known)


def test_a_chain_is_forgotten_from_its_start() -> None:
    known = KnownLeaves(max_entries=2)
    known.reclaimed("t", "L1", "P")
    known.reclaimed("t", "L2", "L1")
    assert "P" == known.parent_of("t", "L2")
    known.saw("t", "L3", "P", None)
    # A memory that had lost the other end would name L1, which is gone.
    assert known.parent_of("t", "L2") is None
    assert "P" == known.parent_of("t", "L1")


@pytest.mark.parametrize("wrong", [0, -1])
def test_a_memory_needs_room(wrong: int) -> None:
    with pytest.raises(ValueError, match="max_entries"):
        KnownLeaves(wrong)


@pytest.mark.parametrize("wrong", [True, "5", 1.5, None])
def test_room_is_a_count(wrong: Any) -> None:
    with pytest.raises(TypeError, match="max_entries"):
        KnownLeaves(wrong)


# A busy machine is no defect.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

NAMES = st.sampled_from(["A", "B", "C"])
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["saw", "reclaimed", "forget", "forget_thread", "leaf", "leaf_on"]),
        st.sampled_from(["t", "u"]),
        NAMES,
        NAMES,
    ),
    max_size=30,
)


@unhurried
@given(calls=CALLS)
def test_a_roomy_memory_answers_like_two_plain_dictionaries(
    calls: list[tuple[str, str, str, str]],
) -> None:
    known = KnownLeaves()
    live: dict[tuple[str, str], str] = {}
    gone: dict[tuple[str, str], str] = {}
    for name, thread, one, other in calls:
        if name == "saw":
            known.saw(thread, one, other, None)
            live[thread, one] = other
            gone.pop((thread, one), None)
        elif name == "reclaimed":
            known.reclaimed(thread, one, other)
            gone[thread, one] = other
            live.pop((thread, one), None)
        elif name == "forget":
            known.forget(thread, one)
            live.pop((thread, one), None)
        elif name == "forget_thread":
            known.forget_thread(thread)
            live = {key: value for key, value in live.items() if key[0] != thread}
            gone = {key: value for key, value in gone.items() if key[0] != thread}
        else:
            getattr(known, name)(thread, one)
    assert len(live) + len(gone) == len(known)
    for thread in "tu":
        for name in "ABC":
            parent = live.get((thread, name))
            expected = None if parent is None else KnownLeaf(name, parent, None)
            assert expected == known.leaf(thread, name)
            on_it = [leaf for (at, leaf), parent in live.items() if (at, parent) == (thread, name)]
            newest = known.leaf_on(thread, name)
            assert max(on_it, default=None) == (newest.leaf_id if newest else None)


@unhurried
@given(calls=CALLS, room=st.integers(1, 3))
def test_a_small_memory_never_holds_more_than_it_may(
    calls: list[tuple[str, str, str, str]], room: int
) -> None:
    known = KnownLeaves(room)
    for name, thread, one, other in calls:
        if name == "saw":
            known.saw(thread, one, other, None)
        elif name == "reclaimed":
            known.reclaimed(thread, one, other)
        elif name == "forget_thread":
            known.forget_thread(thread)
        else:
            getattr(known, name)(thread, one)
        indexed = [
            leaf for held in known._threads.values() for leaf in (*held.live, *held.reclaimed)
        ]
        assert len(indexed) == len(known) <= room
        assert all(held.live or held.reclaimed for held in known._threads.values())


def test_many_threads_use_one_memory() -> None:
    known = KnownLeaves(max_entries=50)
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait(20)
        for turn in range(200):
            thread, leaf = f"t{turn % 3}", f"L{number}-{turn}"
            known.saw(thread, leaf, "P", turn)
            known.leaf_on(thread, "P")
            known.reclaimed(thread, leaf, "P")
            known.parent_of(thread, leaf)
            if turn % 20 == 0:
                known.forget_thread(thread)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, number) for number in range(8)]:
            done.result(20)
    assert 0 < len(known) <= 50
    for number in range(3):
        known.forget_thread(f"t{number}")
    assert 0 == len(known)
