"""What a plan keeps, drops, grafts and carries, case by case; and the drawings in the docs."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.base.id import uuid6

from retaining_saver.entries import (
    BRANCH,
    ERROR,
    INTERRUPT,
    NULL_TASK_ID,
    RESUME,
    SENDS,
    OrphanWrites,
    Writes,
)
from retaining_saver.plan import RULES, RetentionPlan, plan, plan_prune, plan_without_runs
from retaining_saver.policy import RetentionPolicy
from tests.support.lineages import namespaces
from tests.support.trees import Tree, World, applied, draw, ids, pin, reasons

GOLDEN = Path(__file__).parent / "golden" / "plan"
PAGE = Path(__file__).parents[2] / "docs" / "policies.md"
UPDATE = "RETAINING_SAVER_UPDATE_GOLDEN"
DAY = timedelta(days=1)
DELTA = frozenset({"messages"})


def planned(
    tree: Tree, pins: Iterable[Any] = (), after: timedelta = DAY, **policy: Any
) -> RetentionPlan:
    return plan(tree.thread(), RetentionPolicy(**policy), pins, tree.now + after)


def three_turns(**facts: Any) -> Tree:
    """c001-c003, c004-c006, c007-c009."""
    tree = Tree()
    tree.turn(tree.turn(tree.turn(**facts), **facts), **facts)
    return tree


# The cases that are drawn: in golden files, and in the docs.


def drop_annotations() -> tuple[Tree, RetentionPlan]:
    tree = Tree()
    link = tree.leaf(tree.turn(steps=1))
    tree.leaf(tree.turn(link, steps=1))
    return tree, planned(tree)


def keep_last_turns() -> tuple[Tree, RetentionPlan]:
    tree = three_turns()
    return tree, planned(tree, keep_last_turns=1)


def keep_within() -> tuple[Tree, RetentionPlan]:
    tree = Tree()
    first = tree.turn(steps=1)
    tree.now += 10 * DAY
    tree.turn(tree.turn(first, steps=1), steps=1)
    return tree, planned(tree, keep_within=7 * DAY)


def keep_where() -> tuple[Tree, RetentionPlan]:
    tree = Tree()
    first = tree.turn(steps=1)
    starred = tree.turn(first, steps=1)
    tree.change(starred, matches=True)
    tree.turn(tree.turn(starred, steps=1), steps=1)
    return tree, planned(tree, keep_last_turns=1, keep_where={"starred": True})


def drop_siblings_after() -> tuple[Tree, RetentionPlan]:
    tree = Tree()
    first = tree.turn(steps=1)
    tree.turn(first, steps=1)
    tree.now += 10 * DAY
    tree.turn(first, steps=1)
    return tree, planned(tree, drop_siblings_after=7 * DAY)


def compact_supersteps() -> tuple[Tree, RetentionPlan]:
    tree = three_turns()
    return tree, planned(tree, compact_supersteps=True)


def delete_idle_after() -> tuple[Tree, RetentionPlan]:
    tree = Tree()
    tree.leaf(tree.turn(steps=1))
    return tree, planned(tree, after=31 * DAY, delete_idle_after=30 * DAY)


def pins() -> tuple[Tree, RetentionPlan]:
    tree = three_turns()
    return tree, planned(tree, [pin("c002")], keep_last_turns=1)


def carriers() -> tuple[Tree, RetentionPlan]:
    tree = Tree()
    facts: dict[str, Any] = {"versioned": DELTA, "counted": DELTA}
    last = None
    for _ in range(3):
        last = tree.input(last, **facts)
        tree.wrote(last, "messages")
        last = tree.step(last, **facts)
    tree.change("c002", stored=DELTA, snapshots=DELTA)
    return tree, planned(tree, keep_last_turns=1)


def subgraphs() -> tuple[Tree, RetentionPlan]:
    tree = Tree()
    last, memory = None, None
    for _ in range(3):
        called = tree.input(last)
        memory = tree.add(memory, "sub", parents=(("", called),))
        tree.add(None, f"call:{called}", parents=(("", called),))
        last = tree.step(called)
    return tree, planned(tree, keep_last_turns=1)


def prune() -> tuple[Tree, RetentionPlan]:
    tree = three_turns()
    tree.turn("c006", steps=1)
    return tree, plan_prune(tree.thread(), [], tree.now)


def delete_for_runs() -> tuple[Tree, RetentionPlan]:
    tree = Tree()
    asked = tree.turn(steps=1, run_id="asks")
    tree.wrote(asked, INTERRUPT)
    tree.wrote(asked, RESUME, "out")
    tree.step(asked, run_id="answers")
    return tree, plan_without_runs(tree.thread(), ["answers"], [], tree.now)


Case = Callable[[], tuple[Tree, RetentionPlan]]
CASES: tuple[Case, ...] = (
    drop_annotations,
    keep_last_turns,
    keep_within,
    keep_where,
    drop_siblings_after,
    compact_supersteps,
    delete_idle_after,
    pins,
    carriers,
    subgraphs,
    prune,
    delete_for_runs,
)


def before_and_after(case: Case) -> str:
    tree, made = case()
    after = applied(World(tree.thread()), made)
    return f"{draw(tree.thread(), made)}\nafterwards\n\n{draw(after.thread) or '(nothing)'}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_plan_is_what_it_was(case: Case) -> None:
    shown = f"{before_and_after(case)}\n{case()[1].describe()}\n"
    path = GOLDEN / f"{case.__name__}.txt"
    if UPDATE in os.environ:
        path.write_text(shown)
    assert path.read_text() == shown


def test_every_golden_file_has_its_case() -> None:
    assert {case.__name__ for case in CASES} == {path.stem for path in GOLDEN.iterdir()}


def _drawings(page: str) -> dict[str, str]:
    return dict(re.findall(r"<!-- drawn: (\w+) -->\n```text\n(.*?)```\n", page, re.DOTALL))


def test_the_docs_draw_what_plans_do() -> None:
    if UPDATE in os.environ:
        page = PAGE.read_text()
        for case in CASES:
            block = f"<!-- drawn: {case.__name__} -->\n```text\n"
            start = page.index(block) + len(block)
            page = page[:start] + before_and_after(case) + page[page.index("```", start) :]
        PAGE.write_text(page)
    assert {case.__name__: before_and_after(case) for case in CASES} == _drawings(PAGE.read_text())


def test_the_docs_say_every_rule() -> None:
    page = PAGE.read_text()
    assert [] == [name for name, said in RULES.items() if f"| `{name}` | {said} |" not in page]


def test_a_policy_without_limits_removes_only_annotations() -> None:
    tree = three_turns()
    leaf = tree.leaf("c009")
    made = planned(tree, after=10_000 * DAY)
    assert {leaf: "leaf"} == reasons(made.drop)
    assert [("c009", True)] == [(fold.into, fold.whole) for fold in made.fold]


@pytest.mark.parametrize("turns", [1, 2, 3, 4])
def test_the_newest_turns_stay_with_the_base_of_the_oldest(turns: int) -> None:
    made = planned(three_turns(), keep_last_turns=turns)
    expected = {1: 4, 2: 7, 3: 9, 4: 9}[turns]
    assert expected == len(made.keep)


def test_the_newest_turns_of_every_branch_stay() -> None:
    tree = three_turns()
    tree.turn("c003", steps=1)
    made = planned(tree, keep_last_turns=1)
    assert ["c003", "c006", "c007", "c008", "c009", "c010", "c011"] == ids(made.keep)
    tree = three_turns()
    fork = tree.add("c003", source="fork")
    assert "head" == reasons(planned(tree, keep_last_turns=1).keep)[fork]


def test_no_turns_leave_the_head_alone() -> None:
    tree = three_turns()
    made = planned(tree, keep_last_turns=0, delete_idle_after=30 * DAY)
    assert {"c009": "head"} == reasons(made.keep)
    assert [("c009", None, "cut")] == [(g.checkpoint_id, g.parent_id, g.reason) for g in made.graft]


def test_turns_that_cannot_be_told_apart_all_stay_and_the_plan_says_so() -> None:
    tree = Tree()
    tree.add(tree.add(tree.add()))
    made = planned(tree, keep_last_turns=1, compact_supersteps=True)
    assert {"unknown_turns", "head"} == set(reasons(made.keep).values())
    assert 2 == len(made.notes)
    assert all(note in made.describe() for note in made.notes)


def test_a_thread_that_is_idle_goes_whole() -> None:
    tree = three_turns()
    made = planned(tree, after=31 * DAY, delete_idle_after=30 * DAY)
    assert (True, 9, 0) == (made.delete_thread, len(made.drop), len(made.keep))
    assert not planned(tree, after=29 * DAY, delete_idle_after=30 * DAY).delete_thread


def test_a_pin_keeps_an_idle_thread() -> None:
    tree = three_turns()
    made = planned(tree, [pin("not-stored")], after=31 * DAY, delete_idle_after=30 * DAY)
    assert not made.drop


WAITS = [{"writes": Writes.of([("a", INTERRUPT)])}, {"stored": {f"{BRANCH}a"}}]


@pytest.mark.parametrize("wait", WAITS)
def test_an_idle_thread_that_waits_goes_only_if_asked(wait: dict[str, Any]) -> None:
    tree = three_turns()
    tree.change("c009", **wait)
    assert not planned(tree, after=31 * DAY, delete_idle_after=30 * DAY).delete_thread
    made = planned(tree, after=31 * DAY, delete_idle_after=30 * DAY, delete_waiting=True)
    assert made.delete_thread


def test_a_broken_thread_is_left_alone() -> None:
    tree = three_turns()
    tree.change("c004", parent_id="gone")
    for made in (
        planned(tree, after=31 * DAY, delete_idle_after=DAY),
        plan_prune(tree.thread(), [], tree.now),
        plan_without_runs(tree.thread(), ["r"], [], tree.now),
    ):
        assert made.refused
        assert not made.changes
        assert 9 == len(made.keep)
        assert (
            "Checkpoint c004 in the root namespace: its parent gone is not stored." in made.problems
        )
    unread = plan(three_turns().thread(problems=["?"]), RetentionPolicy(), [], tree.now)
    assert ("?",) == unread.problems


def test_a_thread_without_checkpoints_needs_nothing() -> None:
    made = planned(Tree(), keep_last_turns=1, delete_idle_after=DAY)
    assert not made.changes


@pytest.mark.parametrize("held", ["rows", "due", "pin", "pinned above", "young"])
def test_a_sibling_stays_while_something_holds_it(held: str) -> None:
    tree = Tree()
    first = tree.turn(steps=1)
    tip = tree.turn(first, steps=1)
    tree.now += DAY if held == "young" else 30 * DAY
    tree.turn(first, steps=1)
    pinned = {"pin": [pin(tip)], "pinned above": [pin("c003")]}.get(held, [])
    if held == "rows":
        tree.wrote(tip)
    if held == "due":
        tree.change(tip, stored=frozenset({f"{BRANCH}a"}))
    made = planned(tree, pinned, drop_siblings_after=7 * DAY)
    assert [] == list(made.drop)


def test_compacting_leaves_each_old_turn_where_it_was_at_rest() -> None:
    made = planned(three_turns(), compact_supersteps=True)
    assert ["c003", "c006", "c007", "c008", "c009"] == ids(made.keep)


def test_compacting_a_turn_never_makes_it_younger_older_or_part_of_another() -> None:
    tree = Tree()
    killed = tree.input()
    tree.turn(tree.turn(killed))
    made = planned(tree, compact_supersteps=True)
    assert "turn_start" == reasons(made.keep)["c002"]
    after = applied(World(tree.thread()), made)
    assert not plan(after.thread, RetentionPolicy(compact_supersteps=True), [], tree.now).changes


LINKS: list[tuple[str, dict[str, Any], str]] = [
    ("no rows", {}, "drop"),
    ("rows", {"writes": Writes.of([("t", "messages")])}, "drop"),
    ("rows of no task", {"writes": Writes.of([(NULL_TASK_ID, "messages")])}, "keep"),
    ("an answer", {"writes": Writes.of([("t", RESUME)])}, "keep"),
    ("a fork", {"source": "fork"}, "keep"),
    ("other state", {"fingerprint": b"other"}, "keep"),
]


@pytest.mark.parametrize(("_", "facts", "fate"), LINKS, ids=[name for name, _, _ in LINKS])
def test_a_link_goes_if_its_child_can_continue_from_its_parent(
    _: str, facts: dict[str, Any], fate: str
) -> None:
    tree = Tree()
    end = tree.turn(steps=1)
    link = tree.leaf(end)
    child = tree.turn(link, steps=1)
    tree.change(link, **facts)
    made = planned(tree)
    assert fate == ("drop" if link in ids(made.drop) else "keep")
    if fate == "drop":
        assert [("c004", end)] == [(g.checkpoint_id, g.parent_id) for g in made.graft]
        assert (link if facts else None) == made.graft[0].moves_writes
    assert child in ids(made.keep)


def test_a_leaf_that_stays_is_not_taken_for_state_where_a_carrier_replaces_its_link() -> None:
    tree = Tree()
    end = tree.turn(steps=1)
    tree.add(None, "sub", parents=(("", end),))  # A replay of a fork of the link reads it.
    link = tree.leaf(end)
    head = tree.add(link, source="fork")
    leaf = tree.leaf(link, source="update")
    tree.wrote(leaf, INTERRUPT)
    made = planned(tree)
    assert [head] == [child for carry in made.carry for child in carry.children]
    after = applied(World(tree.thread()), made).thread
    assert head == namespaces(after)[""].head
    assert {leaf} == namespaces(after)[""].annotations
    assert head in ids(plan_prune(after, [], tree.now).keep)


def test_rows_of_a_link_do_not_move_where_its_child_had_read_a_value_instead() -> None:
    tree = Tree()
    end = tree.turn(steps=1, versioned=DELTA, counted=DELTA)
    tree.change(end, stored=DELTA, snapshots=DELTA)
    link = tree.leaf(end)
    tree.wrote(link, *DELTA)
    child = tree.step(tree.leaf(link))
    before, made = World(tree.thread()), planned(tree)
    after = applied(before, made)
    key = ("", child, "messages")
    assert (f"={end}",) == before.reads(DELTA)[key] == after.reads(DELTA)[key]


def test_rows_of_a_link_do_not_move_where_somebody_else_would_read_them() -> None:
    for disturb in ("rows", "sibling", "pin", "two children"):
        tree = Tree()
        end = tree.turn(steps=1)
        link = tree.leaf(end)
        tree.exit_turn(link)
        tree.wrote(link, "messages")
        if disturb == "rows":
            tree.wrote(end)
        if disturb == "sibling":
            tree.turn(end)
        if disturb == "two children":
            tree.turn(link)
        made = planned(tree, [pin(end)] if disturb == "pin" else [])
        assert "annotation" == reasons(made.keep).get(link), disturb


def test_a_link_that_a_subgraph_call_was_started_from_stays() -> None:
    tree = Tree()
    link = tree.leaf(tree.turn())
    tree.turn(link)
    tree.add(None, "call:1", parents=(("", link),))
    assert "annotation" == reasons(planned(tree).keep)[link]


def test_a_leaf_with_rows_stays_and_one_that_is_pinned_keeps_what_it_annotates() -> None:
    tree = Tree()
    first = tree.turn()
    leaf = tree.leaf(first)
    tree.turn(first)
    assert {leaf: "leaf"} == reasons(planned(tree).drop)
    made = planned(tree, [pin(leaf)], keep_last_turns=1)
    assert ("pinned", "pinned") == (reasons(made.keep)[leaf], reasons(made.keep)[first])
    tree.wrote(leaf)
    assert "annotation" == reasons(planned(tree).keep)[leaf]


def test_annotations_stay_where_the_policy_leaves_them_and_follow_what_they_annotate() -> None:
    tree = Tree()
    first = tree.turn()
    tree.leaf(first)
    last = tree.turn(tree.turn(first))
    leaf = tree.leaf(last)
    made = planned(tree, drop_annotations=False, keep_last_turns=1)
    assert "annotation" == reasons(made.keep)[leaf]
    assert "expired" == reasons(made.drop)["c004"]


def test_the_history_of_turns_that_go_moves_to_the_oldest_that_stays() -> None:
    tree = Tree()
    first = tree.turn(steps=1)
    tree.change(first, has_history=True)
    branch = tree.turn(first, steps=1)
    tree.change(branch, has_history=True)
    second = tree.turn(first, steps=1)
    tree.turn(second, steps=1)
    tree.now += DAY
    made = planned(tree, keep_within=DAY * 1.5 + timedelta(minutes=-1), keep_last_turns=1)
    folded = [(fold.checkpoint_id, fold.into, fold.whole) for fold in made.fold]
    assert (first, min(ids(made.keep)), False) in folded or first in ids(made.keep)


def _folded(made: RetentionPlan) -> set[tuple[str, str]]:
    return {(fold.checkpoint_id, fold.into) for fold in made.fold if not fold.whole}


def test_what_dropped_turns_recorded_goes_to_the_first_that_stays_of_each_branch() -> None:
    tree = Tree()
    first = tree.turn(steps=1, has_history=True)
    side = tree.turn(first, steps=1, has_history=True)
    stays = tree.turn(side, steps=1, has_history=True)
    gone = tree.turn(first, steps=1, has_history=True)
    main = tree.turn(first, steps=1, has_history=True)
    head = tree.turn(main, steps=1, has_history=True)
    made = plan_prune(tree.thread(), [pin(stays)], tree.now)
    assert {stays, head} == set(ids(made.keep))
    # The second of each turn is its end.
    shared = {(i, heir) for i in ("c001", first) for heir in (stays, head)}
    of_side = {(i, stays) for i in ("c003", side, "c005")}
    of_main = {(i, head) for i in ("c009", main, "c011")}
    assert (shared | of_side | of_main) == _folded(made)
    assert gone not in {i for i, _ in _folded(made)}


def test_what_the_oldest_of_the_main_line_takes_over_is_not_repeated_on_branches() -> None:
    tree = Tree()
    first = tree.turn(steps=1, has_history=True)
    second = tree.turn(first, steps=1, has_history=True)
    side = tree.turn(second, steps=1, has_history=True)
    tree.turn(second, steps=1)
    made = plan_prune(tree.thread(), [pin(first), pin(side)], tree.now)
    # On the side branch only what is its own is missing from the line of its checkpoint.
    assert {("c001", first), ("c003", first), (second, first), ("c005", side)} == _folded(made)


def test_a_branch_takes_over_no_more_than_the_newest_runs() -> None:
    tree = Tree()
    last = tree.input(has_history=True)
    for _ in range(9):
        last = tree.step(last, has_history=True)
    side = tree.turn(last, steps=1, has_history=False)
    tree.turn("c002", steps=1)
    made = plan_prune(tree.thread(), [pin(side)], tree.now, keep_runs=3)
    assert {"c008", "c009", "c010"} == {i for i, heir in _folded(made) if heir == side}


def test_a_carrier_takes_the_writes_and_seeds_that_are_still_read() -> None:
    _, made = carriers()
    (carry,) = made.carry
    assert (("c004",), None, ("c003",)) == (carry.children, carry.parent_id, carry.sources[-1:])
    assert {"messages": ("c003",)} == carry.writes or carry.seeds


def test_a_second_plan_leaves_carriers_and_a_later_one_merges_them() -> None:
    tree, made = carriers()
    world = applied(World(tree.thread()), made)
    again = plan(world.thread, RetentionPolicy(keep_last_turns=1), [], tree.now)
    assert not again.changes
    assert "carrier" in reasons(again.keep).values()
    pruned = plan_prune(world.thread, [], tree.now)
    assert "carrier_replaced" in reasons(pruned.drop).values()
    before, after = World(tree.thread()).reads(DELTA), applied(world, pruned).reads(DELTA)
    assert {key: before[key] for key in after} == after


def test_a_carrier_id_is_an_id_right_below_its_childs() -> None:
    tree = Tree()
    made_ids = sorted(str(uuid6()) for _ in range(3))
    facts: dict[str, Any] = {"versioned": DELTA, "counted": DELTA}
    tree.add(named=made_ids[0], source="input", start_version=1, **facts)
    tree.wrote(made_ids[0], "messages")
    tree.add(made_ids[0], named=made_ids[1], source="input", start_version=2, **facts)
    tree.wrote(made_ids[1], "messages")
    tree.add(made_ids[1], named=made_ids[2], source="input", start_version=3, **facts)
    (carry,) = plan_prune(tree.thread(), [], tree.now).carry
    assert made_ids[1] < carry.checkpoint_id < made_ids[2]
    assert made_ids[2][:23] == carry.checkpoint_id[:23] or carry.checkpoint_id[24:] == "f" * 12


def test_an_id_at_the_start_of_its_clock_tick_is_preceded_by_one_of_the_tick_before() -> None:
    tree = Tree()
    first = "1ef00000-0000-6000-8000-000000000000"
    facts: dict[str, Any] = {"versioned": DELTA, "counted": DELTA}
    tree.add(named="1eeffff0-0000-6000-8000-000000000001", **facts)
    tree.wrote("1eeffff0-0000-6000-8000-000000000001", "messages")
    tree.add("1eeffff0-0000-6000-8000-000000000001", named=first, **facts)
    (carry,) = plan_prune(tree.thread(), [], tree.now).carry
    assert "1eefffff-ffff-6fff-bfff-ffffffffffff" == carry.checkpoint_id


def test_pending_sends_of_an_old_format_keep_the_parent_that_holds_them() -> None:
    tree = three_turns()
    tree.wrote("c008", SENDS)
    tree.change("c009", v=3)
    made = plan_prune(tree.thread(), [], tree.now)
    assert {"c008": "pending_sends", "c009": "head"} == reasons(made.keep)
    tree.change("c009", v=4)
    assert ["c009"] == ids(plan_prune(tree.thread(), [], tree.now).keep)


def test_foreign_pending_sends_are_shielded_from_a_child_of_an_old_format() -> None:
    tree = three_turns()
    tree.wrote("c002", SENDS)
    tree.change("c009", v=3)
    made = planned(tree, [pin("c002")], keep_last_turns=0, delete_idle_after=30 * DAY)
    assert ["shielded"] == [carry.reason for carry in made.carry]


def test_a_call_lives_as_long_as_the_root_checkpoint_that_started_it() -> None:
    tree = three_turns()
    for number, started_by in enumerate(("c002", "c008", "unknown")):
        tree.add(None, f"call:{number}", named=f"b{number}", parents=(("", started_by),))
    made = planned(tree, keep_last_turns=1)
    assert "subgraph_expired" == reasons(made.drop)["b0"]
    assert ("call", "call") == (reasons(made.keep)["b1"], reasons(made.keep)["b2"])


def test_a_call_that_is_newer_than_the_root_has_not_finished() -> None:
    tree = three_turns()
    tree.add(None, "call:1", parents=(("", "c002"),))
    assert "uncommitted" == reasons(planned(tree, keep_last_turns=1).keep)["c010"]


def test_a_persistent_subgraph_keeps_what_replays_of_kept_roots_read() -> None:
    tree = Tree()
    root, sub = None, None
    for _ in range(4):
        root = tree.input(root)
        for _ in range(2):
            sub = tree.add(sub, "sub", parents=(("", root),))
    made = planned(tree, keep_last_turns=1)
    found = {e.checkpoint_id: e.reason for e in made.keep if e.checkpoint_ns == "sub"}
    # The base and the kept turn were started at c007 and c010.
    assert {
        "c006": "read_by_replay",
        "c008": "started_by_kept",
        "c009": "read_by_replay",
        "c011": "started_by_kept",
        "c012": "head",
    } == found


def test_subgraphs_are_untouched_while_no_root_checkpoint_goes() -> None:
    tree = three_turns()
    tree.add(tree.add(None, "sub", parents=(("", "gone"),)), "sub", parents=(("", "c009"),))
    tree.leaf("c009")
    assert {"c012": "leaf"} == reasons(planned(tree).drop)


def test_pruning_keeps_the_newest_of_each_subgraph_also_where_no_root_checkpoint_goes() -> None:
    tree = Tree()
    root = tree.input()
    inner = tree.add(None, "call:1", parents=(("", root),))
    tree.add(inner, "call:1")
    tree.add(tree.add(None, "sub", parents=(("", root),)), "sub")
    made = plan_prune(tree.thread(), [], tree.now)
    assert [root, "c003", "c005"] == ids(made.keep)


def test_a_pin_in_a_call_keeps_the_call() -> None:
    tree = three_turns()
    tree.add(None, "call:1", named="b1", parents=(("", "c002"),))
    tree.add(None, "call:1|inner:1", named="b2", parents=(("", "c002"), ("call:1", "b1")))
    made = planned(tree, [pin("b1", "call:1")], keep_last_turns=1)
    assert {"b1", "b2"} <= set(ids(made.keep))


ROLLBACKS: list[tuple[list[tuple[str, str]], tuple[str, Any] | None]] = [
    ([("a", INTERRUPT), (NULL_TASK_ID, RESUME), ("a", RESUME), ("b", "out")], ("reopened", ("a",))),
    ([("a", ERROR), ("a", "out"), ("b", "out")], ("retried", ("a",))),
    ([(NULL_TASK_ID, "messages"), ("a", "out")], ("undone", None)),
    ([], None),
]


@pytest.mark.parametrize(("rows", "expected"), ROLLBACKS)
def test_a_checkpoint_whose_last_child_goes_with_its_run_is_open_again(
    rows: list[tuple[str, str]], expected: tuple[str, Any] | None
) -> None:
    tree = Tree()
    asked = tree.turn(run_id="one")
    tree.change(asked, writes=Writes.of(rows))
    tree.step(asked, run_id="two")
    made = plan_without_runs(tree.thread(), ["two"], [], tree.now)
    assert ([(asked, *expected)] if expected else []) == [
        (back.checkpoint_id, back.reason, back.tasks) for back in made.rollback
    ]
    assert ["c004"] == ids(made.drop)


def test_runs_go_from_a_thread_that_has_carriers() -> None:
    tree, made = carriers()
    retained = applied(World(tree.thread()), made).thread
    run = Tree(rows={(c.checkpoint_ns, c.checkpoint_id): c for c in retained.checkpoints})
    run.wrote(max(i for _, i in run.rows), INTERRUPT)
    answered = run.step(max(i for _, i in run.rows), named="d001", run_id="two")
    without = plan_without_runs(run.thread(), ["two"], [], tree.now)
    assert "carrier" in reasons(without.keep).values()
    assert [answered] == ids(without.drop)
    assert ["reopened"] == [back.reason for back in without.rollback]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"writes": Writes.of([("a", INTERRUPT), (NULL_TASK_ID, "d")])}, []),
        ({"writes": Writes.of([("a", INTERRUPT), ("x", "d")]), "counted": DELTA | {"d"}}, [()]),
        ({"writes": Writes.of([("a", ERROR), (NULL_TASK_ID, "d")])}, []),
        ({"writes": Writes.of([(NULL_TASK_ID, "d")]), "stored": {f"{BRANCH}a"}}, [()]),
        ({"writes": Writes.of([("a", "d")]), "stored": {f"{BRANCH}b"}}, [()]),
        ({"writes": Writes.of([(NULL_TASK_ID, "d")])}, [()]),
    ],
)
def test_a_deleted_input_takes_nothing_along_that_was_there_before_it(
    facts: dict[str, Any], expected: list[Any]
) -> None:
    tree = Tree()
    asked = tree.turn(run_id="one")
    tree.change(asked, **facts)
    tree.turn(asked, run_id="two")
    made = plan_without_runs(tree.thread(), ["two"], [], tree.now)
    assert [("undone", tasks, False) for tasks in expected] == [
        (back.reason, back.tasks, back.commands) for back in made.rollback
    ]
    # Only an input leaves it alone; whoever went on from it may have been told to.
    tree.step(asked, run_id="two")
    made = plan_without_runs(tree.thread(), ["two"], [], tree.now)
    assert [True] == [back.commands for back in made.rollback]


def test_a_checkpoint_with_another_child_is_not_opened() -> None:
    tree = Tree()
    asked = tree.turn(run_id="one")
    tree.wrote(asked, INTERRUPT, RESUME)
    tree.step(asked, run_id="two")
    tree.step(asked, run_id="three")
    assert () == plan_without_runs(tree.thread(), ["two"], [], tree.now).rollback
    tree = Tree()
    asked = tree.turn(run_id="one")
    tree.wrote(asked, "messages")
    tree.step(tree.step(asked, run_id="two"), run_id="three")
    assert () == plan_without_runs(tree.thread(), ["two"], [], tree.now).rollback


def test_a_question_inside_a_subgraph_is_opened_in_every_namespace_that_shows_it() -> None:
    tree = Tree()
    root = tree.wrote(tree.input(run_id="one"), INTERRUPT, RESUME)
    inner = tree.add(None, "call:1", parents=(("", root),), run_id="one")
    tree.wrote(inner, INTERRUPT, RESUME, ns="call:1")
    tree.add(inner, "call:1", run_id="two")
    made = plan_without_runs(tree.thread(), ["two"], [], tree.now)
    assert [("call:1", inner), ("", root)] == [
        (back.checkpoint_ns, back.checkpoint_id) for back in made.rollback
    ]


def test_a_call_that_outlasted_the_newest_turn_is_a_sign_of_life() -> None:
    tree = Tree()
    first = tree.turn(steps=1)
    head = tree.input(first)
    tree.now += timedelta(hours=5)
    tree.add(None, "call:1", named="c004", parents=(("", first),))
    tree.leaf(head)
    policy: dict[str, Any] = {
        "drop_annotations": False,
        "keep_where": {"k": 1},
        "delete_idle_after": timedelta(hours=1),
    }
    made = planned(tree, after=timedelta(minutes=1), **policy)
    assert "uncommitted" == reasons(made.keep)["c004"]
    after = applied(World(tree.thread()), made).thread
    later = tree.now + timedelta(minutes=1)
    assert not plan(after, RetentionPolicy(**policy), [], later).changes


def test_the_subgraph_calls_of_a_deleted_run_go_with_it() -> None:
    tree = Tree()
    second = tree.turn(tree.turn(run_id="one"), run_id="two")
    tree.add(None, "sub", parents=(("", second),))
    tree.add(None, "call:1", parents=(("", second),))
    made = plan_without_runs(tree.thread(), ["two"], [], tree.now)
    assert ["c001", "c002", "c003"] == ids(made.keep)
    pinned = plan_without_runs(tree.thread(), ["two"], [pin(second)], tree.now)
    assert "pinned" == reasons(pinned.keep)[second]


def test_writes_without_a_checkpoint_go_once_they_are_old() -> None:
    tree = three_turns()
    old = OrphanWrites("", "1ee00000-0000-6000-8000-000000000000", 2)
    young = OrphanWrites("", str(uuid6()), 1)
    other = OrphanWrites("", "no-time-in-it", 1)
    thread = tree.thread([old, young, other])
    made = plan(thread, RetentionPolicy(), [], datetime.now(timezone.utc))
    assert [old.checkpoint_id] == ids(made.orphans)


def test_every_reason_is_a_rule_and_a_plan_is_plain_json() -> None:
    used = set()
    for case in CASES:
        made = case()[1]
        shown = made.to_dict()
        assert shown == json.loads(json.dumps(shown))
        for name in ("keep", "drop", "graft", "carry", "fold", "rollback"):
            used |= {entry["reason"] for entry in shown[name]}
    assert used <= set(RULES)
    assert {"head", "leaf", "graft", "carried", "folded", "reopened"} <= used


def _calls(turns: int) -> int:
    """Count the calls that planning a thread with branches, leaves, deltas and subgraphs makes."""
    tree, last = Tree(), None
    facts: dict[str, Any] = {"versioned": DELTA, "counted": DELTA}
    for number in range(turns):
        above = last
        last = tree.input(last, **facts)
        tree.wrote(last, "messages")
        stores = {"stored": DELTA, "snapshots": DELTA} if number % 10 == 0 else {}
        last = tree.step(last, **{**facts, **stores})
        tree.add(None, f"call:{last}", parents=(("", last),), named=f"b{number:06d}")
        tree.add(above, source="fork", **facts)
        last = tree.leaf(last)
    counted = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    thread, policy = tree.thread(), RetentionPolicy(keep_last_turns=2, compact_supersteps=True)
    sys.setprofile(count)
    try:
        plan(thread, policy, [], tree.now)
    finally:
        sys.setprofile(None)
    return counted


def test_planning_takes_work_in_proportion_to_the_thread() -> None:
    assert _calls(2_000) <= 11 * _calls(200)
