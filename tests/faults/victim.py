"""A process that kills itself at a stated statement, again and again: ``python victim.py ...``.

For n = 1, 2, ... it forks a child that prepares thread ``<operation>-<n>`` and is killed by
SIGKILL right before its n-th database statement, counted from where the operation starts. It ends
when a child gets through, and prints how many were killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import aiosqlite
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor
from psycopg.rows import dict_row

from retaining_saver import RetainingSaver
from tests.support import graphs
from tests.support.faces import Face
from tests.support.leaves import aput_leaf, put_leaf
from tests.support.threads import face_of, named

LIMIT = 150
TASK = "11111111-2222-3333-4444-555555555555"
# The process is killed, not the machine.
UNSYNCED = "PRAGMA synchronous = OFF"


class Trap:
    """Counts statements once it is armed, and kills the process right before the n-th."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.armed = False

    def statement(self, *_: Any) -> None:
        if self.armed:
            self.at -= 1
            if self.at == 0:
                os.kill(os.getpid(), signal.SIGKILL)


async def open_victim(kind: str, place: str, trap: Trap, stack: AsyncExitStack) -> Any:
    """Open a saver whose statements the trap counts, and on Postgres their ends as well."""

    class TrapCursor(Cursor[Any]):
        def execute(self, *args: Any, **kwargs: Any) -> Any:
            trap.statement()
            result = super().execute(*args, **kwargs)
            trap.statement()
            return result

    class AsyncTrapCursor(AsyncCursor[Any]):
        async def execute(self, *args: Any, **kwargs: Any) -> Any:
            trap.statement()
            result = await super().execute(*args, **kwargs)
            trap.statement()
            return result

    settings: dict[str, Any] = {"autocommit": True, "row_factory": dict_row}
    if kind == "sqlite":
        connection = sqlite3.connect(place, check_same_thread=False)
        connection.execute(UNSYNCED)
        connection.set_trace_callback(trap.statement)
        return SqliteSaver(connection)
    if kind == "asqlite":
        awaited = await stack.enter_async_context(aiosqlite.connect(place))
        await awaited.execute(UNSYNCED)
        await awaited.set_trace_callback(trap.statement)
        return AsyncSqliteSaver(awaited)
    if kind == "pg":
        blocking: Connection[Any] = Connection.connect(place, cursor_factory=TrapCursor, **settings)
        return PostgresSaver(blocking)
    awaiting: AsyncConnection[Any] = await AsyncConnection.connect(
        place, cursor_factory=AsyncTrapCursor, **settings
    )
    return AsyncPostgresSaver(await stack.enter_async_context(awaiting))


class Scene:
    """A thread, the bare saver and the wrapped one, on one face."""

    def __init__(self, face: Face, bare: Any, thread_id: str, **options: Any) -> None:
        self.face = face
        self.bare = bare
        self.thread_id = thread_id
        self.ours = RetainingSaver(bare, **options)

    async def say(self, text: str) -> None:
        graph = graphs.chat_graph(self.ours)
        await self.face(graph.invoke, graph.ainvoke, graphs.say(text), named(self.thread_id))

    async def ask(self) -> None:
        graph = graphs.asking_graph(self.ours)
        await self.face(graph.invoke, graph.ainvoke, {"log": []}, named(self.thread_id))

    async def leaf(self, run_id: str) -> None:
        await self.face(put_leaf, aput_leaf, self.bare, self.thread_id, run_id=run_id)

    async def admit(self) -> None:
        await self.face(self.ours.admit, self.ours.aadmit, named(self.thread_id))

    async def record(self) -> None:
        ours = self.ours
        config = named(self.thread_id)
        await self.face(ours.record_run, ours.arecord_run, config, "killed", duration=7)

    async def record_by_put(self) -> None:
        """Record a run as applications do."""
        await self.face(put_leaf, aput_leaf, self.ours, self.thread_id, run_id="killed")

    async def ask_under_leaf(self) -> None:
        """Let a task ask at the parent of a leaf that this process knows."""
        ours = self.ours
        leaf = await self.face(ours.get_tuple, ours.aget_tuple, named(self.thread_id))
        assert leaf is not None
        assert leaf.parent_config is not None
        writes = [("__interrupt__", "which?")]
        await self.face(ours.put_writes, ours.aput_writes, leaf.parent_config, writes, TASK)

    async def late_child(self) -> None:
        """Leave what a writer leaves that had read a leaf which another worker reclaimed."""
        await self.leaf("one")
        config = named(self.thread_id)
        leaf = await self.face(self.bare.get_tuple, self.bare.aget_tuple, config)
        await self.admit()
        checkpoint = {**leaf.checkpoint, "id": leaf.checkpoint["id"][:-12] + "ffffffffffff"}
        checkpoint["channel_versions"] = {**checkpoint["channel_versions"], "other": "9.9"}
        metadata = {"source": "loop", "step": 99, "parents": {}}
        args = (leaf.config, checkpoint, metadata, {"other": "9.9"})
        await self.face(self.bare.put, self.bare.aput, *args)


Step = Callable[[Scene], Awaitable[None]]


async def _turn(scene: Scene) -> None:
    await scene.say("a")


async def _turn_and_leaf(scene: Scene) -> None:
    await scene.say("a")
    await scene.leaf("one")


async def _turn_and_two_leaves(scene: Scene) -> None:
    await _turn_and_leaf(scene)
    await scene.leaf("two")


async def _late_child(scene: Scene) -> None:
    await scene.say("a")
    await scene.late_child()


async def _question(scene: Scene) -> None:
    await scene.ask()


async def _second_turn(scene: Scene) -> None:
    await scene.say("b")


OPERATIONS: dict[str, tuple[Step, Step, dict[str, Any]]] = {
    "admit": (_turn_and_leaf, Scene.admit, {}),
    "admit-two": (_turn_and_two_leaves, Scene.admit, {}),
    "admit-late-child": (_late_child, Scene.admit, {}),
    "record": (_turn, Scene.record, {}),
    "record-under-leaf": (_turn_and_leaf, Scene.record, {}),
    "record-waiting": (_question, Scene.record, {}),
    "record-by-put": (_turn, Scene.record_by_put, {}),
    "record-by-put-at-once": (_turn, Scene.record_by_put, {"annotations": "fold"}),
    "ask-under-leaf": (_turn_and_leaf, Scene.ask_under_leaf, {}),
    "run": (_turn_and_leaf, _second_turn, {}),
    "run-at-put": (_turn_and_leaf, _second_turn, {"admission": "put"}),
}


async def _live(kind: str, place: str, operation: str, at: int) -> None:
    prepare, act, options = OPERATIONS[operation]
    trap = Trap(at)
    async with AsyncExitStack() as stack:
        bare = await open_victim(kind, place, trap, stack)
        scene = Scene(face_of(kind), bare, f"{operation}-{at}", **options)
        await prepare(scene)
        trap.armed = True
        await act(scene)


def _kills(kind: str, place: str, operation: str) -> Iterator[int]:
    for at in range(1, LIMIT):
        child = os.fork()
        if child == 0:
            try:
                asyncio.run(_live(kind, place, operation, at))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0, f"thread {operation}-{at} failed by itself"
            return
        yield at
    raise AssertionError(f"{operation} takes more than {LIMIT} statements")


if __name__ == "__main__":
    arguments = sys.argv[1:4]
    sys.stdout.write(str(len(list(_kills(*arguments)))))
