"""A process is killed at each statement in turn; the next process finds the thread whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from langgraph.types import Command

from retaining_saver import RetainingSaver
from tests.faults.victim import OPERATIONS
from tests.support import graphs
from tests.support.faces import Face
from tests.support.savers import Saver, Where, open_saver
from tests.support.threads import dangling, face_of, metadata_only, named, root, stored

ROOT = Path(__file__).parents[2]
RECORDED_BEFORE = {
    "admit": ["one"],
    "admit-two": ["one", "two"],
    "admit-late-child": ["one"],
    "record": [],
    "record-under-leaf": ["one"],
    "record-waiting": [],
    "record-by-put": [],
    "record-by-put-at-once": [],
    "ask-under-leaf": ["one"],
    "run": ["one"],
    "run-at-put": ["one"],
}


def _kill_at_each_statement(kind: str, where: Where, operation: str) -> int:
    place = where.postgres if "pg" in kind else str(where.sqlite)
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.victim", kind, place, operation],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    return int(done.stdout)


# The awaited SQLite and the blocking Postgres are spared the operations that take seconds.
CASES = [
    *((kind, operation) for operation in OPERATIONS for kind in ("sqlite", "apg")),
    *((kind, operation) for operation in ("admit", "record") for kind in ("asqlite", "pg")),
]


@pytest.mark.parametrize(("kind", "operation"), CASES)
async def test_a_killed_process_leaves_a_whole_thread(
    kind: str, operation: str, empty_where: Where
) -> None:
    kills = _kill_at_each_statement(kind, empty_where, operation)
    assert kills > 5
    async with open_saver(kind, empty_where) as bare:
        for n in range(1, kills + 1):
            await _check(face_of(kind), bare, operation, f"{operation}-{n}")


async def _check(face: Face, bare: Saver, operation: str, thread_id: str) -> None:
    ours = RetainingSaver(bare)
    config = named(thread_id)
    recorded = RECORDED_BEFORE[operation]
    rows = await stored(face, bare, thread_id)
    if operation != "admit-late-child":  # There it is what admission is to heal.
        assert [] == dangling(rows), thread_id
        assert set(recorded) <= set(await _told(face, ours, thread_id)), thread_id
    outcome = (await face(ours.admit, ours.aadmit, config)).outcome
    assert outcome in ("reclaimed", "no_leaf"), thread_id
    rows = root(await stored(face, bare, thread_id))
    assert [] == dangling(rows), thread_id
    assert rows[-1].checkpoint["id"] not in metadata_only(rows), thread_id
    if operation.startswith("record"):
        await face(ours.record_run, ours.arecord_run, config, "killed", duration=7)
        recorded = [*recorded, "killed"]
    assert sorted(recorded) == await _told(face, ours, thread_id), thread_id
    await _goes_on(face, ours, thread_id, waiting=operation == "record-waiting")
    assert [] == dangling(await stored(face, bare, thread_id)), thread_id
    assert sorted(recorded) == await _told(face, ours, thread_id), thread_id


async def _told(face: Face, ours: RetainingSaver, thread_id: str) -> list[str]:
    history = await face(ours.run_history, ours.arun_history, named(thread_id))
    return sorted(history.durations)


async def _goes_on(face: Face, ours: RetainingSaver, thread_id: str, *, waiting: bool) -> None:
    graph: Any = graphs.asking_graph(ours) if waiting else graphs.chat_graph(ours)
    config = named(thread_id)
    state = await face(graph.get_state, graph.aget_state, config)
    if waiting:
        assert ["which?"] == [i.value for i in state.interrupts], thread_id
        resumed: Any = Command(resume="x")
        done = await face(graph.invoke, graph.ainvoke, resumed, config)
        assert ["p", "x"] == sorted(done["log"]), thread_id
        return
    if state.tasks:  # Killed in the middle of a run, which goes on from where it was.
        await face(graph.invoke, graph.ainvoke, None, config)
    done = await face(graph.invoke, graph.ainvoke, graphs.say("z"), config)
    said = [m.id for m in done["messages"]]
    turns = [i for i in said if i.startswith("human")]
    assert turns in (["human-a", "human-z"], ["human-a", "human-b", "human-z"]), thread_id
    assert 4 * len(turns) == len(set(said)) == len(said), thread_id
