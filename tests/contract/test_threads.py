"""The promises of ``backends/retention.py``, on every saver: read, rewrite and copy whole threads.

Histories are real runs on the bare saver. A thread and its copy are compared: the copy is cut,
the thread is left alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any, cast

import psycopg
import pytest
from langgraph.checkpoint.base import Checkpoint
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from langgraph.types import Command

from retaining_saver.backends.retention import Applied, RetentionBackend
from retaining_saver.entries import CARRIER, OrphanWrites, StoredThread
from retaining_saver.errors import PlanRefused
from retaining_saver.plan import plan, plan_prune, plan_without_runs
from retaining_saver.planned import Entry, RetentionPlan
from retaining_saver.policy import RetentionPolicy
from retaining_saver.records import Ref
from tests.contract.stage import Dump, Stage, open_stage
from tests.support import releases
from tests.support.faces import Face, faces_of
from tests.support.graphs import say
from tests.support.histories import BY_NAME, HISTORIES, History, Talk
from tests.support.savers import ONE_PER_BACKEND, Where
from tests.support.threads import dangling

Key = tuple[str, str]
Planner = Callable[[StoredThread, datetime], RetentionPlan]

# Everything made by a test is some hours old: no leaf, branch or orphan is too young to go.
LATER = timedelta(hours=5)


def _by(policy: RetentionPolicy) -> Planner:
    return lambda thread, now: plan(thread, policy, (), now)


def _pinned(thread: StoredThread, now: datetime) -> RetentionPlan:
    root = [c.checkpoint_id for c in thread.checkpoints if not c.checkpoint_ns]
    return plan_prune(thread, [Ref(thread.thread_id, "", root[len(root) // 2])], now)


PLANNERS: dict[str, Planner] = {
    "annotations": _by(RetentionPolicy()),
    "two turns": _by(RetentionPolicy(keep_last_turns=2)),
    "supersteps": _by(
        RetentionPolicy(
            keep_last_turns=3, compact_supersteps=True, drop_siblings_after=timedelta(hours=1)
        )
    ),
    "prune": lambda thread, now: plan_prune(thread, (), now),
    "prune with a pin": _pinned,
}


@pytest.fixture(params=ONE_PER_BACKEND)
async def stage(
    request: pytest.FixtureRequest, where: Where, thread_id: str
) -> AsyncIterator[Stage]:
    """A thread of each kind of saver in turn, seen through the face that the saver has."""
    kind: str = request.param
    async with open_stage(kind, where, thread_id, faces_of(kind)[-1]) as opened:
        yield opened


@pytest.fixture(params=ONE_PER_BACKEND)
async def by_face(
    request: pytest.FixtureRequest, where: Where, thread_id: str, face: Face
) -> AsyncIterator[Stage]:
    """A thread of each kind of saver in turn, seen through each face."""
    async with open_stage(request.param, where, thread_id, face) as opened:
        yield opened


def now() -> datetime:
    return datetime.now(timezone.utc) + LATER


def matches_nothing(_metadata: Mapping[str, Any]) -> bool:
    return False


async def lived(stage: Stage, name: str) -> Talk:
    """Let a thread have a history."""
    history = BY_NAME[name]
    talk = Talk(stage.kind, stage.saver, history.graph(stage.saver), stage.thread_id)
    await history.live(talk)
    return talk


async def read(stage: Stage) -> StoredThread:
    thread = await stage.call("stored", stage.thread_id, matches_nothing)
    assert isinstance(thread, StoredThread)
    return thread


async def planned(stage: Stage, planner: Planner) -> tuple[StoredThread, RetentionPlan]:
    thread = await read(stage)
    assert () == thread.problems
    return thread, planner(thread, now())


async def pruned(stage: Stage) -> tuple[StoredThread, RetentionPlan]:
    return await planned(stage, PLANNERS["prune"])


async def copied(stage: Stage, suffix: str) -> Stage:
    """Copy the thread; return the stage of the copy."""
    copy = replace(stage, thread_id=f"{stage.thread_id}-{suffix}")
    assert await stage.call("copy_thread", stage.thread_id, copy.thread_id, None)
    return copy


# What users see of a thread.


@dataclass(frozen=True)
class Seen:
    """One checkpoint: its own content, its pending writes, and what its delta channels read."""

    checkpoint: dict[str, Any]
    pending: list[Any]
    histories: dict[str, Any]


async def seen(stage: Stage) -> dict[Key, Seen]:
    """Read every checkpoint but carriers through the saver's own methods."""
    found = await stage.listed()
    delta = {c for f in found for c in f.metadata.get("counters_since_delta_snapshot") or ()}
    return {
        _key(f): Seen(f.checkpoint, f.pending_writes, await _histories(stage, f, delta))
        for f in found
        if not is_carrier(f)
    }


async def _histories(stage: Stage, found: Any, delta: Iterable[str]) -> dict[str, Any]:
    checkpoint = found.checkpoint
    channels = [
        c
        for c in sorted(delta)
        if c in checkpoint["channel_versions"] and c not in checkpoint["channel_values"]
    ]
    if not channels:
        return {}
    histories = await stage.host(
        "get_delta_channel_history", config=found.config, channels=channels
    )
    return {
        channel: (history.get("seed"), [value for _, _, value in history["writes"]])
        for channel, history in histories.items()
    }


def _key(found: Any) -> Key:
    return found.config["configurable"]["checkpoint_ns"], found.checkpoint["id"]


def is_carrier(found: Any) -> bool:
    mark = found.metadata.get("retention") or {}
    return mark.get("kind") == CARRIER and mark.get("id") == found.checkpoint["id"]


async def states(talk: Talk, ids: Iterable[str]) -> dict[str, Any]:
    """Materialise checkpoints of the root namespace as a graph does."""
    return {i: _shown(await talk.state(i)) for i in ids}


def _shown(state: Any) -> tuple[Any, ...]:
    tasks = [(t.name, t.interrupts, t.error, t.result) for t in state.tasks]
    return (state.values, state.next, tasks, state.interrupts)


def of_thread(dump: Dump, stage: Stage, other: Stage) -> Dump:
    """Say what ``stage`` holds as if it were the thread of ``other``."""
    return {
        table: [
            tuple(other.thread_id if value == stage.thread_id else value for value in row)
            for row in rows
        ]
        for table, rows in dump.items()
    }


def rows_of(stage: Stage) -> dict[str, int]:
    """Count the rows of each table."""
    dump = {name.removeprefix("checkpoint_"): rows for name, rows in stage.dump().items()}
    blobs = len(dump.get("blobs", ()))
    return {"checkpoints": len(dump["checkpoints"]), "writes": len(stage.writes()), "blobs": blobs}


# Rows that belong to nothing.


def orphan_writes(stage: Stage, stored: Iterable[Key]) -> set[str]:
    return {row[0] for row in stage.writes()} - {checkpoint_id for _, checkpoint_id in stored}


def orphan_blobs(stage: Stage, found: Iterable[Any]) -> set[tuple[str, ...]]:
    """Find blobs that no checkpoint names by its versions."""
    named_blobs = {
        (_key(f)[0], channel, str(version))
        for f in found
        for channel, version in f.checkpoint["channel_versions"].items()
    }
    return _blobs(stage) - named_blobs


def _blobs(stage: Stage) -> set[tuple[str, ...]]:
    if isinstance(stage.saver, InMemorySaver):
        keys = list(stage.saver.blobs)
        return {(ns, c, str(v)) for thread, ns, c, v in keys if thread == stage.thread_id}
    if stage.kind.endswith("sqlite"):
        return set()
    with psycopg.connect(stage.where.postgres) as pg:
        rows = pg.execute(
            "SELECT checkpoint_ns, channel, version FROM checkpoint_blobs WHERE thread_id = %s",
            (stage.thread_id,),
        )
        return {tuple(row) for row in rows.fetchall()}


# Reading


def test_the_backend_fulfils_the_protocol(stage: Stage) -> None:
    assert isinstance(stage.backend, RetentionBackend)


@pytest.mark.parametrize("history", HISTORIES, ids=str)
async def test_a_thread_is_read_as_the_saver_shows_it(stage: Stage, history: History) -> None:
    await lived(stage, history.name)
    thread = await read(stage)
    listed = {_key(found): found for found in await stage.listed()}
    assert ((), ()) == (thread.problems, thread.orphan_writes)
    assert sorted(listed) == [(c.checkpoint_ns, c.checkpoint_id) for c in thread.checkpoints]
    for c in thread.checkpoints:
        found = listed[c.checkpoint_ns, c.checkpoint_id]
        parent = found.parent_config and found.parent_config["configurable"]["checkpoint_id"]
        versions = found.checkpoint["channel_versions"]
        assert parent == c.parent_id
        assert found.metadata.get("source") == c.source
        assert found.metadata["step"] == c.step
        assert found.metadata.get("run_id") == c.run_id
        assert (found.metadata.get("parents") or {}) == dict(c.parents)
        assert set(found.metadata.get("counters_since_delta_snapshot") or ()) == c.counted
        assert datetime.fromisoformat(found.checkpoint["ts"]) == c.ts
        assert found.checkpoint["v"] == c.v
        assert set(versions) == c.versioned
        assert versions.get("__start__") == c.start_version


@pytest.mark.parametrize("history", HISTORIES, ids=str)
async def test_what_a_checkpoint_stores_is_told_without_its_values(
    stage: Stage, history: History
) -> None:
    await lived(stage, history.name)
    thread = await read(stage)
    listed = {_key(found): found for found in await stage.listed()}
    for c in thread.checkpoints:
        values = listed[c.checkpoint_ns, c.checkpoint_id].checkpoint["channel_values"]
        snapshots = {name for name, value in values.items() if isinstance(value, _DeltaSnapshot)}
        assert {name for name, value in values.items() if value != []} == c.stored
        assert snapshots == c.snapshots
        row = await stage.stored(c.checkpoint_id, c.checkpoint_ns)
        assert row.due == c.due


@pytest.mark.parametrize("history", HISTORIES, ids=str)
async def test_writes_are_summed_up(stage: Stage, history: History) -> None:
    await lived(stage, history.name)
    listed = {_key(found): found for found in await stage.listed()}
    for c in (await read(stage)).checkpoints:
        pending = listed[c.checkpoint_ns, c.checkpoint_id].pending_writes
        assert len(pending) == c.writes.rows
        assert {channel for _, channel, _ in pending} == c.writes.channels
        assert {t for t, channel, _ in pending if channel == "__interrupt__"} == set(c.writes.asked)
        assert any(not t.strip("0-") for t, _, _ in pending) == c.writes.null_task


async def test_leaves_and_only_leaves_have_the_digest_of_their_parent(stage: Stage) -> None:
    talk = await lived(stage, "leaves-delta")
    await talk.update(None, as_node="conclude")
    thread = await read(stage)
    digests = {c.checkpoint_id: c.fingerprint for c in thread.checkpoints}
    bodies = {i: (await stage.stored(i)).body for i in digests}
    same = {
        c.checkpoint_id
        for c in thread.checkpoints
        if digests.get(c.parent_id or "") == c.fingerprint
    }
    equal = {
        c.checkpoint_id
        for c in thread.checkpoints
        if bodies.get(c.parent_id or "") == bodies[c.checkpoint_id]
    }
    assert equal == same
    assert 4 <= len(same) < len(digests)


async def test_a_thread_that_is_not_stored_is_empty(by_face: Stage) -> None:
    assert StoredThread(by_face.thread_id) == await read(by_face)


async def test_writes_of_no_checkpoint_are_listed_apart(by_face: Stage) -> None:
    await by_face.talk()
    gone = str(uuid6())
    await by_face.put_write(gone, "task-1")
    await by_face.put_write(gone, "task-2")
    assert (OrphanWrites("", gone, 2),) == (await read(by_face)).orphan_writes


async def test_metadata_is_matched_as_the_saver_shows_it(by_face: Stage) -> None:
    await by_face.talk()
    shown: list[Mapping[str, Any]] = []

    def is_input(metadata: Mapping[str, Any]) -> bool:
        shown.append(metadata)
        return bool(metadata["source"] == "input")

    thread = await by_face.call("stored", by_face.thread_id, is_input)
    listed = {_key(found)[1]: found.metadata for found in await by_face.listed()}
    assert sorted(map(repr, listed.values())) == sorted(map(repr, shown))
    sources = {c.checkpoint_id: c.matches for c in thread.checkpoints}
    assert {i: m["source"] == "input" for i, m in listed.items()} == sources


# Applying


@pytest.mark.parametrize("history", HISTORIES, ids=str)
async def test_what_stays_reads_as_before(stage: Stage, history: History) -> None:
    talk = await lived(stage, history.name)
    before, shown = await seen(stage), await states(talk, await talk.ids())
    newest = _shown(await talk.state())
    for number, (name, planner) in enumerate(PLANNERS.items()):
        copy = await copied(stage, str(number))
        thread, decided = await planned(copy, planner)
        applied = await copy.call("apply", thread, decided)
        assert isinstance(applied, Applied), name
        after = await seen(copy)
        assert _kept(decided, before) == sorted(after), name
        moved_to = {g.parent_id for g in decided.graft if g.moves_writes}
        for key, now_seen in after.items():
            assert before[key].checkpoint == now_seen.checkpoint, (name, key)
            assert before[key].histories == now_seen.histories, (name, key)
            if key[1] not in moved_to:
                assert before[key].pending == now_seen.pending, (name, key)
        on_copy = replace(talk, thread_id=copy.thread_id)
        root = [i for ns, i in after if not ns]
        assert {i: shown[i] for i in root} == await states(on_copy, root), name
        assert newest == _shown(await on_copy.state()), name


def _kept(decided: RetentionPlan, before: Iterable[Key]) -> list[Key]:
    gone = {(e.checkpoint_ns, e.checkpoint_id) for e in decided.drop}
    return sorted(set(before) - gone)


@pytest.mark.parametrize("history", HISTORIES, ids=str)
async def test_no_row_is_left_that_belongs_to_nothing(stage: Stage, history: History) -> None:
    await lived(stage, history.name)
    unnamed = orphan_blobs(stage, await stage.listed())
    for number, (name, planner) in enumerate(PLANNERS.items()):
        copy = await copied(stage, str(number))
        assert await copy.call("apply", *await planned(copy, planner)), name
        found = await copy.listed()
        assert [] == dangling(found), name
        assert set() == orphan_writes(copy, map(_key, found)), name
        assert orphan_blobs(copy, found) <= unnamed, name


@pytest.mark.parametrize("history", HISTORIES, ids=str)
async def test_a_second_plan_changes_nothing(stage: Stage, history: History) -> None:
    await lived(stage, history.name)
    for number, (name, planner) in enumerate(PLANNERS.items()):
        copy = await copied(stage, str(number))
        first = await copy.call("apply", *await planned(copy, planner))
        once = copy.dump()
        thread, again = await planned(copy, planner if "pin" not in name else _same_pin(copy))
        assert again.changes is False, (name, again.describe())
        second = await copy.call("apply", thread, again)
        assert Applied(first.after, first.after) == second, name
        assert once == copy.dump(), name


def _same_pin(copy: Stage) -> Planner:
    return lambda thread, at: RetentionPlan(thread.thread_id)


@pytest.mark.parametrize("history", HISTORIES, ids=str)
async def test_later_runs_and_forks_equal_those_of_an_untouched_twin(
    stage: Stage, history: History
) -> None:
    talk = await lived(stage, history.name)
    for number, (name, planner) in enumerate(PLANNERS.items()):
        copy, twin = await copied(stage, f"{number}"), await copied(stage, f"{number}-twin")
        assert await copy.call("apply", *await planned(copy, planner)), name
        one, other = (replace(talk, thread_id=s.thread_id) for s in (copy, twin))
        for given in history.later:
            assert _said(await other.say(given)) == _said(await one.say(given)), name
            assert _timeless(await other.state()) == _timeless(await one.state()), name
        for at in (await one.ids())[:4:3] if _forks_are_told(history) else ():
            if at in await other.ids():
                expected = _said(await other.say(history.later[-1], at=at))
                assert expected == _said(await one.say(history.later[-1], at=at)), (name, at)
                assert _timeless(await other.state()) == _timeless(await one.state()), name


def _forks_are_told(history: History) -> bool:
    # Older releases read the writes that moved to a fork's parent into the fork, as they do
    # those that an exiting run stored there at once.
    return releases.SNAPSHOTS_BRANCHES or history.name != "exit-leaves-delta"


def _said(output: dict[str, Any]) -> dict[str, Any]:
    # The ids of questions that are asked anew differ from run to run.
    asked = [question.value for question in output.get("__interrupt__", ())]
    return {**releases.in_told_order(output), "__interrupt__": asked}


def _timeless(state: Any) -> tuple[Any, ...]:
    tasks = [(t.name, [i.value for i in t.interrupts], t.error, t.result) for t in state.tasks]
    return (releases.in_told_order(state.values), state.next, tasks)


@pytest.mark.parametrize("name", PLANNERS)
async def test_a_dry_run_changes_not_a_byte_and_counts_the_same(by_face: Stage, name: str) -> None:
    await lived(by_face, "leaves-delta")
    thread, decided = await planned(by_face, PLANNERS[name])
    before = by_face.dump()
    dry = await by_face.call("apply", thread, decided, dry_run=True)
    assert before == by_face.dump()
    real = await by_face.call("apply", thread, decided)
    assert dry == real
    assert before != by_face.dump()
    assert rows_of(by_face) == real.after.rows
    assert sum(real.after.bytes.values()) < sum(real.before.bytes.values())


async def _new_child(stage: Stage) -> None:
    head = await stage.stored()
    await stage.put_copy(head.checkpoint_id)


async def _another_write(stage: Stage) -> None:
    head = await stage.stored()
    await stage.put_write(head.checkpoint_id, "task-of-another-run")


async def _another_parent(stage: Stage) -> None:
    head = await stage.stored()
    stage.set_parent(head.checkpoint_id, None)


async def _a_row_less(stage: Stage) -> None:
    head = await stage.stored()
    assert head.parent_id is not None
    stage.delete_row(head.parent_id)


@pytest.mark.parametrize("change", [_new_child, _another_write, _another_parent, _a_row_less])
async def test_a_thread_that_changed_is_left_alone(
    by_face: Stage, change: Callable[[Stage], Any]
) -> None:
    await by_face.talk("one")
    await by_face.talk("two")
    thread, decided = await pruned(by_face)
    await change(by_face)
    before = by_face.dump()
    for dry_run in (True, False):
        assert await by_face.call("apply", thread, decided, dry_run=dry_run) is None
        assert before == by_face.dump()


async def test_a_broken_thread_is_measured_and_left_alone(by_face: Stage) -> None:
    await by_face.talk()
    head = await by_face.stored()
    assert head.parent_id is not None
    by_face.delete_row(head.parent_id)
    before = by_face.dump()
    thread, decided = await pruned(by_face)
    assert decided.refused
    applied = await by_face.call("apply", thread, decided)
    assert applied.before == applied.after
    assert len(before["checkpoints"]) == applied.before.rows["checkpoints"]
    assert before == by_face.dump()


async def test_a_whole_thread_goes_with_its_young_orphans(by_face: Stage) -> None:
    await lived(by_face, "calls-delta")
    await by_face.put_write(str(uuid6()), "task-1")
    kept = await copied(by_face, "kept")
    others = kept.dump()
    policy = RetentionPolicy(delete_idle_after=timedelta(hours=1), delete_waiting=True)
    thread, decided = await planned(by_face, _by(policy))
    assert decided.delete_thread
    rows = rows_of(by_face)
    applied = await by_face.call("apply", thread, decided)
    assert rows == applied.before.rows
    assert dict.fromkeys(applied.before.rows, 0) == applied.after.rows == applied.after.bytes
    assert [] == [row for rows in by_face.dump().values() for row in rows]
    assert others == kept.dump()


async def test_old_writes_of_no_checkpoint_go_and_young_ones_stay(by_face: Stage) -> None:
    await by_face.talk()
    old, young = str(uuid6()), "no-uuid-tells-no-time"
    for missing in (old, young):
        await by_face.put_write(missing, "task-1")
    thread, decided = await planned(by_face, PLANNERS["annotations"])
    assert (Entry("", old, "orphan"),) == decided.orphans
    assert await by_face.call("apply", thread, decided)
    assert {young} == orphan_writes(by_face, map(_key, await by_face.listed()))


async def test_an_orphan_whose_checkpoint_came_keeps_its_writes(by_face: Stage) -> None:
    head = await by_face.talk()
    missing = str(uuid6())
    await by_face.put_write(missing, "task-1")
    thread, decided = await planned(by_face, PLANNERS["annotations"])
    assert decided.orphans
    await by_face.put_copy(head, checkpoint_id=missing)
    before = by_face.dump()
    assert await by_face.call("apply", thread, decided) is None
    assert before == by_face.dump()


async def test_what_dropped_leaves_recorded_is_folded(by_face: Stage) -> None:
    await lived(by_face, "leaves-full")
    thread, decided = await pruned(by_face)
    assert await by_face.call("apply", thread, decided)
    (left,) = [found for found in await by_face.listed() if not is_carrier(found)]
    expected = {f"run-{n}": 7 for n in range(4)}
    assert expected == left.metadata["run_durations"]


async def test_the_newest_runs_are_remembered_where_each_leaf_repeats_the_whole_map(
    by_face: Stage,
) -> None:
    recorded: dict[str, int] = {}
    for n in range(6):
        head = await by_face.talk(f"turn-{n}")
        found = await by_face.host("get_tuple", by_face.ref(head).config())
        if n < 5:
            recorded[f"run-{n}"] = n
            metadata = {**found.metadata, "source": "update", "run_durations": dict(recorded)}
            copy = cast(Checkpoint, {**found.checkpoint, "id": str(uuid6())})
            await by_face.put(copy, head, metadata=metadata)
    thread, decided = await planned(by_face, lambda t, at: plan_prune(t, (), at, keep_runs=3))
    assert await by_face.call("apply", thread, decided)
    (left,) = await by_face.listed()
    assert {"run-2": 2, "run-3": 3, "run-4": 4} == left.metadata["run_durations"]


# Runs


async def test_the_threads_of_runs_are_found(by_face: Stage) -> None:
    mine, strange = f"run-{by_face.thread_id}", 'a "quoted" \\ run é'
    for run_id in (mine, strange):
        await lived_run(by_face, run_id)
    other = replace(by_face, thread_id=f"{by_face.thread_id}-other")
    await lived_run(other, f"{mine}-longer")
    assert [by_face.thread_id] == await by_face.call("threads_of_runs", [mine])
    assert by_face.thread_id in await by_face.call("threads_of_runs", [strange])
    found = await by_face.call("threads_of_runs", [mine, f"{mine}-longer", "no such run"])
    assert sorted([by_face.thread_id, other.thread_id]) == sorted(found)
    assert [] == await by_face.call("threads_of_runs", ["no such run"])
    assert [] == await by_face.call("threads_of_runs", [])


async def lived_run(stage: Stage, run_id: str) -> None:
    graph = BY_NAME["turns-full"].graph(stage.saver)
    talk = Talk(stage.kind, stage.saver, graph, stage.thread_id)
    await talk.say(say("hello"), run_id=run_id)


@pytest.mark.parametrize("name", ["questions-full", "questions-delta", "calls-full", "calls-delta"])
async def test_a_question_is_open_again_when_the_run_that_answered_it_goes(
    stage: Stage, name: str
) -> None:
    history = BY_NAME[name]
    talk = Talk(stage.kind, stage.saver, history.graph(stage.saver), stage.thread_id)
    await talk.say({"log": ["u"]}, run_id="asks")
    asked, shown = await seen(stage), _shown(await talk.state())
    twin = replace(talk, thread_id=(await copied(stage, "twin")).thread_id)
    await talk.say(_resume("cancelled"), run_id="answers")
    thread, decided = await planned(stage, lambda t, at: plan_without_runs(t, ["answers"], (), at))
    assert await stage.call("apply", thread, decided)
    assert sorted(asked) == sorted(await seen(stage))
    assert shown == _shown(await talk.state())
    assert _said(await twin.say(_resume("real"))) == _said(await talk.say(_resume("real")))
    assert _timeless(await twin.state()) == _timeless(await talk.state())


def _resume(answer: str) -> Any:
    return Command(resume=answer)


# Copying


@pytest.mark.parametrize("name", ["calls-delta", "leaves-full", "exit-delta"])
async def test_a_copy_equals_its_source_in_every_column(by_face: Stage, name: str) -> None:
    await lived(by_face, name)
    await by_face.put_write(str(uuid6()), "task-1")
    before = by_face.dump()
    copy = await copied(by_face, "copy")
    assert before == by_face.dump()
    assert _sorted(before) == _sorted(of_thread(copy.dump(), copy, by_face))


def _sorted(dump: Dump) -> dict[str, list[str]]:
    return {table: sorted(map(repr, rows)) for table, rows in dump.items()}


async def test_nothing_is_copied_onto_a_thread_that_has_any_row(by_face: Stage) -> None:
    await by_face.talk()
    holds_rows = await copied(by_face, "target")
    holds_writes = replace(by_face, thread_id=f"{by_face.thread_id}-writes")
    await holds_writes.put_write(str(uuid6()), "task-1")
    for target in (holds_rows, holds_writes):
        before = target.dump()
        args = (by_face.thread_id, target.thread_id, None)
        assert await by_face.call("copy_thread", *args) is False
        assert before == target.dump()


@pytest.mark.parametrize("history", HISTORIES, ids=str)
async def test_a_copy_of_the_newest_state_stands_alone(stage: Stage, history: History) -> None:
    talk = await lived(stage, history.name)
    before = stage.dump()
    _, decided = await pruned(stage)
    target = replace(stage, thread_id=f"{stage.thread_id}-latest")
    args = (stage.thread_id, target.thread_id, decided)
    assert await stage.call("copy_thread", *args)
    assert before == stage.dump()
    cut = await copied(stage, "cut")
    assert await cut.call("apply", *await pruned(cut))
    assert _kept(decided, await seen(stage)) == sorted(await seen(target))
    assert sorted(await seen(cut)) == sorted(await seen(target))
    on_target = replace(talk, thread_id=target.thread_id)
    assert _shown(await talk.state()) == _shown(await on_target.state())
    for given in history.later:
        assert _said(await talk.say(given)) == _said(await on_target.say(given))


async def test_a_copy_is_refused_that_was_planned_for_rows_that_are_gone(by_face: Stage) -> None:
    await by_face.talk()
    thread, latest = await pruned(by_face)
    assert await by_face.call("apply", thread, latest)
    target = replace(by_face, thread_id=f"{by_face.thread_id}-latest")
    with pytest.raises(PlanRefused, match=by_face.thread_id):
        await by_face.call("copy_thread", by_face.thread_id, target.thread_id, latest)
    assert [] == [row for rows in target.dump().values() for row in rows]
