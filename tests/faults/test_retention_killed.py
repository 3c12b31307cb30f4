"""A process is killed at each statement of a retention in turn: all of it happened, or nothing.

``python -m tests.faults.test_retention_killed KIND PLACE OPERATION`` is the process: for n = 1, 2,
... it forks a child that is killed by SIGKILL at its n-th statement, and it ends when a child gets
through. It prints every n.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from retaining_saver import RetainingSaver, RetentionPolicy
from tests.faults.victim import LIMIT, Trap, open_victim
from tests.support import graphs
from tests.support.faces import Face
from tests.support.retained import Retained, open_retained, renamed
from tests.support.savers import Where
from tests.support.threads import face_of

ROOT = Path(__file__).parents[2]
SOURCE = "the source"


async def _prune(face: Face, ours: RetainingSaver, thread_id: str) -> None:
    await face(ours.prune, ours.aprune, [thread_id])


async def _enforce(face: Face, ours: RetainingSaver, thread_id: str) -> None:
    policy = RetentionPolicy(keep_last_turns=2, compact_supersteps=True)
    await face(ours.enforce_thread_retention, ours.aenforce_thread_retention, thread_id, policy)


async def _delete_idle(face: Face, ours: RetainingSaver, thread_id: str) -> None:
    policy = RetentionPolicy(delete_idle_after=timedelta(hours=1))
    await face(ours.enforce_thread_retention, ours.aenforce_thread_retention, thread_id, policy)


async def _copy(face: Face, ours: RetainingSaver, thread_id: str) -> None:
    await face(ours.copy_thread, ours.acopy_thread, SOURCE, thread_id)


async def _copy_latest(face: Face, ours: RetainingSaver, thread_id: str) -> None:
    await face(ours.copy_thread, ours.acopy_thread, SOURCE, thread_id, latest_only=True)


OPERATIONS: dict[str, Callable[[Face, RetainingSaver, str], Awaitable[None]]] = {
    "prune": _prune,
    "enforce": _enforce,
    "delete-idle": _delete_idle,
    "copy": _copy,
    "copy-latest": _copy_latest,
}
CASES = [
    ("sqlite", "prune"),
    ("sqlite", "copy-latest"),
    ("asqlite", "enforce"),
    ("pg", "prune"),
    ("pg", "delete-idle"),
    ("apg", "copy-latest"),
]
# On Postgres the trap counts both before and after each statement; only the latter kills.
STRIDES = {"sqlite": 1, "asqlite": 1, "pg": 2, "apg": 2}


def _is_copy(operation: str) -> bool:
    return operation.startswith("copy")


def _later() -> datetime:
    return datetime.now(timezone.utc) + timedelta(hours=5)


async def _history(thread: Retained) -> None:
    for n in range(3):
        await thread.on_bare.say({"log": [f"u{n}"], "notes": []})
        await thread.on_bare.leaf(f"run-{n}")


@pytest.mark.parametrize(("kind", "operation"), CASES)
async def test_a_killed_retention_happened_whole_or_not_at_all(
    kind: str, operation: str, empty_where: Where
) -> None:
    async with open_retained(kind, empty_where, SOURCE, graphs.two_delta_graph) as source:
        await _history(source)
        copies = _is_copy(operation)
        before = renamed({t: [] for t in source.dump()} if copies else source.dump(), SOURCE, "t")
        *killed, through = _kill_at_each_statement(kind, empty_where, operation)
        assert len(killed) >= 4
        done = source.named(f"{operation}-{through}")
        after = renamed(done.dump(), done.thread_id, "t")
        assert before != after
        found = []
        for n in killed:
            thread = source.named(f"{operation}-{n}")
            left = renamed(thread.dump(), thread.thread_id, "t")
            assert left in (before, after), n
            found.append(left == after)
            if n == killed[-1] and left == before:  # What was killed is done by the next process.
                await OPERATIONS[operation](face_of(kind), thread.ours, thread.thread_id)
                assert after == renamed(thread.dump(), thread.thread_id, "t"), n
        assert not found[0]
        assert sorted(found) == found


def _kill_at_each_statement(kind: str, where: Where, operation: str) -> list[int]:
    place = where.postgres if "pg" in kind else str(where.sqlite)
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.test_retention_killed", kind, place, operation],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    return [int(n) for n in done.stdout.split()]


# What the other process runs


async def _live(kind: str, place: str, operation: str, at: int) -> None:
    trap = Trap(at)
    async with AsyncExitStack() as stack:
        bare = await open_victim(kind, place, trap, stack)
        ours, face = RetainingSaver(bare, clock=_later), face_of(kind)
        thread_id = f"{operation}-{at}"
        if not _is_copy(operation):
            await face(ours.copy_thread, ours.acopy_thread, SOURCE, thread_id)
        trap.armed = True
        await OPERATIONS[operation](face, ours, thread_id)


def _kills(kind: str, place: str, operation: str) -> Iterator[int]:
    stride = STRIDES[kind]
    for at in range(stride, LIMIT, stride):
        child = os.fork()
        if child == 0:
            try:
                asyncio.run(_live(kind, place, operation, at))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        yield at
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0, f"thread {operation}-{at} failed by itself"
            return
    raise AssertionError(f"{operation} takes more than {LIMIT} statements")


if __name__ == "__main__":
    sys.stdout.write(" ".join(map(str, _kills(*sys.argv[1:4]))))
