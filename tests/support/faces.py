"""The two faces of one class: the blocking methods and their awaitable twins."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Face:
    """One face. Calling it calls the spelling of a method that belongs to the face.

    Blocking calls are made in another thread, so that they also work on async savers, whose
    own loop must stay free for them.
    """

    name: Literal["sync", "async"]

    async def __call__(
        self,
        blocking: Callable[P, T],
        awaitable: Callable[P, Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        if self.name == "sync":
            return await asyncio.to_thread(blocking, *args, **kwargs)
        return await awaitable(*args, **kwargs)

    def __str__(self) -> str:
        return self.name


SYNC = Face("sync")
ASYNC = Face("async")
FACES = (SYNC, ASYNC)


def faces_of(kind: str) -> tuple[Face, ...]:
    """List the faces that the bare saver of ``kind`` has for the host's own methods."""
    sync_only = ("sqlite", "pg", "pg_pool", "pg_pipeline")
    return (SYNC,) if kind in sync_only else FACES


def kinds_and_faces(kinds: tuple[str, ...]) -> list[tuple[str, Face]]:
    """Pair each kind with each of its faces, for ``parametrize``."""
    return [(kind, face) for kind in kinds for face in faces_of(kind)]
