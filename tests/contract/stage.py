"""A real saver, its backend, and what the backend contract's tests do to them."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, cast

import aiosqlite
import psycopg
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointTuple,
)
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.base import SerializerProtocol

from retaining_saver._steps import Steps, call
from retaining_saver.backends import Backend, find_backend
from retaining_saver.backends.base import Movable, ReclaimOutcome, Row
from retaining_saver.records import Ref
from tests.support import releases
from tests.support.faces import Face, faces_of
from tests.support.graphs import chat_graph, say
from tests.support.leaves import aput_leaf, put_leaf
from tests.support.savers import Saver, Where, open_saver

POSTGRES_TABLES = ("checkpoints", "checkpoint_writes", "checkpoint_blobs")
SQLITE_TABLES = ("checkpoints", "writes")

Dump = dict[str, list[tuple[Any, ...]]]


@dataclass(frozen=True, slots=True)
class Stage:
    """One thread of one real saver. ``call`` speaks to its backend through the face under test."""

    kind: str
    where: Where
    saver: Saver
    backend: Backend
    thread_id: str
    face: Face

    def ref(self, checkpoint_id: str | None = None, ns: str = "") -> Ref:
        return Ref(self.thread_id, ns, checkpoint_id)

    async def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the backend by the face under test."""
        blocking, awaitable = getattr(self.backend, name), getattr(self.backend, f"a{name}")
        return await self.face(blocking, awaitable, *args, **kwargs)

    async def host(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the saver by a face that the saver has."""
        own = faces_of(self.kind)[-1]
        blocking, awaitable = getattr(self.saver, name), getattr(self.saver, f"a{name}")
        return await own(blocking, awaitable, *args, **kwargs)

    async def invoke(self, graph: Any, given: Any, **options: Any) -> Any:
        """Run a graph on the thread."""
        own = faces_of(self.kind)[-1]
        return await own(graph.invoke, graph.ainvoke, given, self.ref().config(), **options)

    async def talk(self, text: str = "hello") -> str:
        """Let a chat have one turn; return the id of the checkpoint at rest after it."""
        await self.invoke(chat_graph(self.saver), say(text))
        return (await self.stored()).checkpoint_id

    async def put_leaf(self, run_id: str = "run-1", at: str | None = None) -> str:
        """Put a real leaf onto the head; return its id."""
        own = faces_of(self.kind)[-1]
        config = self.ref(at).config() if at else None
        args = (self.saver, self.thread_id)
        _, leaf_id = await own(put_leaf, aput_leaf, *args, run_id=run_id, at=config)
        return leaf_id

    async def leaf_and_parent(self, run_id: str = "run-1") -> tuple[Row, Row]:
        """Let a turn happen, put a leaf, and read both rows."""
        parent_id = await self.talk()
        leaf_id = await self.put_leaf(run_id)
        return await self.stored(leaf_id), await self.stored(parent_id)

    async def stored(self, checkpoint_id: str | None = None, ns: str = "") -> Row:
        """Read a row that must be there."""
        row = await self.call("row", self.ref(checkpoint_id, ns))
        assert row is not None
        return cast(Row, row)

    async def put(
        self,
        checkpoint: Checkpoint,
        parent_id: str | None = None,
        *,
        ns: str = "",
        metadata: Mapping[str, Any] | None = None,
        new_versions: Mapping[str, Any] | None = None,
    ) -> str:
        """Put a checkpoint as it is; return its id."""
        config = self.ref(parent_id, ns).config()
        await self.host("put", config, checkpoint, metadata or {}, new_versions or {})
        return checkpoint["id"]

    async def put_copy(
        self,
        of: str,
        *,
        parent_id: str | None = None,
        checkpoint_id: str | None = None,
        ns: str = "",
    ) -> str:
        """Put a copy of a checkpoint under another id; by default as its child."""
        found = await self.host("get_tuple", self.ref(of, ns).config())
        copy = {**found.checkpoint, "id": checkpoint_id or str(uuid6())}
        metadata = found.metadata
        return await self.put(cast(Checkpoint, copy), parent_id or of, ns=ns, metadata=metadata)

    async def put_write(
        self, checkpoint_id: str, task_id: str, value: str = "v", channel: str = "messages"
    ) -> None:
        config = self.ref(checkpoint_id).config()
        await self.host("put_writes", config, [(channel, value)], task_id, "~path")

    async def reclaim(
        self,
        leaf: Row,
        parent: Row,
        *,
        ns: str = "",
        only_head: bool = True,
        movable: Movable = Movable(),
    ) -> ReclaimOutcome:
        options = {"only_head": only_head, "movable": movable}
        outcome = await self.call("reclaim", self.thread_id, ns, leaf, parent, **options)
        return cast(ReclaimOutcome, outcome)

    async def states(self) -> dict[tuple[str, str], tuple[Any, ...]]:
        """Read what users see of every checkpoint, but for metadata."""
        return {
            (found.config["configurable"]["checkpoint_ns"], found.checkpoint["id"]): (
                found.checkpoint,
                found.parent_config,
                found.pending_writes,
            )
            for found in await self.listed()
        }

    async def listed(self) -> list[Any]:
        config: RunnableConfig = {"configurable": {"thread_id": self.thread_id}}
        if faces_of(self.kind)[-1].name == "async":
            return [found async for found in self.saver.alist(config)]
        return await asyncio.to_thread(lambda: list(self.saver.list(config)))

    def dump(self) -> Dump:
        """Read every row of the thread, by a connection of its own where there is a database."""
        if isinstance(self.saver, InMemorySaver):
            return _dump_memory(self.saver, self.thread_id)
        if self.kind.endswith("sqlite"):
            with closing(sqlite3.connect(self.where.sqlite)) as own:
                return _dump_tables(own, SQLITE_TABLES, "?", self.thread_id)
        with psycopg.connect(self.where.postgres) as pg:
            return _dump_tables(pg, POSTGRES_TABLES, "%s", self.thread_id)

    def writes(self) -> list[tuple[Any, ...]]:
        """Every stored write as (checkpoint id, task id, channel, task path)."""
        if isinstance(self.saver, InMemorySaver):
            return sorted(
                (key[2], task_id, channel, path)
                for key, stored in self.saver.writes.items()
                if key[0] == self.thread_id
                for task_id, channel, _, path in stored.values()
            )
        table = "writes" if self.kind.endswith("sqlite") else "checkpoint_writes"
        has_paths = table == "checkpoint_writes" or releases.SQLITE_KEEPS_TASK_PATHS
        columns = f"checkpoint_id, task_id, channel, {'task_path' if has_paths else repr('')}"
        return sorted(self._select(f"SELECT {columns} FROM {table} WHERE thread_id = ?"))

    @property
    def path(self) -> str:
        """The task path that is stored of the writes that ``put_write`` puts."""
        keeps = releases.SQLITE_KEEPS_TASK_PATHS or not self.kind.endswith("sqlite")
        return "~path" if keeps else ""

    def delete_row(self, checkpoint_id: str) -> None:
        """Delete one checkpoint and nothing else, as no method of a saver does."""
        if isinstance(self.saver, InMemorySaver):
            del self.saver.storage[self.thread_id][""][checkpoint_id]
            return
        self._execute(
            "DELETE FROM checkpoints WHERE thread_id = ? AND checkpoint_ns = '' "
            "AND checkpoint_id = ?",
            self.thread_id,
            checkpoint_id,
        )

    def set_parent(self, checkpoint_id: str, parent_id: str | None) -> None:
        """Change a stored parent id and nothing else."""
        if isinstance(self.saver, InMemorySaver):
            entries = self.saver.storage[self.thread_id][""]
            entries[checkpoint_id] = (*entries[checkpoint_id][:2], parent_id)
            return
        self._execute(
            "UPDATE checkpoints SET parent_checkpoint_id = ? WHERE thread_id = ? "
            "AND checkpoint_ns = '' AND checkpoint_id = ?",
            parent_id,
            self.thread_id,
            checkpoint_id,
        )

    def _select(self, sql: str) -> list[tuple[Any, ...]]:
        if self.kind.endswith("sqlite"):
            with closing(sqlite3.connect(self.where.sqlite)) as own:
                return own.execute(sql, (self.thread_id,)).fetchall()
        with psycopg.connect(self.where.postgres) as pg:
            return pg.execute(sql.replace("?", "%s").encode(), (self.thread_id,)).fetchall()

    def _execute(self, sql: str, *args: Any) -> None:
        if self.kind.endswith("sqlite"):
            with closing(sqlite3.connect(self.where.sqlite)) as own, own:
                own.execute(sql, args)
            return
        with psycopg.connect(self.where.postgres) as pg:
            pg.execute(sql.replace("?", "%s").encode(), args)


@asynccontextmanager
async def open_stage(
    kind: str,
    where: Where,
    thread_id: str,
    face: Face,
    *,
    serde: SerializerProtocol | None = None,
) -> AsyncIterator[Stage]:
    """Open a saver of ``kind`` and the backend that is found for it."""
    async with open_saver(kind, where, serde=serde) as saver:
        yield Stage(kind, where, saver, backend_of(saver), thread_id, face)


def backend_of(saver: BaseCheckpointSaver[Any]) -> Backend:
    backend_class = find_backend(saver)
    assert backend_class is not None
    return backend_class(saver)


def checkpoint(
    values: Mapping[str, Any] | None = None, *, checkpoint_id: str | None = None
) -> Checkpoint:
    """Make a checkpoint that stores ``values``, each in its first version."""
    values = dict(values or {})
    return Checkpoint(
        v=4,
        id=checkpoint_id or str(uuid6()),
        ts=datetime.now(timezone.utc).isoformat(),
        channel_values=values,
        channel_versions=versions_of(values),
        versions_seen={},
        updated_channels=None,
    )


def versions_of(values: Mapping[str, Any]) -> ChannelVersions:
    return dict.fromkeys(values, f"{1:032}.0")


def id_below(checkpoint_id: str) -> str:
    """Return the id just below another one."""
    number = int(checkpoint_id.replace("-", ""), 16) - 1
    digits = f"{number:032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _dump_memory(saver: InMemorySaver, thread_id: str) -> Dump:
    namespaces = dict(saver.storage).get(thread_id, {})
    return {
        "checkpoints": sorted(
            (ns, checkpoint_id, *map(repr, entry))
            for ns, entries in namespaces.items()
            for checkpoint_id, entry in entries.items()
        ),
        "writes": sorted(
            (*key, *map(repr, inner.items()))
            for key, inner in dict(saver.writes).items()
            if key[0] == thread_id and inner  # Before 4.3 a read leaves empty entries behind.
        ),
        "blobs": sorted(
            (*map(str, key), repr(blob))
            for key, blob in dict(saver.blobs).items()
            if key[0] == thread_id
        ),
    }


def _dump_tables(connection: Any, tables: tuple[str, ...], mark: str, thread_id: str) -> Dump:
    dump: Dump = {}
    for table in tables:
        rows = connection.execute(f"SELECT * FROM {table} WHERE thread_id = {mark}", (thread_id,))
        dump[table] = sorted(rows.fetchall(), key=repr)
    return dump


async def execute(stage: Stage, sql: str) -> None:
    """Use the saver's own connection, as the user who opened it may."""
    conn: Any = stage.saver.conn  # type: ignore[attr-defined]  # Both SQLite savers have one.
    executed = conn.execute(sql)
    if isinstance(conn, aiosqlite.Connection):
        await executed


def lookup(ref: Ref) -> Callable[[Any], Steps[CheckpointTuple | None]]:
    """Make an operation that reads one checkpoint from the saver that it is given."""
    return lambda saver: call(saver.get_tuple, saver.aget_tuple, ref.config())


def in_transaction(stage: Stage) -> bool:
    return bool(stage.saver.conn.in_transaction)  # type: ignore[attr-defined]  # As above.
