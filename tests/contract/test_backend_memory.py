"""What the memory backend promises beyond the contract: one lock for one storage, and no gap."""

from __future__ import annotations

import copy
import gc
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

import pytest
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.memory import InMemorySaver

from retaining_saver.backends import memory
from retaining_saver.backends.base import Movable
from tests.contract.stage import Stage, backend_of, checkpoint, open_stage
from tests.support.faces import SYNC
from tests.support.savers import Where

TASK = "6f8a2f0e-5c55-5d0f-9d7c-0f3a3b1f2c11"
EXIT_TASK = "00000003-5c55-5d0f-9d7c-0f3a3b1f2c11"


@pytest.fixture
async def stage(where: Where, thread_id: str) -> AsyncIterator[Stage]:
    async with open_stage("memory", where, thread_id, SYNC) as opened:
        yield opened


@pytest.fixture
def switching() -> Iterator[None]:
    """Let threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


async def test_a_copy_of_the_saver_shares_the_lock(stage: Stage, switching: None) -> None:
    target = stage.ref(await stage.put(checkpoint()))
    backends = [backend_of(saver) for saver in (stage.saver, copy.copy(stage.saver))]

    def fold(number: int) -> None:
        for i in range(50):
            added = {"run_durations": {f"{number}-{i}": i}}
            backends[number % 2].fold(target, str(uuid6()), added)

    threads = [threading.Thread(target=fold, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 200 == len((await stage.stored()).metadata["run_durations"])


def test_locks_go_with_their_backends() -> None:
    gc.collect()
    before = len(memory._locks)
    backends = [backend_of(InMemorySaver()) for _ in range(3)]
    assert before + 3 == len(memory._locks)
    del backends
    gc.collect()
    assert before == len(memory._locks)


class Interrupted(dict[str, Any]):
    """The checkpoints of a namespace; another thread's call arrives while one is taken out."""

    meanwhile: Callable[[], Any]

    def pop(self, *args: Any) -> Any:
        taken = super().pop(*args)
        self.meanwhile()
        return taken


@pytest.mark.parametrize("what", ["child", "newer checkpoint", "write"])
async def test_what_slips_in_beside_the_deletion_undoes_it(stage: Stage, what: str) -> None:
    leaf, parent = await stage.leaf_and_parent()
    saver = cast(InMemorySaver, stage.saver)
    entries = Interrupted(saver.storage[stage.thread_id][""])
    saver.storage[stage.thread_id][""] = entries
    parents = {"child": leaf.checkpoint_id, "newer checkpoint": parent.checkpoint_id}

    def meanwhile() -> None:
        if what == "write":
            config = stage.ref(leaf.checkpoint_id).config()
            saver.put_writes(config, [("messages", "late")], TASK)
        else:
            saver.put(stage.ref(parents[what]).config(), checkpoint(), {}, {})

    entries.meanwhile = meanwhile
    expected = "has_writes" if what == "write" else "superseded"
    metadata = parent.metadata
    assert expected == await stage.reclaim(leaf, parent)
    assert leaf == await stage.stored(leaf.checkpoint_id)
    assert metadata == (await stage.stored(parent.checkpoint_id)).metadata


async def test_a_write_that_slips_in_keeps_the_movable_ones(stage: Stage) -> None:
    leaf, parent = await stage.leaf_and_parent()
    await stage.put_write(leaf.checkpoint_id, EXIT_TASK)
    saver = cast(InMemorySaver, stage.saver)
    entries = Interrupted(saver.storage[stage.thread_id][""])
    saver.storage[stage.thread_id][""] = entries
    config = stage.ref(leaf.checkpoint_id).config()
    entries.meanwhile = lambda: saver.put_writes(config, [("messages", "late")], TASK)
    assert "has_writes" == await stage.reclaim(leaf, parent, movable=Movable(exits=True))
    on_the_leaf = {row[1] for row in stage.writes() if row[0] == leaf.checkpoint_id}
    assert {EXIT_TASK, TASK} == on_the_leaf
