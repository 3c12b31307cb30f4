"""One holder per conversation thread, among OS threads and tasks of several loops."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from retaining_saver.locks import ThreadLocks

PATIENCE = 20.0
"""Seconds after which a test counts as hung."""


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(int(PATIENCE * 1000)):
        if condition():
            return
        await asyncio.sleep(0.001)
    pytest.fail("the condition never became true")


async def held_once(locks: ThreadLocks, thread_id: str) -> int:
    """Take a lock that is expected to be free; return how many locks there are meanwhile."""

    async def hold() -> int:
        async with locks.hold(thread_id):
            return len(locks)

    return await asyncio.wait_for(hold(), PATIENCE)


def waiters(locks: ThreadLocks, thread_id: str) -> int:
    """Count holders and waiters."""
    entry = locks._entries.get(thread_id)
    return len(entry.os_threads) if entry else 0


class Exclusive:
    """Notices two that are inside at once."""

    def __init__(self) -> None:
        self.inside = 0
        self.most = 0
        self.entered = 0

    def enter(self) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.entered += 1

    def leave(self) -> None:
        self.inside -= 1


def test_sixty_threads_and_sixty_tasks_on_two_loops_exclude_each_other() -> None:
    locks = ThreadLocks()
    rooms = {name: Exclusive() for name in ("a", "b", "c")}
    start = threading.Barrier(62)

    def worker(name: str) -> None:
        start.wait(PATIENCE)
        for _ in range(10):
            with locks.hold(name):
                rooms[name].enter()
                threading.Event().wait(0.0001)
                rooms[name].leave()

    async def task(name: str) -> None:
        for _ in range(10):
            async with locks.hold(name):
                rooms[name].enter()
                await asyncio.sleep(0)
                rooms[name].leave()

    def loop() -> None:
        async def main() -> None:
            tasks = asyncio.gather(*(task("abc"[n % 3]) for n in range(30)))
            await asyncio.wait_for(tasks, PATIENCE)

        start.wait(PATIENCE)
        asyncio.run(main())

    with ThreadPoolExecutor(62) as pool:
        work = [pool.submit(worker, "abc"[n % 3]) for n in range(60)]
        work += [pool.submit(loop), pool.submit(loop)]
        for done in work:
            done.result(PATIENCE)
    assert {"a": 1, "b": 1, "c": 1} == {name: room.most for name, room in rooms.items()}
    assert {"a": 400, "b": 400, "c": 400} == {name: room.entered for name, room in rooms.items()}
    assert 0 == len(locks)


async def test_another_thread_id_is_not_waited_for() -> None:
    locks = ThreadLocks()
    async with locks.hold("a"):
        assert 2 == await held_once(locks, "b")
        with locks.hold("c"):
            assert 2 == len(locks)
    assert 0 == len(locks)


async def test_waiting_for_an_os_thread_does_not_block_the_loop() -> None:
    locks = ThreadLocks()
    inside, leave = threading.Event(), threading.Event()

    def holder() -> None:
        with locks.hold("t"):
            inside.set()
            leave.wait(PATIENCE)

    async def waiter() -> str:
        async with locks.hold("t"):
            return "in"

    held = asyncio.create_task(asyncio.to_thread(holder))
    await until(inside.is_set)
    waiting = asyncio.create_task(waiter())
    # These turns of the loop happen while the task waits; a blocked loop would never set this.
    await until(lambda: waiters(locks, "t") == 2)
    await asyncio.sleep(0.01)
    assert not waiting.done()
    leave.set()
    assert "in" == await asyncio.wait_for(waiting, PATIENCE)
    await held
    assert 0 == len(locks)


async def test_an_os_thread_waits_for_a_task() -> None:
    locks = ThreadLocks()
    order: list[str] = []

    def worker() -> None:
        with locks.hold("t"):
            order.append("thread")

    async with locks.hold("t"):
        working = asyncio.create_task(asyncio.to_thread(worker))
        await until(lambda: waiters(locks, "t") == 2)
        order.append("task")
    await asyncio.wait_for(working, PATIENCE)
    assert ["task", "thread"] == order
    assert 0 == len(locks)


async def test_first_come_first_served() -> None:
    locks = ThreadLocks()
    served: list[int] = []

    async def waiter(number: int) -> None:
        async with locks.hold("t"):
            served.append(number)

    def queued(count: int) -> bool:
        return waiters(locks, "t") == count

    async with locks.hold("t"):
        tasks = []
        for number in range(5):
            tasks.append(asyncio.create_task(waiter(number)))
            await until(partial(queued, number + 2))
    await asyncio.gather(*tasks)
    assert [0, 1, 2, 3, 4] == served


async def test_a_cancelled_waiter_leaves_nothing_behind() -> None:
    locks = ThreadLocks()

    async def waiter() -> None:
        async with locks.hold("t"):
            pytest.fail("the lock was held by another")

    async with locks.hold("t"):
        waiting = asyncio.create_task(waiter())
        await until(lambda: waiters(locks, "t") == 2)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await waiting
        assert 1 == waiters(locks, "t")
    # The error still refers to the frames of the waiter; they must not keep the lock object.
    assert cancelled.value.__traceback__ is not None
    assert 0 == len(locks)
    assert 1 == await held_once(locks, "t")


@pytest.mark.parametrize("cancel_first", [True, False])
async def test_a_cancellation_that_meets_the_hand_over_loses_no_lock(cancel_first: bool) -> None:
    locks = ThreadLocks()
    entered: list[str] = []

    async def waiter(name: str) -> None:
        async with locks.hold("t"):
            entered.append(name)

    hold = locks.hold("t")
    await hold.__aenter__()
    first = asyncio.create_task(waiter("first"))
    await until(lambda: waiters(locks, "t") == 2)
    second = asyncio.create_task(waiter("second"))
    await until(lambda: waiters(locks, "t") == 3)
    # No turn of the loop in between: the first waiter is both handed the lock and cancelled.
    if cancel_first:
        first.cancel()
        await hold.__aexit__(None, None, None)
    else:
        await hold.__aexit__(None, None, None)
        first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await asyncio.wait_for(second, PATIENCE)
    assert ["second"] == entered
    assert 0 == len(locks)


def test_cancellations_racing_with_os_threads_lose_no_lock() -> None:
    locks = ThreadLocks()
    room = Exclusive()
    stop = threading.Event()

    def worker() -> None:
        while not stop.is_set():
            with locks.hold("t"):
                room.enter()
                room.leave()

    async def waiter() -> None:
        async with locks.hold("t"):
            room.enter()
            try:
                await asyncio.sleep(0)
            finally:
                room.leave()

    async def main() -> None:
        for turn in range(200):
            task = asyncio.create_task(waiter())
            for _ in range(turn % 7):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait((task,), timeout=PATIENCE)
            assert task.done()

    with ThreadPoolExecutor(2) as pool:
        workers = [pool.submit(worker) for _ in range(2)]
        try:
            asyncio.run(main())
        finally:
            stop.set()
        for done in workers:
            done.result(PATIENCE)
    assert 1 == room.most
    with locks.hold("t"):
        assert 1 == len(locks)
    assert 0 == len(locks)


async def test_an_error_inside_frees_the_lock() -> None:
    locks = ThreadLocks()
    with pytest.raises(LookupError), locks.hold("t"):
        raise LookupError
    with pytest.raises(LookupError):
        async with locks.hold("t"):
            raise LookupError
    assert 0 == len(locks)


def test_a_thread_that_asks_for_what_it_holds_is_told_so() -> None:
    locks = ThreadLocks()
    with locks.hold("t"):
        with pytest.raises(RuntimeError, match="would never end"), locks.hold("t"):
            pass
        assert 1 == waiters(locks, "t")
    assert 0 == len(locks)


async def test_blocking_the_loop_whose_task_holds_the_lock_is_refused() -> None:
    locks = ThreadLocks()
    async with locks.hold("t"):
        with pytest.raises(RuntimeError, match="Use the async methods"), locks.hold("t"):
            pass
    with locks.hold("t"):
        assert 1 == len(locks)


async def test_blocking_the_loop_whose_task_is_next_in_the_queue_is_refused() -> None:
    locks = ThreadLocks()
    inside, leave = threading.Event(), threading.Event()

    def holder() -> None:
        with locks.hold("t"):
            inside.set()
            leave.wait(PATIENCE)

    async def waiter() -> None:
        async with locks.hold("t"):
            pass

    held = asyncio.create_task(asyncio.to_thread(holder))
    await until(inside.is_set)
    waiting = asyncio.create_task(waiter())
    await until(lambda: waiters(locks, "t") == 2)
    with pytest.raises(RuntimeError, match="would never end"), locks.hold("t"):
        pass
    leave.set()
    await asyncio.wait_for(asyncio.gather(held, waiting), PATIENCE)
    assert 0 == len(locks)


def test_a_hold_in_use_is_refused_and_can_be_used_again_afterwards() -> None:
    locks = ThreadLocks()
    hold = locks.hold("t")
    with hold:
        with pytest.raises(RuntimeError, match="in use"), hold:
            pass
        assert 1 == waiters(locks, "t")
    with hold:
        assert 1 == waiters(locks, "t")
    assert 0 == len(locks)


def test_leaving_what_was_never_entered_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="not held"):
        ThreadLocks().hold("t").__exit__(None, None, None)


def test_an_operation_finished_by_another_os_thread_frees_the_lock() -> None:
    locks = ThreadLocks()
    hold = locks.hold("t")
    hold.__enter__()
    other = threading.Thread(target=hold.__exit__, args=(None, None, None))
    other.start()
    other.join(PATIENCE)
    with locks.hold("t"):
        assert 1 == waiters(locks, "t")
    assert 0 == len(locks)


def test_a_waiter_whose_loop_was_closed_gives_the_lock_back_when_it_is_collected() -> None:
    locks = ThreadLocks()

    async def waiter() -> None:
        async with locks.hold("t"):
            pass

    def abandon() -> None:
        loop = asyncio.new_event_loop()
        task = loop.create_task(waiter())
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
        # What the loop would say of a task destroyed while it waits is expected here.
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # not in the stubs

    with locks.hold("t"):
        thread = threading.Thread(target=abandon)
        thread.start()
        thread.join(PATIENCE)
    gc.collect()
    assert 1 == asyncio.run(held_once(locks, "t"))
    assert 0 == len(locks)
