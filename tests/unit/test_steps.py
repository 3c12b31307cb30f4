"""Steps mean what inline code means, in both drivers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from retaining_saver._steps import Steps, arun, call, run

T = TypeVar("T")
Driver = Callable[[Steps[Any]], Any]


def driven(steps: Steps[T]) -> T:
    """Run with the awaitable spellings, in a loop of its own."""
    return asyncio.run(arun(steps))


both_drivers = pytest.mark.parametrize("drive", [run, driven], ids=["run", "arun"])


class World:
    """Effects that say their name, fail with what they are given, or wait to be let go."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.begun = asyncio.Event()
        self.gate = asyncio.Event()
        self.ended = asyncio.Event()

    def do(self, name: str, error: BaseException | None = None) -> str:
        self.log.append(name)
        if error is not None:
            raise error
        return f"{name} done"

    async def ado(self, name: str, error: BaseException | None = None) -> str:
        self.log.append(f"a{name}")
        await asyncio.sleep(0)
        if error is not None:
            raise error
        return f"{name} done"

    async def aslow(self, name: str, error: BaseException | None = None) -> str:
        """Begin, wait for the gate, end."""
        self.log.append(f"{name} begins")
        self.begun.set()
        await self.gate.wait()
        self.log.append(f"{name} ends")
        self.ended.set()
        if error is not None:
            raise error
        return f"{name} done"

    def effect(self, name: str, error: BaseException | None = None) -> Steps[str]:
        return call(self.do, self.ado, name, error=error)

    def slow(self, name: str, error: BaseException | None = None) -> Steps[str]:
        return call(self.do, self.aslow, name, error=error)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# Results and the order of effects


@pytest.mark.parametrize(("drive", "prefix"), [(run, ""), (driven, "a")], ids=["run", "arun"])
def test_each_driver_uses_its_own_spelling_in_order(drive: Driver, prefix: str) -> None:
    world = World()

    def operation() -> Steps[list[str]]:
        one = yield from world.effect("one")
        two = yield from world.effect("two")
        return [one, two]

    assert ["one done", "two done"] == drive(operation())
    assert [f"{prefix}one", f"{prefix}two"] == world.log


@both_drivers
def test_an_operation_without_effects_returns_its_value(drive: Driver) -> None:
    def operation(*names: str) -> Steps[int]:
        for name in names:
            yield from World().effect(name)
        return 7

    assert 7 == drive(operation())


@both_drivers
def test_an_operation_that_returns_nothing_returns_none(drive: Driver) -> None:
    def operation() -> Steps[None]:
        yield from World().effect("one")

    assert drive(operation()) is None


@both_drivers
def test_one_effect_is_an_operation_by_itself(drive: Driver) -> None:
    assert "one done" == drive(World().effect("one"))


@both_drivers
def test_operations_nest(drive: Driver) -> None:
    world = World()

    def inner(name: str) -> Steps[str]:
        result = yield from world.effect(name)
        return f"<{result}>"

    def outer() -> Steps[str]:
        one = yield from inner("one")
        two = yield from inner("two")
        return one + two

    assert "<one done><two done>" == drive(outer())


def test_a_returned_exception_is_a_value() -> None:
    error = ValueError()

    def operation() -> Steps[ValueError]:
        yield from World().effect("one")
        return error

    assert run(operation()) is error


def test_the_awaitable_may_be_a_future() -> None:
    async def main() -> str:
        def effect() -> asyncio.Future[str]:
            future = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(future.set_result, "later")
            return future

        return await arun(call(lambda: "now", effect))

    assert "later" == asyncio.run(main())


# Errors


@pytest.mark.parametrize(
    ("drive", "error"),
    [
        (run, ValueError("x")),
        (driven, ValueError("x")),
        # A loop does not hand these to tasks.
        (run, KeyboardInterrupt()),
        (run, SystemExit(3)),
    ],
)
def test_the_operation_sees_the_very_error_of_the_effect(
    drive: Driver, error: BaseException
) -> None:
    seen: list[BaseException] = []

    def operation() -> Steps[None]:
        try:
            yield from World().effect("one", error)
        except BaseException as caught:
            seen.append(caught)
            raise

    with pytest.raises(type(error)) as raised:
        drive(operation())
    assert raised.value is error
    assert seen[0] is error
    assert error.__context__ is None
    assert "do" in {frame.name.lstrip("a") for frame in traceback.extract_tb(error.__traceback__)}


@both_drivers
def test_an_error_that_the_operation_handles_is_over(drive: Driver) -> None:
    world = World()

    def operation() -> Steps[str]:
        try:
            yield from world.effect("one", ValueError())
        except ValueError:
            result = yield from world.effect("two")
            return f"recovered: {result}"
        return "not reached"

    assert "recovered: two done" == drive(operation())


@both_drivers
def test_an_error_of_the_operation_keeps_the_effects_as_its_context(drive: Driver) -> None:
    cause = ValueError("cause")

    def operation() -> Steps[None]:
        try:
            yield from World().effect("one", cause)
        except ValueError:
            raise LookupError("own") from None

    with pytest.raises(LookupError, match="own") as raised:
        drive(operation())
    assert raised.value.__context__ is cause


@both_drivers
def test_an_error_after_a_handled_one_has_no_context(drive: Driver) -> None:
    def operation() -> Steps[None]:
        with contextlib.suppress(ValueError):
            yield from World().effect("one", ValueError())
        yield from World().effect("two", LookupError())

    with pytest.raises(LookupError) as raised:
        drive(operation())
    assert raised.value.__context__ is None


@both_drivers
def test_finally_runs_with_its_own_effects(drive: Driver) -> None:
    world = World()

    def operation() -> Steps[None]:
        try:
            yield from world.effect("one", ValueError("first"))
        finally:
            yield from world.effect("two")

    with pytest.raises(ValueError, match="first"):
        drive(operation())
    assert ["one", "two"] == [name.lstrip("a") for name in world.log]


@both_drivers
def test_a_failure_in_finally_replaces_the_first_and_keeps_it_as_context(drive: Driver) -> None:
    first, second = ValueError(), LookupError()

    def operation() -> Steps[None]:
        try:
            yield from World().effect("one", first)
        finally:
            yield from World().effect("two", second)

    with pytest.raises(LookupError) as raised:
        drive(operation())
    assert raised.value is second
    assert second.__context__ is first


@both_drivers
def test_an_inner_operation_can_handle_what_an_outer_one_never_sees(drive: Driver) -> None:
    world = World()

    def inner() -> Steps[str]:
        try:
            yield from world.effect("one", ValueError())
        except ValueError:
            return "handled"
        return "not reached"

    def outer() -> Steps[str]:
        result = yield from inner()
        yield from world.effect("two")
        return result

    assert "handled" == drive(outer())


@both_drivers
def test_a_stop_iteration_of_an_effect_is_an_error_and_not_a_result(drive: Driver) -> None:
    def operation() -> Steps[str]:
        yield from World().effect("one", StopIteration("looks like a result"))
        return "not reached"

    with pytest.raises(RuntimeError, match="StopIteration"):
        drive(operation())


@both_drivers
def test_an_effect_that_raises_before_it_can_be_awaited(drive: Driver) -> None:
    def fail() -> Any:
        raise ValueError("at once")

    seen: list[str] = []

    def operation() -> Steps[None]:
        try:
            yield from call(fail, fail)
        except ValueError as error:
            seen.append(str(error))

    drive(operation())
    assert ["at once"] == seen


def test_an_effect_that_was_cancelled_by_itself_cancels_the_operation() -> None:
    seen: list[str] = []

    async def cancelled() -> None:
        raise asyncio.CancelledError("its own")

    def operation() -> Steps[None]:
        try:
            yield from call(lambda: None, cancelled)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def main() -> bool:
        task = asyncio.ensure_future(arun(operation()))
        await asyncio.wait((task,))
        return task.cancelled()

    assert asyncio.run(main())
    assert ["cancelled"] == seen


# Cancellation


async def started(world: World, operation: Steps[T]) -> asyncio.Task[T]:
    """Start an operation and return when its first slow effect is in flight."""
    task = asyncio.ensure_future(arun(operation))
    await world.begun.wait()
    return task


def recording(world: World, error: BaseException | None = None) -> Steps[str]:
    try:
        result = yield from world.slow("one", error)
        yield from world.effect("two")
        return result
    except BaseException as caught:
        world.log.append(type(caught).__name__)
        raise
    finally:
        world.log.append("finally")


async def test_a_cancellation_arrives_after_the_effect_in_flight_has_finished() -> None:
    world = World()
    task = await started(world, recording(world))
    task.cancel("enough")
    await turns()
    assert ["one begins"] == world.log
    assert not task.done()
    world.gate.set()
    with pytest.raises(asyncio.CancelledError) as raised:
        await task
    assert ["one begins", "one ends", "CancelledError", "finally"] == world.log
    assert raised.value.args in (("enough",), ())  # Python 3.10 drops it on its way through a task.


async def test_a_second_cancellation_does_not_cut_the_effect_short_either() -> None:
    world = World()
    task = await started(world, recording(world))
    for _ in range(3):
        task.cancel()
        await turns()
    assert ["one begins"] == world.log
    world.gate.set()
    await asyncio.wait((task,))
    assert task.cancelled()
    assert ["one begins", "one ends", "CancelledError", "finally"] == world.log


async def test_a_cancellation_that_meets_the_end_of_the_effect_still_arrives() -> None:
    world = World()
    task = await started(world, recording(world))
    world.gate.set()
    await world.ended.wait()
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled()
    assert ["CancelledError", "finally"] == world.log[-2:]


async def test_cancelled_while_the_effect_fails_is_a_cancellation() -> None:
    world = World()
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    task = await started(world, recording(world, ValueError("lost")))
    task.cancel()
    await turns()
    world.gate.set()
    await asyncio.wait((task,))
    assert task.cancelled()
    assert ["one begins", "one ends", "CancelledError", "finally"] == world.log
    # The loop reports an error that nobody looked at once its task is collected.
    del task
    gc.collect()
    assert [] == reported


async def test_a_cancelled_operation_finishes_the_effects_of_its_finally() -> None:
    world = World()

    def operation() -> Steps[None]:
        try:
            yield from world.slow("one")
        finally:
            yield from world.effect("two")
            world.log.append("closed")

    task = await started(world, operation())
    task.cancel()
    await turns()
    world.gate.set()
    await asyncio.wait((task,))
    assert task.cancelled()
    assert ["one begins", "one ends", "atwo", "closed"] == world.log


async def test_the_handlers_for_exceptions_do_not_see_a_cancellation() -> None:
    world = World()

    def operation() -> Steps[str]:
        try:
            yield from world.slow("one")
        except Exception:
            return "swallowed"
        return "not cancelled"

    task = await started(world, operation())
    task.cancel()
    await turns()
    world.gate.set()
    await asyncio.wait((task,))
    assert task.cancelled()


async def test_a_lock_around_the_operation_is_held_until_the_effect_has_finished() -> None:
    world = World()
    lock = asyncio.Lock()

    async def locked() -> None:
        async with lock:
            await arun(recording(world))

    task = asyncio.ensure_future(locked())
    await world.begun.wait()
    task.cancel()
    await turns()
    assert lock.locked()
    world.gate.set()
    await asyncio.wait((task,))
    assert not lock.locked()
    assert "one ends" in world.log


async def timed_out_by_wait_for(awaitable: Awaitable[T]) -> T:
    return await asyncio.wait_for(awaitable, 0.01)


LIMITS = [timed_out_by_wait_for]
if sys.version_info >= (3, 11):

    async def timed_out_by_timeout(awaitable: Awaitable[T]) -> T:
        async with asyncio.timeout(0.01):
            return await awaitable

    LIMITS.append(timed_out_by_timeout)


@pytest.mark.parametrize("limited", LIMITS)
async def test_a_timeout_around_an_operation_lets_the_effect_finish(
    limited: Callable[[Awaitable[str]], Awaitable[str]],
) -> None:
    world = World()
    task = asyncio.ensure_future(limited(arun(recording(world))))
    await asyncio.sleep(0.05)
    assert ["one begins"] == world.log
    world.gate.set()
    # On Python 3.10 the two are different classes.
    with pytest.raises((TimeoutError, asyncio.TimeoutError)):
        await task
    assert ["one begins", "one ends", "CancelledError", "finally"] == world.log


async def test_work_goes_on_after_a_timeout_that_was_handled() -> None:
    world = World()
    asyncio.get_running_loop().call_later(0.03, world.gate.set)
    with pytest.raises((TimeoutError, asyncio.TimeoutError)):
        await asyncio.wait_for(arun(recording(world)), 0.01)
    assert "two done" == await arun(world.effect("two"))


async def test_a_task_cancelled_before_its_first_step_runs_no_effect() -> None:
    world = World()
    task = asyncio.ensure_future(arun(world.effect("one")))
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled()
    assert [] == world.log
