"""Let something happen at an exact point of an operation, without racing for it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any, Literal

When = Literal["before", "after"]


def interject(
    target: Any,
    name: str,
    when: When,
    blocking: Callable[[], Any],
    awaitable: Callable[[], Awaitable[Any]],
) -> list[str]:
    """Do something once, right before or after ``target.name`` (or its twin) is next called.

    Return a list that has one entry as soon as it was done.
    """
    done: list[str] = []
    plain, twin = getattr(target, name), getattr(target, f"a{name}")

    @functools.wraps(plain)
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        first = not done
        done[:] = [name]
        if first and when == "before":
            blocking()
        result = plain(*args, **kwargs)
        if first and when == "after":
            blocking()
        return result

    @functools.wraps(twin)
    async def ainterrupted(*args: Any, **kwargs: Any) -> Any:
        first = not done
        done[:] = [name]
        if first and when == "before":
            await awaitable()
        result = await twin(*args, **kwargs)
        if first and when == "after":
            await awaitable()
        return result

    setattr(target, name, interrupted)
    setattr(target, f"a{name}", ainterrupted)
    return done


class Scripted:
    """A backend, or a saver's part, whose effects are counted and may fail or be cancelled.

    ``script(n, name)`` is called at the n-th effect, before it happens, and may raise.
    """

    def __init__(self, target: Any, names: tuple[str, ...]) -> None:
        self.script: Callable[[int, str], None] = lambda n, name: None
        self.effects: list[str] = []
        for name in names:
            self._wrap(target, name)

    def _wrap(self, target: Any, name: str) -> None:
        plain, twin = getattr(target, name), getattr(target, f"a{name}")

        @functools.wraps(plain)
        def scripted(*args: Any, **kwargs: Any) -> Any:
            self._count(name)
            return plain(*args, **kwargs)

        @functools.wraps(twin)
        async def ascripted(*args: Any, **kwargs: Any) -> Any:
            self._count(name)
            await asyncio.sleep(0)  # A cancellation arrives while the effect is under way.
            return await twin(*args, **kwargs)

        setattr(target, name, scripted)
        setattr(target, f"a{name}", ascripted)

    def _count(self, name: str) -> None:
        self.effects.append(name)
        self.script(len(self.effects), name)
