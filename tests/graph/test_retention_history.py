"""What a thread tells of its runs after retention: every run that is still there, and no other."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from retaining_saver import RetentionPolicy
from tests.support import graphs, releases
from tests.support.retained import Retained, open_retained
from tests.support.savers import Saver, Where
from tests.support.threads import named

HOUR = timedelta(hours=1)
each_kind = pytest.mark.parametrize("kind", ["memory", "sqlite", "pg", "apg"])
each_way = pytest.mark.parametrize("annotations", ["leaf", "fold"])


def _chat(saver: Saver) -> Any:
    return graphs.chat_graph(saver, "delta")


async def _run(thread: Retained, name: str, at: str | None = None) -> str:
    """Let a run happen and record it; return the checkpoint at rest after it."""
    await thread.on_ours.say(graphs.say(name), run_id=name, at=at)
    rest = await thread.on_ours.at_rest()
    message = f"human-{name}"
    options = {"duration": int(name[-1]), "message_ids": [message]}
    await thread.do("record_run", named(thread.thread_id), name, **options)
    return rest


async def _told(thread: Retained, at: str | None = None) -> list[str]:
    history = await thread.do("run_history", named(thread.thread_id, at))
    assert {name: int(name[-1]) for name in history.durations} == history.durations
    assert {f"human-{n}": n for n in history.durations} == history.message_runs
    return sorted(history.durations)


POLICIES = {
    "annotations": RetentionPolicy(),
    "last turns": RetentionPolicy(keep_last_turns=2),
    "matching": RetentionPolicy(keep_where={"run_id": "run-1"}),
    "compacted": RetentionPolicy(compact_supersteps=True),
    "heads": RetentionPolicy(keep_last_turns=0, delete_idle_after=HOUR * 100),
}


@pytest.mark.parametrize("leaves_before", [False, True])
@each_way
@each_kind
async def test_every_run_of_the_main_line_is_told_however_much_goes(
    kind: str, annotations: str, leaves_before: bool, where: Where, thread_id: str
) -> None:
    """With ``leaves_before`` the recorded leaves were grown over, as before this library came."""
    options = {"annotations": annotations, "admission": "manual" if leaves_before else "auto"}
    async with open_retained(kind, where, thread_id, _chat, **options) as thread:
        runs = [f"run-{n}" for n in range(4)]
        for name in runs:
            await _run(thread, name)
        for name, policy in POLICIES.items():
            copy = await thread.copied(name)
            await copy.enforce(policy)
            assert runs == await _told(copy), name
            await _run(copy, "run-9")
            assert [*runs, "run-9"] == await _told(copy), name
            await copy.do("prune", [copy.thread_id])
            assert [*runs, "run-9"] == await _told(copy), name


@each_way
@each_kind
async def test_a_branch_that_goes_takes_its_runs_along(
    kind: str, annotations: str, where: Where, thread_id: str
) -> None:
    async with open_retained(kind, where, thread_id, _chat, annotations=annotations) as thread:
        base = await _run(thread, "run-0")
        branch = await _run(thread, "run-1", at=base)
        await _run(thread, "run-2", at=base)
        reclaimed = annotations == "fold" or releases.EXPLICIT_RUNS_READ_THE_HEAD
        assert ["run-0", *(["run-1"] if reclaimed else [])] == await _told(thread, branch)
        assert ["run-0", "run-2"] == await _told(thread)
        thread.clock.now += timedelta(days=1)  # The runs' own pins have expired.
        kept = await thread.copied("kept")
        await kept.enforce(RetentionPolicy(keep_last_turns=1))
        assert ["run-0", "run-2"] == await _told(kept)
        assert {"run-1"} <= set(await _told(kept, branch))
        await thread.enforce(RetentionPolicy(drop_siblings_after=HOUR))
        assert ["run-0", "run-2"] == await _told(thread)
        await thread.do("prune", [thread_id])
        assert ["run-0", "run-2"] == await _told(thread)


@each_way
@each_kind
async def test_a_branch_that_stays_tells_its_runs_however_much_of_it_goes(
    kind: str, annotations: str, where: Where, thread_id: str
) -> None:
    async with open_retained(kind, where, thread_id, _chat, annotations=annotations) as thread:
        first = await _run(thread, "run-0")
        await _run(thread, "run-1")
        middle = await _run(thread, "run-2")
        branch = await _run(thread, "run-3")
        # On older releases a run that is given a checkpoint is not admitted.
        await thread.do("admit", named(thread_id))
        other = await _run(thread, "run-4", at=middle)
        await thread.do("admit", named(thread_id))
        await _run(thread, "run-5", at=first)
        ends = (branch, other, None)
        told = [await _told(thread, end) for end in ends]
        thread.clock.now += timedelta(days=1)  # The runs' own pins have expired.
        for policy in (RetentionPolicy(keep_last_turns=1), RetentionPolicy(keep_last_turns=2)):
            copy = await thread.copied(str(policy.keep_last_turns))
            await copy.enforce(policy)
            assert told == [await _told(copy, end) for end in ends]
            await _run(copy, "run-9", at=branch)
            assert sorted({*told[0], "run-9"}) == sorted({*(await _told(copy)), "run-3"})


@each_way
@each_kind
async def test_a_deleted_run_is_told_no_longer(
    kind: str, annotations: str, where: Where, thread_id: str
) -> None:
    async with open_retained(kind, where, thread_id, _chat, annotations=annotations) as thread:
        # A run goes from every thread that has it, also from other tests'.
        runs = [f"{thread_id}-{n}" for n in range(4)]
        for run_id in runs[:3]:
            await _run(thread, run_id)
        await thread.do("delete_for_runs", [runs[2]])
        assert runs[:2] == await _told(thread)
        await _run(thread, runs[3])
        assert [*runs[:2], runs[3]] == await _told(thread)
        await thread.do("delete_for_runs", [runs[1]])
        assert [runs[0], runs[3]] == await _told(thread)


@each_kind
async def test_of_dropped_turns_the_newest_thousand_runs_are_told(
    kind: str, where: Where, thread_id: str
) -> None:
    async with open_retained(kind, where, thread_id, _chat, annotations="fold") as thread:
        await thread.on_ours.say(graphs.say("one"))
        many = {f"run-{n:04}": 1 for n in range(1003)}
        await thread.do("annotate", named(thread_id), {"run_durations": many})
        await _run(thread, "run-7")
        await _run(thread, "run-8")
        await thread.enforce(RetentionPolicy(keep_last_turns=1))
        history = await thread.do("run_history", named(thread_id))
        # The checkpoint that the last turn started from was given run-7, which counts.
        expected = [*(f"run-{n:04}" for n in range(4, 1003)), "run-7", "run-8"]
        assert expected == sorted(history.durations)
        await _run(thread, "run-9")
        await thread.do("prune", [thread_id])
        history = await thread.do("run_history", named(thread_id))
        expected = [*(f"run-{n:04}" for n in range(6, 1003)), "run-7", "run-8", "run-9"]
        assert expected == sorted(history.durations)
