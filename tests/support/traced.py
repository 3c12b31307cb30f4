"""Real savers that tell which statements reach the database, before they do."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiosqlite
import psycopg
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from psycopg.rows import DictRow, dict_row

from tests.support.savers import Saver, Where

KINDS = ("sqlite", "asqlite", "pg", "apg")

Before = Callable[[str], None]


class _Traced(psycopg.Cursor[Any]):
    before: Before

    def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        type(self).before(_text(query))
        return super().execute(query, *args, **kwargs)

    def executemany(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        type(self).before(_text(query))
        return super().executemany(query, *args, **kwargs)


class _AsyncTraced(psycopg.AsyncCursor[Any]):
    before: Before

    async def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        type(self).before(_text(query))
        return await super().execute(query, *args, **kwargs)

    async def executemany(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        type(self).before(_text(query))
        return await super().executemany(query, *args, **kwargs)


def _text(query: Any) -> str:
    return query.decode() if isinstance(query, bytes) else str(query)


@asynccontextmanager
async def open_traced(kind: str, where: Where, before: Before) -> AsyncIterator[Saver]:
    """Open a bare saver of one of ``KINDS``; call ``before`` with each statement of its.

    On Postgres without those by which the driver itself bounds a transaction.
    """
    async with AsyncExitStack() as stack:
        if kind == "sqlite":
            connection = sqlite3.connect(where.sqlite, check_same_thread=False)
            stack.callback(connection.close)
            saver = SqliteSaver(connection)
            saver.setup()
            connection.execute("PRAGMA synchronous = OFF")
            connection.set_trace_callback(before)
            yield saver
        elif kind == "asqlite":
            aconnection = await stack.enter_async_context(aiosqlite.connect(where.sqlite))
            asaver = AsyncSqliteSaver(aconnection)
            await asaver.setup()
            await aconnection.execute("PRAGMA synchronous = OFF")
            await aconnection.set_trace_callback(before)
            yield asaver
        elif kind == "pg":
            plain = type("Plain", (_Traced,), {"before": staticmethod(before)})
            opened = psycopg.Connection[DictRow].connect(
                where.postgres, autocommit=True, row_factory=dict_row, cursor_factory=plain
            )
            yield PostgresSaver(stack.enter_context(opened))
        else:
            awaiting = type("Awaiting", (_AsyncTraced,), {"before": staticmethod(before)})
            aopened = await psycopg.AsyncConnection[DictRow].connect(
                where.postgres, autocommit=True, row_factory=dict_row, cursor_factory=awaiting
            )
            yield AsyncPostgresSaver(await stack.enter_async_context(aopened))
