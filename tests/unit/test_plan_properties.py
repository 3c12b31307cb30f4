"""What holds for every plan: random threads, policies and pins."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retaining_saver.entries import BRANCH, INTERRUPT, NULL_TASK_ID, SENDS
from retaining_saver.lineage import lineage
from retaining_saver.plan import RetentionPlan, plan, plan_prune, plan_without_runs
from retaining_saver.policy import RetentionPolicy
from retaining_saver.records import Ref
from tests.support.lineages import namespaces, turns
from tests.support.trees import Tree, World, applied, draw, pin

# Growing a thread takes a while on a busy machine; how long is nobody's promise.
bounded = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])
DELTA = ("d", "e")
HOURS = st.integers(1, 200).map(lambda hours: timedelta(hours=hours))
NOTHING = RetentionPolicy()


def _parent(tree: Tree, back: int) -> str | None:
    roots = [i for ns, i in tree.rows if not ns]
    # Most runs continue from the newest checkpoint.
    return roots[-1 - max(0, back - 12) % len(roots)] if roots else None


def _delta(draw: Any, tree: Tree, ns: str, parent: str | None) -> dict[str, Any]:
    """Let the next checkpoint write to delta channels, from its parent's rows, or store them."""
    wrote = draw(st.sets(st.sampled_from(DELTA)))
    if parent is None or not wrote:
        return {}
    above = tree.rows[ns, parent]
    tree.wrote(parent, *sorted(wrote), ns=ns)
    stored = draw(st.sets(st.sampled_from(sorted(wrote)))) if draw(st.booleans()) else set()
    return {
        "versioned": above.versioned | wrote,
        "counted": above.counted | wrote,
        "stored": frozenset(stored),
        "snapshots": frozenset(stored),
    }


def _grow_turn(draw: Any, tree: Tree, back: int) -> None:
    parent = _parent(tree, back)
    run = draw(st.sampled_from(["r1", "r2", "r3", None]))
    matches = draw(st.integers(0, 5)) == 0
    if draw(st.booleans()):
        facts = _delta(draw, tree, "", parent)
        tree.exit_turn(parent, run_id=run, matches=matches, **facts)
        return
    last = tree.input(parent, run_id=run)
    for _ in range(draw(st.integers(0, 3))):
        tree.wrote(last)
        facts = _delta(draw, tree, "", last)
        last = tree.step(last, run_id=run, matches=matches, **facts)


def _grow_leaf(draw: Any, tree: Tree, back: int) -> None:
    parent = _parent(tree, back)
    if parent is not None:
        tree.leaf(parent)


def _grow_update(draw: Any, tree: Tree, back: int) -> None:
    parent = _parent(tree, back)
    facts = _delta(draw, tree, "", parent)
    tree.add(parent, source=draw(st.sampled_from(["update", "fork"])), **facts)


def _grow_call(draw: Any, tree: Tree, back: int) -> None:
    root = _parent(tree, back)
    if root is None:
        return
    name = draw(st.sampled_from(["sub", f"call:{len(tree.rows)}"]))
    last = max((i for ns, i in tree.rows if ns == name), default=None)
    for _ in range(draw(st.integers(1, 2))):
        facts = _delta(draw, tree, name, last)
        last = tree.add(last, name, parents=(("", root),), **facts)


def _grow_tip(draw: Any, tree: Tree, back: int) -> None:
    i = _parent(tree, back)
    if i is None or any(row.parent_id == i for row in tree.rows.values()):
        return
    shape = draw(st.integers(0, 3))
    if shape == 0:
        tree.wrote(i, INTERRUPT)
    elif shape == 1:
        tree.change(i, stored=tree.rows["", i].stored | {f"{BRANCH}a"})
    elif shape == 2:
        tree.wrote(i, task=NULL_TASK_ID)
    else:
        tree.wrote(i, "d")


def _grow_old_format(draw: Any, tree: Tree, back: int) -> None:
    parent = _parent(tree, back)
    if parent is not None:
        tree.wrote(parent, SENDS)
        tree.step(parent, v=3)


GROW = (_grow_turn, _grow_turn, _grow_leaf, _grow_update, _grow_call, _grow_tip, _grow_old_format)


@st.composite
def trees(draw: Any) -> Tree:
    tree = Tree()
    tree.turn(steps=1)
    for _ in range(draw(st.integers(0, 9))):
        tree.now += timedelta(hours=draw(st.sampled_from([0, 0, 5, 50])))
        draw(st.sampled_from(GROW))(draw, tree, draw(st.integers(0, 18)))
    return tree


@st.composite
def policies(draw: Any) -> RetentionPolicy:
    idle = draw(st.none() | HOURS)
    within = draw(st.none() | HOURS)
    if idle is not None and within is not None:
        idle = max(idle, within)
    return RetentionPolicy(
        drop_annotations=draw(st.booleans()),
        keep_last_turns=draw(st.none() | st.integers(0 if idle else 1, 3)),
        keep_within=within,
        keep_where=draw(st.none() | st.just({"k": 1})),
        drop_siblings_after=draw(st.none() | HOURS),
        compact_supersteps=draw(st.booleans()),
        delete_idle_after=idle,
        delete_waiting=draw(st.booleans()),
    )


@st.composite
def planned(draw: Any) -> tuple[Tree, RetentionPolicy, list[Ref], RetentionPlan]:
    tree = draw(trees())
    policy = draw(policies())
    pins = [pin(i, ns) for ns, i in draw(st.sets(st.sampled_from(sorted(tree.rows)), max_size=2))]
    tree.now += timedelta(hours=draw(st.sampled_from([0, 1, 60])))
    return tree, policy, pins, plan(tree.thread(), policy, pins, tree.now)


def kept(plan: RetentionPlan) -> set[tuple[str, str]]:
    return {(e.checkpoint_ns, e.checkpoint_id) for e in plan.keep}


def dropped(plan: RetentionPlan) -> set[tuple[str, str]]:
    return {(e.checkpoint_ns, e.checkpoint_id) for e in plan.drop}


CASE = tuple[Tree, RetentionPolicy, list[Ref], RetentionPlan]


@bounded
@given(planned())
def test_every_checkpoint_is_kept_or_dropped_and_never_both(case: CASE) -> None:
    tree, _, _, made = case
    assert set(tree.rows) == kept(made) | dropped(made)
    assert set() == kept(made) & dropped(made)
    assert len(tree.rows) == len(made.keep) + len(made.drop)


@bounded
@given(planned())
def test_heads_stay_unless_the_thread_goes(case: CASE) -> None:
    tree, _, _, made = case
    found = namespaces(tree.thread()).values()
    heads = {(ns.name, ns.head) for ns in found if ns.name in ("", "sub")}
    stored = {key for key in heads if key[1] is not None}
    assert made.delete_thread or stored <= kept(made)


@bounded
@given(planned())
def test_what_is_pinned_stays(case: CASE) -> None:
    _, _, pins, made = case
    assert {(p.checkpoint_ns, p.checkpoint_id) for p in pins} <= kept(made)


@bounded
@given(planned())
def test_no_parent_points_to_nothing(case: CASE) -> None:
    tree, _, _, made = case
    after = applied(World(tree.thread()), made).thread
    assert () == lineage(after).problems


@bounded
@given(planned())
def test_what_stays_reads_its_delta_channels_as_before(case: CASE) -> None:
    tree, _, _, made = case
    before = World(tree.thread())
    after = applied(before, made).reads(DELTA)
    assert {key: before.reads(DELTA)[key] for key in after} == after, draw(tree.thread(), made)


@bounded
@given(planned())
def test_a_second_plan_changes_nothing(case: CASE) -> None:
    tree, policy, pins, made = case
    after = applied(World(tree.thread()), made)
    again = plan(after.thread, policy, pins, tree.now)
    shown = draw(tree.thread(), made) + draw(after.thread, again)
    assert (False, ()) == (again.changes, again.fold), f"{policy}\n{pins}\n{shown}"


@bounded
@given(planned(), HOURS)
def test_later_plans_merge_carriers_and_what_stays_reads_as_before(
    case: CASE, later: timedelta
) -> None:
    tree, policy, _, made = case
    first = World(tree.thread())
    second = applied(first, made)
    then = plan(second.thread, policy, [], tree.now + later)
    third = applied(second, then)
    last = applied(third, plan_prune(third.thread, [], tree.now + later))
    for after in (third, last):
        reads = after.reads(DELTA)
        assert {key: first.reads(DELTA)[key] for key in reads} == reads
        assert () == lineage(after.thread).problems
    assert not plan(third.thread, policy, [], tree.now + later).changes


@bounded
@given(planned())
def test_the_children_of_what_goes_are_grafted(case: CASE) -> None:
    tree, _, _, made = case
    orphaned = {
        (row.checkpoint_ns, row.checkpoint_id)
        for row in tree.rows.values()
        if (row.checkpoint_ns, row.checkpoint_id) in kept(made)
        and (row.checkpoint_ns, row.parent_id) in dropped(made)
    }
    assert orphaned == {(g.checkpoint_ns, g.checkpoint_id) for g in made.graft}


@bounded
@given(planned())
def test_a_carrier_lies_between_its_children_and_their_ancestor(case: CASE) -> None:
    tree, _, _, made = case
    for carry in made.carry:
        assert all(carry.checkpoint_id < child for child in carry.children)
        assert carry.parent_id is None or carry.parent_id < carry.checkpoint_id
        assert (carry.checkpoint_ns, carry.checkpoint_id) not in tree.rows


@bounded
@given(planned())
def test_a_tip_in_flight_goes_only_with_its_whole_turn(case: CASE) -> None:
    tree, _, _, made = case
    root = namespaces(tree.thread())[""]
    divided = turns(root)
    for entry in made.drop:
        i = entry.checkpoint_id
        if made.delete_thread or entry.checkpoint_ns or i not in root.children:
            continue
        if root.in_flight(i):
            of_turn = {("", j) for j in root.real if divided.of[j] == divided.of[i]}
            by_rule = {e.checkpoint_id: e.reason for e in made.keep}
            stays = {j for _, j in of_turn & kept(made)}
            protected = {"head", "pinned", "base", "pending_sends"}
            assert {by_rule[j] for j in stays} <= protected, shown(case)
            assert "expired" == entry.reason


def shown(case: CASE) -> str:
    tree, policy, pins, made = case
    return f"{policy}\n{pins}\n{draw(tree.thread(), made)}"


@bounded
@given(planned())
def test_a_waiting_thread_is_not_deleted_unless_asked_for(case: CASE) -> None:
    tree, policy, pins, made = case
    waits = lineage(tree.thread()).waits()
    assert not (made.delete_thread and waits and not policy.delete_waiting)
    assert not (made.delete_thread and pins)


@bounded
@given(trees())
def test_the_default_policy_removes_only_annotations(tree: Tree) -> None:
    made = plan(tree.thread(), NOTHING, [], tree.now + timedelta(days=10_000))
    assert {e.reason for e in made.drop} <= {"leaf", "link"}
    real = {("", i) for i in namespaces(tree.thread())[""].real}
    assert real <= kept(made) if real else True


@bounded
@given(trees())
def test_pruning_twice_is_pruning_once_and_reads_are_as_before(tree: Tree) -> None:
    before = World(tree.thread())
    made = plan_prune(tree.thread(), [], tree.now)
    after = applied(before, made)
    assert not plan_prune(after.thread, [], tree.now).changes, draw(tree.thread(), made)
    reads = after.reads(DELTA)
    assert {key: before.reads(DELTA)[key] for key in reads} == reads


@bounded
@given(trees(), st.sets(st.sampled_from(["r1", "r2", "r3"])))
def test_deleting_runs_leaves_none_of_them(tree: Tree, runs: set[str]) -> None:
    before = World(tree.thread())
    made = plan_without_runs(tree.thread(), runs, [], tree.now)
    after = applied(before, made)
    sends = {(e.checkpoint_ns, e.checkpoint_id) for e in made.keep if e.reason == "pending_sends"}
    left = {
        row.run_id
        for row in after.thread.checkpoints
        if row.claim is None and (row.checkpoint_ns, row.checkpoint_id) not in sends
    }
    assert set() == left & runs
    assert () == lineage(after.thread).problems
    # A leaf over a checkpoint that is opened again read what the deleted run left there.
    opened = {(back.checkpoint_ns, back.checkpoint_id) for back in made.rollback}
    over = {
        (row.checkpoint_ns, row.checkpoint_id)
        for row in after.thread.checkpoints
        if row.claim is not None and (row.checkpoint_ns, row.parent_id) in opened
    }
    reads = {key: read for key, read in after.reads(DELTA).items() if key[:2] not in over}
    assert {key: before.reads(DELTA)[key] for key in reads} == reads
