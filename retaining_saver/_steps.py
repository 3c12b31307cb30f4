"""Operations written once as steps, and the two drivers that run them.

An operation with two or more effects is a generator. It asks for an effect by
``result = yield from call(x.name, x.aname, ...)``; ``run`` answers with the blocking spelling,
``arun`` awaits the other. What the effect raises is thrown back into the operation, so that
``try`` and ``finally`` mean there what they mean in inline code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Effect:
    """One complete effect on the outside world, in both spellings."""

    blocking: Callable[..., Any]
    awaitable: Callable[..., Awaitable[Any]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Steps = Generator[Effect, Any, T]


def call(
    blocking: Callable[P, T],
    awaitable: Callable[P, Awaitable[T]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> Steps[T]:
    """Ask for one effect and evaluate to what it returned."""
    result: T = yield Effect(blocking, awaitable, args, kwargs)
    return result


def run(steps: Steps[T]) -> T:
    """Run an operation with the blocking spelling of its effects."""
    try:
        effect = next(steps)
        while True:
            try:
                result = effect.blocking(*effect.args, **effect.kwargs)
            except BaseException as error:
                effect = steps.throw(error)
            else:
                effect = steps.send(result)
    except StopIteration as done:
        value: T = done.value
        return value


async def arun(steps: Steps[T]) -> T:
    """Run an operation with the awaitable spelling of its effects.

    A cancellation reaches the operation only after the effect in flight has finished: a
    half-done deletion must not outlive the lock that its operation holds.
    """
    try:
        effect = next(steps)
        while True:
            try:
                result = await _finish(effect.awaitable(*effect.args, **effect.kwargs))
            except BaseException as error:
                effect = steps.throw(error)
            else:
                effect = steps.send(result)
    except StopIteration as done:
        value: T = done.value
        return value


async def _finish(effect: Awaitable[T]) -> T:
    task = asyncio.ensure_future(effect)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled():
        task.exception()  # Seen, so that the loop does not report it as never retrieved.
    raise cancelled
