"""Real, bare LangGraph savers of every kind, opened on one place that two workers may share."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiosqlite
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from psycopg import AsyncConnection, Connection
from psycopg.rows import DictRow, dict_row
from psycopg_pool import AsyncConnectionPool, ConnectionPool

KINDS = (
    "memory",
    "sqlite",
    "asqlite",
    "pg",
    "pg_pool",
    "pg_pipeline",
    "apg",
    "apg_pool",
    "apg_pipeline",
)
SYNC_KINDS = ("memory", "sqlite", "pg", "pg_pool", "pg_pipeline")
ASYNC_KINDS = ("memory", "asqlite", "apg", "apg_pool", "apg_pipeline")
ONE_PER_BACKEND = ("memory", "sqlite", "asqlite", "pg", "apg_pool")

Saver = BaseCheckpointSaver[Any]

# No test pulls the plug: what a killed process wrote is kept by the operating system.
_UNSYNCED = "PRAGMA synchronous = OFF"
_SETTINGS: dict[str, Any] = {
    "autocommit": True,
    "prepare_threshold": 0,
    "row_factory": dict_row,
}


@dataclass(frozen=True, slots=True)
class Where:
    """Where savers keep their rows. Two savers of one kind on one ``Where`` share a database.

    The Postgres server is found, and if need be started, when ``postgres`` is first read.
    """

    directory: Path
    find_postgres: Callable[[], str]

    @property
    def sqlite(self) -> Path:
        """The SQLite file, which the first saver creates."""
        return self.directory / "checkpoints.sqlite"

    @property
    def postgres(self) -> str:
        """The URL of a Postgres database that has the saver's tables."""
        return self.find_postgres()


@asynccontextmanager
async def open_saver(
    kind: str, where: Where, *, serde: SerializerProtocol | None = None
) -> AsyncIterator[Saver]:
    """Open a bare saver of ``kind`` on ``where``, ready for use; close it at the end.

    ``"memory"`` gives a new and empty saver each time.
    """
    async with AsyncExitStack() as stack:
        yield await _OPENERS[kind](stack, where, serde)


async def _memory(stack: AsyncExitStack, where: Where, serde: SerializerProtocol | None) -> Saver:
    return InMemorySaver(serde=serde)


async def _sqlite(stack: AsyncExitStack, where: Where, serde: SerializerProtocol | None) -> Saver:
    connection = sqlite3.connect(where.sqlite, check_same_thread=False)
    stack.callback(connection.close)
    connection.execute(_UNSYNCED)
    saver = SqliteSaver(connection, serde=serde)
    saver.setup()
    return saver


async def _asqlite(stack: AsyncExitStack, where: Where, serde: SerializerProtocol | None) -> Saver:
    connection = await stack.enter_async_context(aiosqlite.connect(where.sqlite))
    await connection.execute(_UNSYNCED)
    saver = AsyncSqliteSaver(connection, serde=serde)
    await saver.setup()
    return saver


def _connect(stack: AsyncExitStack, where: Where) -> Connection[DictRow]:
    connection = Connection[DictRow].connect(
        where.postgres, autocommit=True, prepare_threshold=0, row_factory=dict_row
    )
    return stack.enter_context(connection)


async def _pg(stack: AsyncExitStack, where: Where, serde: SerializerProtocol | None) -> Saver:
    return PostgresSaver(_connect(stack, where), serde=serde)


async def _pg_pool(stack: AsyncExitStack, where: Where, serde: SerializerProtocol | None) -> Saver:
    pool = ConnectionPool[Connection[DictRow]](
        where.postgres,
        min_size=1,
        max_size=4,
        open=False,
        kwargs=_SETTINGS,
    )
    return PostgresSaver(stack.enter_context(pool), serde=serde)


async def _pg_pipeline(
    stack: AsyncExitStack, where: Where, serde: SerializerProtocol | None
) -> Saver:
    connection = _connect(stack, where)
    return PostgresSaver(connection, stack.enter_context(connection.pipeline()), serde=serde)


async def _aconnect(stack: AsyncExitStack, where: Where) -> AsyncConnection[DictRow]:
    connection = await AsyncConnection[DictRow].connect(
        where.postgres, autocommit=True, prepare_threshold=0, row_factory=dict_row
    )
    return await stack.enter_async_context(connection)


async def _apg(stack: AsyncExitStack, where: Where, serde: SerializerProtocol | None) -> Saver:
    return AsyncPostgresSaver(await _aconnect(stack, where), serde=serde)


async def _apg_pool(stack: AsyncExitStack, where: Where, serde: SerializerProtocol | None) -> Saver:
    pool = AsyncConnectionPool[AsyncConnection[DictRow]](
        where.postgres,
        min_size=1,
        max_size=4,
        open=False,
        kwargs=_SETTINGS,
    )
    return AsyncPostgresSaver(await stack.enter_async_context(pool), serde=serde)


async def _apg_pipeline(
    stack: AsyncExitStack, where: Where, serde: SerializerProtocol | None
) -> Saver:
    connection = await _aconnect(stack, where)
    pipeline = await stack.enter_async_context(connection.pipeline())
    return AsyncPostgresSaver(connection, pipeline, serde=serde)


_OPENERS = {
    "memory": _memory,
    "sqlite": _sqlite,
    "asqlite": _asqlite,
    "pg": _pg,
    "pg_pool": _pg_pool,
    "pg_pipeline": _pg_pipeline,
    "apg": _apg,
    "apg_pool": _apg_pool,
    "apg_pipeline": _apg_pipeline,
}
