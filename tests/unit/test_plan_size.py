"""What planning a long thread takes: nothing here looks at a clock, whose answer is the machine's.

Time follows from what is counted. Calls are the work, memory is what has to be fetched and
written, and objects are what the garbage collector goes through again and again.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable

import pytest

from benchmarks.plan import NOW, POLICIES, SHAPES
from retaining_saver.entries import StoredThread
from retaining_saver.plan import RetentionPlan, plan, plan_prune, plan_without_runs

SHORT, LONG = 10_000, 100_000
AT_MOST = 11
"""What ten times the entries may take; more is more than proportional."""
KIB = 1024
Planner = Callable[[StoredThread], RetentionPlan]
PLANNERS: dict[str, Planner] = {
    "newest turns": lambda thread: plan(thread, POLICIES["the newest 20 turns"], (), NOW),
    "every rule": lambda thread: plan(thread, POLICIES["everything at once"], (), NOW),
    "prune": lambda thread: plan_prune(thread, (), NOW),
    "without runs": lambda thread: plan_without_runs(thread, ["run-1", "run-2"], (), NOW),
}
each_planner = pytest.mark.parametrize("name", PLANNERS)


@pytest.fixture(scope="module")
def short() -> StoredThread:
    return SHAPES["branched"](SHORT)


@pytest.fixture(scope="module")
def long() -> StoredThread:
    return SHAPES["branched"](LONG)


def calls(planner: Planner, thread: StoredThread) -> int:
    counted = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        planner(thread)
    finally:
        sys.setprofile(None)
    return counted


@each_planner
def test_planning_takes_calls_in_proportion_to_the_entries(
    name: str, short: StoredThread, long: StoredThread
) -> None:
    few, many = (calls(PLANNERS[name], thread) for thread in (short, long))
    assert many <= AT_MOST * few


@each_planner
def test_planning_takes_a_kilobyte_of_memory_an_entry_at_most(
    name: str, long: StoredThread
) -> None:
    tracemalloc.start()
    try:
        PLANNERS[name](long)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= LONG * KIB


@each_planner
def test_a_plan_is_not_made_of_objects_that_the_garbage_collector_visits(
    name: str, long: StoredThread
) -> None:
    gc.collect()
    before = len(gc.get_objects())
    made = PLANNERS[name](long)
    count = len(gc.get_objects()) - before
    # A carrier has tuples and mappings of its own.
    assert count <= LONG / 100 + 10 * (len(made.carry) + len(made.rollback))
