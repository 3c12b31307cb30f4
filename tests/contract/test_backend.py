"""The promises of ``retaining_saver/backends/base.py``, on every saver and by both faces."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import make_dataclass
from types import ModuleType
from typing import Annotated, Any, cast

import pytest
from langgraph.checkpoint.base import Checkpoint
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send
from typing_extensions import TypedDict

from retaining_saver._steps import Steps, call
from retaining_saver.backends.base import NEIGHBOURS, Backend, Movable, Row, Surroundings
from retaining_saver.backends.moves import input_task_id
from retaining_saver.entries import NULL_TASK_ID
from retaining_saver.records import Ref
from tests.contract.stage import (
    Stage,
    backend_of,
    checkpoint,
    id_below,
    open_stage,
    versions_of,
)
from tests.support.faces import FACES, Face
from tests.support.graphs import asking_graph, chat_graph, extend, say
from tests.support.savers import KINDS, ONE_PER_BACKEND, Saver, Where, open_saver

TASK = "6f8a2f0e-5c55-5d0f-9d7c-0f3a3b1f2c11"
EXIT_TASK = "00000003-5c55-5d0f-9d7c-0f3a3b1f2c11"
LATE_EXIT_TASK = "ffffffff-0000-0003-9d7c-0f3a3b1f2c11"


@pytest.fixture(params=KINDS)
async def stage(
    request: pytest.FixtureRequest, where: Where, thread_id: str, face: Face
) -> AsyncIterator[Stage]:
    """A thread of each kind of saver in turn, seen through each face."""
    async with open_stage(request.param, where, thread_id, face) as opened:
        yield opened


def test_the_backend_fulfils_the_protocol_by_its_class_alone(stage: Stage) -> None:
    assert isinstance(stage.backend, Backend)
    assert type(stage.backend) is type(backend_of(stage.saver))


# Reading


async def test_a_leaf_holds_the_same_state_as_its_parent(stage: Stage) -> None:
    leaf, parent = await stage.leaf_and_parent()
    assert parent.checkpoint_id == leaf.parent_id
    assert parent.body == leaf.body
    assert {"messages"} <= set(leaf.versions)
    assert not {"id", "ts"} & set(leaf.body)


async def test_a_row_has_the_saver_s_own_metadata_and_parent(stage: Stage) -> None:
    await stage.leaf_and_parent()
    for found in await stage.listed():
        row = await stage.stored(found.checkpoint["id"])
        parent = found.parent_config and found.parent_config["configurable"]["checkpoint_id"]
        assert found.metadata == row.metadata
        assert parent == row.parent_id
        assert found.checkpoint["channel_versions"] == row.versions


async def test_different_states_have_different_bodies(stage: Stage) -> None:
    first = await stage.stored(await stage.talk("one"))
    second = await stage.stored(await stage.talk("two"))
    assert first.body != second.body


async def test_without_an_id_the_row_is_the_head(stage: Stage) -> None:
    leaf, _ = await stage.leaf_and_parent()
    assert leaf.checkpoint_id == (await stage.stored()).checkpoint_id


async def test_what_is_not_stored_is_none_and_stays_so(stage: Stage) -> None:
    await stage.talk()
    before = stage.dump()
    gone = str(uuid6())
    elsewhere = [Ref("no such thread"), stage.ref(ns="no such namespace"), stage.ref(gone)]
    for ref in elsewhere:
        assert await stage.call("row", ref) is None
        assert await stage.call("metadata", ref) is None
        assert [] == await stage.call("lineage", ref.at(gone))
        assert await stage.call("reclaimed_into", ref.at(gone)) is None
        assert await stage.call("has_writes", ref.at(gone)) is False
        assert await stage.call("exists", ref.at(gone)) is False
        assert await stage.call("fold", ref.at(gone), None, {"title": "t"}) is False
        assert 0 == await stage.call("rescue", ref.at(gone), gone)
    assert before == stage.dump()
    assert "no such thread" not in getattr(stage.saver, "storage", {})
    assert "no such namespace" not in getattr(stage.saver, "storage", {}).get(stage.thread_id, {})


async def test_a_checkpoint_at_rest_is_not_due(stage: Stage) -> None:
    await stage.talk("one")
    await stage.talk("two")
    assert (await stage.stored()).due is False


async def test_a_checkpoint_that_a_node_runs_from_is_due(stage: Stage) -> None:
    await stage.talk()
    at_rest = (await stage.stored()).checkpoint_id
    due = [(await stage.stored(found.checkpoint["id"])).due for found in await stage.listed()]
    assert at_rest == (await stage.listed())[0].checkpoint["id"]
    # Newest first: at rest, before conclude, before search, before plan, the input.
    assert [False, True, True, True, True] == due


@pytest.mark.parametrize("stop", ["interrupt_before", "interrupt_after"])
async def test_a_checkpoint_stopped_at_a_breakpoint_is_due(stage: Stage, stop: str) -> None:
    node = {"interrupt_before": "search", "interrupt_after": "plan"}[stop]
    await stage.invoke(chat_graph(stage.saver), say("hi"), **{stop: [node]})
    assert (await stage.stored()).due is True
    await stage.invoke(chat_graph(stage.saver), None)
    assert (await stage.stored()).due is False


async def test_a_checkpoint_that_asks_is_due(stage: Stage) -> None:
    await stage.invoke(asking_graph(stage.saver), {"log": ["u"]})
    assert (await stage.stored()).due is True


class Sent(TypedDict):
    log: Annotated[list[str], lambda old, new: extend(old, [new])]


def sending_graph(saver: Any) -> Any:
    builder = StateGraph(Sent)
    builder.add_node("plans", lambda state: {"log": ["planned"]})
    builder.add_node("works", lambda state: {"log": ["worked"]})
    builder.add_edge(START, "plans")
    builder.add_conditional_edges("plans", lambda state: [Send("works", {})], ["works"])
    builder.add_edge("works", END)
    return builder.compile(checkpointer=saver)


async def test_pending_sends_are_due_and_the_empty_list_they_leave_is_not(stage: Stage) -> None:
    graph = sending_graph(stage.saver)
    await stage.invoke(graph, {"log": []}, interrupt_before=["works"])
    assert (await stage.stored()).due is True
    await stage.invoke(graph, None)
    assert (await stage.stored()).due is False


async def test_writes_are_found_on_the_checkpoint_that_has_them(stage: Stage) -> None:
    parent_id = await stage.talk()
    assert await stage.call("has_writes", stage.ref(parent_id)) is False
    await stage.put_write(parent_id, TASK)
    assert await stage.call("has_writes", stage.ref(parent_id)) is True


async def test_surroundings_are_writes_and_newer_ids(stage: Stage) -> None:
    leaf, parent = await stage.leaf_and_parent()
    below, above = stage.ref(parent.checkpoint_id), stage.ref(leaf.checkpoint_id)
    assert Surroundings(False, True) == await stage.call("surroundings", below)
    assert Surroundings(False, False) == await stage.call("surroundings", above)
    but = {"but": leaf.checkpoint_id}
    assert Surroundings(False, False) == await stage.call("surroundings", below, **but)
    await stage.put_write(parent.checkpoint_id, TASK)
    await stage.put_copy(leaf.checkpoint_id)
    assert Surroundings(True, True) == await stage.call("surroundings", below, **but)


async def test_a_stored_checkpoint_exists(stage: Stage) -> None:
    leaf, _ = await stage.leaf_and_parent()
    assert await stage.call("exists", stage.ref(leaf.checkpoint_id)) is True
    assert await stage.call("exists", stage.ref(leaf.checkpoint_id, "elsewhere")) is False


async def test_metadata_come_with_the_id_that_they_belong_to(stage: Stage) -> None:
    leaf, parent = await stage.leaf_and_parent()
    head = await stage.call("metadata", stage.ref())
    named = await stage.call("metadata", stage.ref(parent.checkpoint_id))
    assert (leaf.checkpoint_id, leaf.metadata) == tuple(head)
    assert (parent.checkpoint_id, parent.metadata) == tuple(named)


async def test_lineage_holds_the_ancestors_that_record_runs_newest_first(stage: Stage) -> None:
    await stage.talk("one")
    first = await stage.put_leaf("run-1")
    await stage.talk("two")
    second = await stage.put_leaf("run-2")
    lineage = await stage.call("lineage", stage.ref(second))
    recorded = [(i, m["run_durations"]) for i, m in lineage if "run_durations" in m]
    assert [(second, {"run-2": 7}), (first, {"run-1": 7})] == recorded


async def test_lineage_leaves_out_other_branches(stage: Stage) -> None:
    base = await stage.talk()
    await stage.put_leaf("other")
    mine = await stage.put_leaf("mine", at=base)
    lineage = await stage.call("lineage", stage.ref(mine))
    assert [mine] == [i for i, metadata in lineage if "run_durations" in metadata]


async def test_lineage_ends_at_a_missing_parent_and_at_a_cycle(stage: Stage) -> None:
    recorded = {"run_durations": {"run-1": 1}}
    one = await stage.put(checkpoint(), str(uuid6()), metadata=recorded)
    two = await stage.put(checkpoint(), one, metadata=recorded)
    assert [two, one] == [i for i, _ in await stage.call("lineage", stage.ref(two))]
    await stage.put(checkpoint(checkpoint_id=one), two, metadata=recorded)
    assert [two, one] == [i for i, _ in await stage.call("lineage", stage.ref(two))]


async def test_the_checkpoint_that_remembers_a_reclaimed_one_is_found(stage: Stage) -> None:
    leaf, parent = await stage.leaf_and_parent()
    assert await stage.call("reclaimed_into", stage.ref(leaf.checkpoint_id)) is None
    assert "reclaimed" == await stage.reclaim(leaf, parent)
    into = await stage.call("reclaimed_into", stage.ref(leaf.checkpoint_id))
    assert parent.checkpoint_id == into


async def test_a_copied_memory_of_a_reclaimed_one_does_not_count(stage: Stage) -> None:
    leaf, parent = await stage.leaf_and_parent()
    await stage.reclaim(leaf, parent)
    await stage.put_copy(parent.checkpoint_id)
    into = await stage.call("reclaimed_into", stage.ref(leaf.checkpoint_id))
    assert parent.checkpoint_id == into


async def test_a_reclaimed_one_is_looked_for_among_its_neighbours_only(stage: Stage) -> None:
    parent_id = await stage.put(checkpoint())
    between = [await stage.put(checkpoint()) for _ in range(NEIGHBOURS)]
    gone = str(uuid6())
    await stage.call("fold", stage.ref(parent_id), gone, {"run_durations": {"run-1": 1}})
    assert await stage.call("reclaimed_into", stage.ref(gone)) is None
    stage.delete_row(between[0])
    assert parent_id == await stage.call("reclaimed_into", stage.ref(gone))


async def test_the_same_values_are_recognised(stage: Stage) -> None:
    parent_id = await stage.talk()
    found = await stage.host("get_tuple", stage.ref(parent_id).config())
    copy = cast(Checkpoint, {**found.checkpoint, "id": str(uuid6()), "ts": "later"})
    assert stage.backend.same_values(await stage.stored(parent_id), copy) is True


# Folding


async def test_a_fold_adds_to_the_stored_metadata_and_changes_nothing_else(stage: Stage) -> None:
    parent_id = await stage.talk()
    before, states = (await stage.stored(parent_id)).metadata, await stage.states()
    gone = str(uuid6())
    added = {"run_durations": {"run-1": 7}, "title": "Ünïcode 'quoted' %s"}
    assert await stage.call("fold", stage.ref(parent_id), gone, added) is True
    after = (await stage.stored(parent_id)).metadata
    assert {**before, **added} == {k: v for k, v in after.items() if k != "retention"}
    assert [gone] == after["retention"]["reclaimed"]
    assert states == await stage.states()


async def test_entries_that_were_no_checkpoint_s_are_folded_too(stage: Stage) -> None:
    parent_id = await stage.talk()
    await stage.call("fold", stage.ref(parent_id), None, {"run_durations": {"run-1": 7}})
    after = (await stage.stored(parent_id)).metadata
    assert {"run-1": 7} == after["run_durations"]
    assert [] == after["retention"]["reclaimed"]


async def test_a_later_fold_keeps_what_an_earlier_one_brought(stage: Stage) -> None:
    target = stage.ref(await stage.talk())
    one, two = str(uuid6()), str(uuid6())
    await stage.call("fold", target, one, {"run_durations": {"run-1": 1}})
    await stage.call("fold", target, two, {"run_durations": {"run-2": 2}})
    after = (await stage.stored(target.checkpoint_id)).metadata
    assert {"run-1": 1, "run-2": 2} == after["run_durations"]
    assert [one, two] == after["retention"]["reclaimed"]


async def test_folds_of_two_workers_lose_nothing(stage: Stage) -> None:
    target = stage.ref(await stage.talk())
    async with open_saver(stage.kind, stage.where) as other:
        backends = [stage.backend, backend_of(stage.saver if stage.kind == "memory" else other)]

        async def fold_ten(backend: Backend, name: str) -> None:
            for number in range(10):
                added = {"run_durations": {f"{name}-{number}": number}}
                leaf_id = str(uuid6())
                assert await stage.face(backend.fold, backend.afold, target, leaf_id, added)

        await asyncio.gather(fold_ten(backends[0], "a"), fold_ten(backends[1], "b"))
    after = (await stage.stored(target.checkpoint_id)).metadata
    assert {f"{n}-{i}" for n in "ab" for i in range(10)} == set(after["run_durations"])


# Reclaiming


async def test_reclaiming_deletes_the_leaf_and_keeps_what_it_recorded(stage: Stage) -> None:
    leaf, parent = await stage.leaf_and_parent()
    before, states = stage.dump(), await stage.states()
    assert "reclaimed" == await stage.reclaim(leaf, parent)
    assert await stage.call("row", stage.ref(leaf.checkpoint_id)) is None
    head = await stage.stored()
    assert parent.checkpoint_id == head.checkpoint_id
    assert {"run-1": 7} == head.metadata["run_durations"]
    assert parent.body == head.body
    del states["", leaf.checkpoint_id]
    assert states == await stage.states()
    after = stage.dump()
    assert len(before["checkpoints"]) - 1 == len(after["checkpoints"])
    for table in set(before) - {"checkpoints"}:
        assert before[table] == after[table]


async def test_the_run_after_a_reclaimed_leaf_goes_on_as_ever(stage: Stage) -> None:
    leaf, parent = await stage.leaf_and_parent()
    await stage.reclaim(leaf, parent)
    done = await stage.invoke(chat_graph(stage.saver), say("and then?"))
    assert 8 == len(done["messages"])


async def test_the_fold_takes_metadata_as_stored_now(stage: Stage) -> None:
    leaf, parent = await stage.leaf_and_parent()
    await stage.call("fold", stage.ref(parent.checkpoint_id), None, {"title": "on the parent"})
    await stage.call("fold", stage.ref(leaf.checkpoint_id), None, {"note": "on the leaf"})
    assert "reclaimed" == await stage.reclaim(leaf, parent)
    metadata = (await stage.stored()).metadata
    assert "on the parent" == metadata["title"]
    assert "on the leaf" == metadata["note"]


async def test_leaves_on_leaves_are_reclaimed_one_after_the_other(stage: Stage) -> None:
    await stage.talk()
    for number in range(3):
        await stage.put_leaf(f"run-{number}")
    for _ in range(3):
        leaf = await stage.stored()
        assert "reclaimed" == await stage.reclaim(leaf, await stage.stored(leaf.parent_id))
    head = await stage.stored()
    assert {"run-0": 7, "run-1": 7, "run-2": 7} == head.metadata["run_durations"]


async def test_other_namespaces_and_threads_are_not_touched(stage: Stage) -> None:
    leaf, parent = await stage.leaf_and_parent()
    for ns in ("other", "other|inner:1"):
        for row in (parent, leaf):
            same = checkpoint(checkpoint_id=row.checkpoint_id)
            await stage.put(same, row.parent_id, ns=ns)
    newest = await stage.put(checkpoint(), leaf.checkpoint_id, ns="other")
    assert "reclaimed" == await stage.reclaim(leaf, parent)
    assert newest == (await stage.stored(ns="other")).checkpoint_id
    for ns in ("other", "other|inner:1"):
        assert await stage.call("exists", stage.ref(leaf.checkpoint_id, ns)) is True
        metadata = (await stage.stored(parent.checkpoint_id, ns)).metadata
        assert "retention" not in metadata


async def test_a_leaf_of_another_namespace_is_reclaimed_there(stage: Stage) -> None:
    await stage.talk()
    parent_id = await stage.put(checkpoint(), ns="inner")
    leaf_id = await stage.put_copy(parent_id, ns="inner")
    await stage.put(checkpoint())
    leaf, parent = await stage.stored(leaf_id, "inner"), await stage.stored(parent_id, "inner")
    assert "reclaimed" == await stage.reclaim(leaf, parent, ns="inner")
    assert parent_id == (await stage.stored(ns="inner")).checkpoint_id


Happening = Callable[[Stage, Row, Row], Awaitable[Any]]


async def newer_checkpoint(stage: Stage, leaf: Row, parent: Row) -> None:
    await stage.put_copy(parent.checkpoint_id)


async def child(stage: Stage, leaf: Row, parent: Row) -> None:
    await stage.put_copy(leaf.checkpoint_id)


async def child_with_a_smaller_id(stage: Stage, leaf: Row, parent: Row) -> None:
    smaller = id_below(leaf.checkpoint_id)
    await stage.put_copy(leaf.checkpoint_id, checkpoint_id=smaller)


async def write(stage: Stage, leaf: Row, parent: Row) -> None:
    await stage.put_write(leaf.checkpoint_id, TASK)


async def no_parent(stage: Stage, leaf: Row, parent: Row) -> None:
    stage.delete_row(parent.checkpoint_id)


async def no_leaf(stage: Stage, leaf: Row, parent: Row) -> None:
    stage.delete_row(leaf.checkpoint_id)


async def other_state(stage: Stage, of: Row) -> None:
    found = await stage.host("get_tuple", stage.ref(of.checkpoint_id).config())
    seen = {**found.checkpoint["versions_seen"], "plan": {}}
    changed = cast(Checkpoint, {**found.checkpoint, "versions_seen": seen})
    await stage.put(changed, of.parent_id, metadata=found.metadata)


async def leaf_rewritten(stage: Stage, leaf: Row, parent: Row) -> None:
    await other_state(stage, leaf)


async def parent_rewritten(stage: Stage, leaf: Row, parent: Row) -> None:
    await other_state(stage, parent)


async def other_parent(stage: Stage, leaf: Row, parent: Row) -> None:
    stage.set_parent(leaf.checkpoint_id, parent.parent_id)


REFUSALS: list[tuple[Happening, str]] = [
    (newer_checkpoint, "superseded"),
    (child, "superseded"),
    (child_with_a_smaller_id, "superseded"),
    (write, "has_writes"),
    (no_parent, "parent_missing"),
    (no_leaf, "superseded"),
    (leaf_rewritten, "versions_differ"),
    (parent_rewritten, "versions_differ"),
    (other_parent, "versions_differ"),
]


@pytest.mark.parametrize(
    ("happening", "outcome"), REFUSALS, ids=[happening.__name__ for happening, _ in REFUSALS]
)
async def test_a_proof_that_no_longer_holds_is_refused_and_changes_nothing(
    stage: Stage, happening: Happening, outcome: str
) -> None:
    leaf, parent = await stage.leaf_and_parent()
    await happening(stage, leaf, parent)
    before = stage.dump()
    assert outcome == await stage.reclaim(leaf, parent)
    assert before == stage.dump()


@pytest.mark.parametrize("happening", [child, child_with_a_smaller_id])
async def test_a_child_keeps_a_leaf_that_need_not_be_the_head(
    stage: Stage, happening: Happening
) -> None:
    leaf, parent = await stage.leaf_and_parent()
    await happening(stage, leaf, parent)
    before = stage.dump()
    assert "superseded" == await stage.reclaim(leaf, parent, only_head=False)
    assert before == stage.dump()


async def test_a_leaf_that_need_not_be_the_head_goes_under_newer_ids(stage: Stage) -> None:
    leaf, parent = await stage.leaf_and_parent()
    newer = await stage.put_copy(parent.checkpoint_id)
    assert "reclaimed" == await stage.reclaim(leaf, parent, only_head=False)
    assert newer == (await stage.stored()).checkpoint_id
    assert await stage.call("exists", stage.ref(leaf.checkpoint_id)) is False


async def test_a_checkpoint_that_differs_only_in_what_was_seen_is_no_leaf(stage: Stage) -> None:
    leaf, parent = await stage.leaf_and_parent()
    await leaf_rewritten(stage, leaf, parent)
    leaf = await stage.stored(leaf.checkpoint_id)
    assert parent.versions == leaf.versions
    before = stage.dump()
    assert "versions_differ" == await stage.reclaim(leaf, parent)
    assert before == stage.dump()


async def test_one_leaf_is_reclaimed_once(stage: Stage) -> None:
    leaf, parent = await stage.leaf_and_parent()
    async with open_saver(stage.kind, stage.where) as other:
        backend = backend_of(stage.saver if stage.kind == "memory" else other)
        args = (stage.thread_id, "", leaf, parent)
        outcomes = await asyncio.gather(
            stage.face(stage.backend.reclaim, stage.backend.areclaim, *args),
            stage.face(backend.reclaim, backend.areclaim, *args),
        )
    assert ["reclaimed", "superseded"] == sorted(outcomes)
    head = await stage.stored()
    assert [leaf.checkpoint_id] == head.metadata["retention"]["reclaimed"]


# Moving writes


async def test_a_raw_graph_s_input_moves_under_the_parent_s_input_id(stage: Stage) -> None:
    leaf, parent = await stage.leaf_and_parent()
    task = cast(str, input_task_id(leaf.checkpoint_id))
    await stage.put_write(leaf.checkpoint_id, task, "the input")
    before = stage.writes()
    assert "has_writes" == await stage.reclaim(leaf, parent)
    assert "has_writes" == await stage.reclaim(leaf, parent, movable=Movable(exits=True))
    assert before == stage.writes()
    assert "reclaimed" == await stage.reclaim(leaf, parent, movable=Movable(inputs=True))
    moved = (parent.checkpoint_id, input_task_id(parent.checkpoint_id), "messages", stage.path)
    assert moved in stage.writes()
    assert leaf.checkpoint_id not in {row[0] for row in stage.writes()}
    found = await stage.host("get_tuple", stage.ref().config())
    assert ["the input"] == [value for _, _, value in found.pending_writes]


async def test_the_delta_writes_of_an_exiting_run_move_as_they_are(stage: Stage) -> None:
    leaf, parent = await stage.leaf_and_parent()
    for task in (EXIT_TASK, LATE_EXIT_TASK):
        await stage.put_write(leaf.checkpoint_id, task)
    before = stage.dump()
    assert "has_writes" == await stage.reclaim(leaf, parent, movable=Movable(inputs=True))
    assert before == stage.dump()
    assert "reclaimed" == await stage.reclaim(leaf, parent, movable=Movable(exits=True))
    assert {
        (parent.checkpoint_id, EXIT_TASK, "messages", stage.path),
        (parent.checkpoint_id, LATE_EXIT_TASK, "messages", stage.path),
    } <= set(stage.writes())


@pytest.mark.parametrize("task_id", [TASK, NULL_TASK_ID])
async def test_one_write_that_must_stay_keeps_them_all(stage: Stage, task_id: str) -> None:
    leaf, parent = await stage.leaf_and_parent()
    await stage.put_write(leaf.checkpoint_id, EXIT_TASK)
    await stage.put_write(leaf.checkpoint_id, task_id)
    before = stage.dump()
    movable = Movable(inputs=True, exits=True)
    assert "has_writes" == await stage.reclaim(leaf, parent, movable=movable)
    assert before == stage.dump()


async def test_nothing_moves_onto_a_parent_that_has_writes(stage: Stage) -> None:
    leaf, parent = await stage.leaf_and_parent()
    await stage.put_write(leaf.checkpoint_id, EXIT_TASK)
    await stage.put_write(parent.checkpoint_id, TASK)
    before = stage.dump()
    assert "has_writes" == await stage.reclaim(leaf, parent, movable=Movable(exits=True))
    assert before == stage.dump()


async def test_writes_on_the_parent_do_not_keep_a_leaf_without_any(stage: Stage) -> None:
    leaf, parent = await stage.leaf_and_parent()
    await stage.put_write(parent.checkpoint_id, TASK)
    before = stage.writes()
    assert "reclaimed" == await stage.reclaim(leaf, parent)
    assert before == stage.writes()


async def test_a_refused_reclaim_leaves_movable_writes_where_they_are(stage: Stage) -> None:
    leaf, parent = await stage.leaf_and_parent()
    await stage.put_write(leaf.checkpoint_id, EXIT_TASK)
    await stage.put_copy(leaf.checkpoint_id)
    before = stage.dump()
    assert "superseded" == await stage.reclaim(leaf, parent, movable=Movable(exits=True))
    assert before == stage.dump()


# Rescuing


async def test_children_and_writes_of_a_deleted_leaf_move_to_its_parent(stage: Stage) -> None:
    leaf, parent = await stage.leaf_and_parent()
    assert "reclaimed" == await stage.reclaim(leaf, parent)
    late = [await stage.put_copy(parent.checkpoint_id, parent_id=leaf.checkpoint_id)]
    late.append(await stage.put_copy(parent.checkpoint_id, parent_id=leaf.checkpoint_id))
    await stage.put_write(leaf.checkpoint_id, TASK)
    await stage.put_write(leaf.checkpoint_id, cast(str, input_task_id(leaf.checkpoint_id)))
    gone = stage.ref(leaf.checkpoint_id)
    assert 4 == await stage.call("rescue", gone, parent.checkpoint_id)
    parents = [(await stage.stored(child_id)).parent_id for child_id in late]
    assert [parent.checkpoint_id] * 2 == parents
    assert {
        (parent.checkpoint_id, TASK, "messages", stage.path),
        (parent.checkpoint_id, input_task_id(parent.checkpoint_id), "messages", stage.path),
    } <= set(stage.writes())
    assert 0 == await stage.call("rescue", gone, parent.checkpoint_id)


async def test_nothing_is_rescued_from_a_leaf_that_is_stored(stage: Stage) -> None:
    leaf, parent = await stage.leaf_and_parent()
    await stage.put_copy(leaf.checkpoint_id)
    await stage.put_write(leaf.checkpoint_id, TASK)
    before = stage.dump()
    assert 0 == await stage.call("rescue", stage.ref(leaf.checkpoint_id), parent.checkpoint_id)
    assert before == stage.dump()


async def test_nothing_is_rescued_onto_a_parent_that_is_gone(stage: Stage) -> None:
    leaf, parent = await stage.leaf_and_parent()
    await stage.put_copy(leaf.checkpoint_id)
    await stage.put_write(leaf.checkpoint_id, TASK)
    stage.delete_row(leaf.checkpoint_id)
    stage.delete_row(parent.checkpoint_id)
    before = stage.dump()
    assert 0 == await stage.call("rescue", stage.ref(leaf.checkpoint_id), parent.checkpoint_id)
    assert before == stage.dump()


async def test_a_rescued_write_does_not_replace_one_that_the_parent_has(stage: Stage) -> None:
    leaf, parent = await stage.leaf_and_parent()
    await stage.reclaim(leaf, parent)
    await stage.put_write(parent.checkpoint_id, TASK, "first")
    await stage.put_write(leaf.checkpoint_id, TASK, "second")
    assert 0 == await stage.call("rescue", stage.ref(leaf.checkpoint_id), parent.checkpoint_id)
    found = await stage.host("get_tuple", stage.ref().config())
    assert ["first"] == [value for _, _, value in found.pending_writes]
    assert leaf.checkpoint_id not in {row[0] for row in stage.writes()}


async def test_a_rescued_error_replaces_the_task_s_earlier_one(stage: Stage) -> None:
    leaf, parent = await stage.leaf_and_parent()
    await stage.reclaim(leaf, parent)
    await stage.put_write(parent.checkpoint_id, TASK, "first", channel="__error__")
    await stage.put_write(leaf.checkpoint_id, TASK, "second", channel="__error__")
    assert 1 == await stage.call("rescue", stage.ref(leaf.checkpoint_id), parent.checkpoint_id)
    found = await stage.host("get_tuple", stage.ref().config())
    assert ["second"] == [value for _, _, value in found.pending_writes]


# Whatever a thread is called, and however its values are stored

ODD_NAMES = (
    "o'clock\"; DROP TABLE checkpoints; --",
    "100% %s %(thread_id)s {0} :thread_id ?",
    "Grüße_🙂\\路",
    "_%",
)


@pytest.mark.parametrize("face", FACES, ids=str)
@pytest.mark.parametrize("kind", ONE_PER_BACKEND)
@pytest.mark.parametrize("name", ODD_NAMES)
async def test_names_are_data(
    kind: str, face: Face, where: Where, thread_id: str, name: str
) -> None:
    odd = f"{thread_id}{name}"
    async with open_stage(kind, where, odd, face) as stage:
        ns = f"ns {name}"
        parent_id = await stage.put(checkpoint(), ns=ns)
        leaf_id = await stage.put_copy(parent_id, ns=ns)
        leaf, parent = await stage.stored(ns=ns), await stage.stored(parent_id, ns)
        assert leaf_id == leaf.checkpoint_id
        assert Surroundings(False, False) == await stage.call(
            "surroundings", stage.ref(leaf_id, ns)
        )
        assert "reclaimed" == await stage.reclaim(leaf, parent, ns=ns)
        assert parent_id == await stage.call("reclaimed_into", stage.ref(leaf_id, ns))
        await stage.put_copy(parent_id, parent_id=leaf_id, ns=ns)
        assert 1 == await stage.call("rescue", stage.ref(leaf_id, ns), parent_id)


@pytest.mark.parametrize("face", FACES, ids=str)
@pytest.mark.parametrize("kind", ONE_PER_BACKEND)
async def test_an_encrypted_saver_s_rows_stay_encrypted(
    kind: str, face: Face, where: Where, thread_id: str
) -> None:
    serde = EncryptedSerializer.from_pycryptodome_aes(key=b"0" * 16)
    async with open_stage(kind, where, thread_id, face, serde=serde) as stage:
        await stage.invoke(sending_graph(stage.saver), {"log": []})
        await stage.put_leaf()
        leaf = await stage.stored()
        parent = await stage.stored(leaf.parent_id)
        assert (False, False) == (leaf.due, parent.due)
        assert parent.body == leaf.body
        assert "reclaimed" == await stage.reclaim(leaf, parent)
        found = await stage.host("get_tuple", stage.ref().config())
        assert {"log": ["planned", "worked"]}.items() <= found.checkpoint["channel_values"].items()
        assert {"run-1": 7} == found.metadata["run_durations"]
        if kind == "memory":
            assert "run-1" not in repr(stage.dump())


@pytest.mark.parametrize("face", FACES, ids=str)
@pytest.mark.parametrize("kind", ONE_PER_BACKEND)
async def test_a_value_that_only_pickle_can_store_is_never_unpickled(
    kind: str, face: Face, where: Where, thread_id: str
) -> None:
    serde = JsonPlusSerializer(pickle_fallback=True)
    async with open_stage(kind, where, thread_id, face, serde=serde) as stage:
        values = {"number": complex(1, 2), "text": "t"}
        versions = versions_of(values)
        parent_id = await stage.put(checkpoint(values), new_versions=versions)
        leaf_id = await stage.put_copy(parent_id)
        leaf, parent = await stage.stored(leaf_id), await stage.stored(parent_id)
        assert parent.body == leaf.body
        assert "reclaimed" == await stage.reclaim(leaf, parent)
        found = await stage.host("get_tuple", stage.ref().config())
        assert values == found.checkpoint["channel_values"]


@pytest.mark.parametrize("face", FACES, ids=str)
@pytest.mark.parametrize("kind", ONE_PER_BACKEND)
async def test_a_class_that_cannot_be_imported_is_not_needed(
    kind: str, face: Face, where: Where, thread_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = ModuleType("a_module_of_the_graph_s")
    order = make_dataclass("Order", [("number", int)])
    order.__module__ = module.__name__  # From 3.12 on the caller's stands above a namespace's.
    vars(module)["Order"] = order
    sys.modules[module.__name__] = module
    try:
        async with open_stage(kind, where, thread_id, face) as stage:
            values = {"order": order(7)}
            versions = versions_of(values)
            parent_id = await stage.put(checkpoint(values), new_versions=versions)
            leaf_id = await stage.put_copy(parent_id)
            del sys.modules[module.__name__]
            caplog.clear()
            with caplog.at_level(logging.DEBUG, logger="langgraph"):
                leaf, parent = await stage.stored(leaf_id), await stage.stored(parent_id)
                assert "reclaimed" == await stage.reclaim(leaf, parent)
            assert [] == [r for r in caplog.records if "Order" in r.getMessage()]
            sys.modules[module.__name__] = module
            found = await stage.host("get_tuple", stage.ref().config())
            assert values == found.checkpoint["channel_values"]
    finally:
        sys.modules.pop(module.__name__, None)


# One moment


def _read_twice(config: Any, between: Callable[[], object]) -> Callable[[Saver], Steps[list[Any]]]:
    def operation(saver: Saver) -> Steps[list[Any]]:
        first = yield from call(saver.get_tuple, saver.aget_tuple, config)
        between()
        second = yield from call(saver.get_tuple, saver.aget_tuple, config)
        return [first, second]

    return operation


async def test_two_reads_on_a_snapshot_see_what_one_statement_sees(stage: Stage) -> None:
    leaf, _ = await stage.leaf_and_parent()
    ref = stage.ref(leaf.checkpoint_id)
    config = ref.config()
    with ThreadPoolExecutor(1) as pool:
        pending: list[Future[bool]] = []

        def fold() -> None:
            # Through another saver, or, for want of one, another thread, which may have to wait.
            pending.append(pool.submit(_fold_by_another, stage, ref))
            if stage.kind != "memory":
                assert pending[0].result(10)

        first, second = await stage.call("on_snapshot", _read_twice(config, fold))
        assert pending[0].result(10)
    assert first == second
    assert "meanwhile" not in first.metadata
    found = await stage.host("get_tuple", config)
    assert 1 == found.metadata["meanwhile"]


def _fold_by_another(stage: Stage, ref: Ref) -> bool:
    async def fold() -> bool:
        async with open_saver(stage.kind, stage.where) as saver:
            return await backend_of(saver).afold(ref, None, {"meanwhile": 1})

    if stage.kind == "memory":
        return stage.backend.fold(ref, None, {"meanwhile": 1})
    return asyncio.run(fold())


async def test_what_is_raised_on_a_snapshot_passes_through_and_leaves_the_saver_usable(
    stage: Stage,
) -> None:
    await stage.talk("one")

    def operation(saver: Saver) -> Steps[None]:
        yield from call(saver.get_tuple, saver.aget_tuple, stage.ref().config())
        raise LookupError("seen")

    with pytest.raises(LookupError, match="seen"):
        await stage.call("on_snapshot", operation)
    two = await stage.talk("two")
    # Committed, and not left in a transaction that somebody forgot.
    assert two in repr(stage.dump()["checkpoints"])


async def test_a_saver_whose_methods_were_replaced_does_not_wait_for_itself(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As instrumentation replaces them, on the instance."""
    head = await stage.talk()
    for name in ("get_tuple", "aget_tuple"):
        plain = getattr(stage.saver, name)
        monkeypatch.setattr(stage.saver, name, lambda config, plain=plain: plain(config))
    config = stage.ref().config()
    reading = stage.call("on_snapshot", _read_twice(config, lambda: None))
    found = await asyncio.wait_for(reading, 10)
    assert [head, head] == [each.checkpoint["id"] for each in found]
