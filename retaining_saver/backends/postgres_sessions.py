"""How statements reach a Postgres saver's connection: blocking or awaiting, pipeline or pool.

An operation is a generator that yields ``(sql, parameters)``, is sent the rows, and returns its
result. Every statement returns rows, if only the number 1, unless it is a ``Command``: a pipeline
does not know before.

- On a connection shared with the saver, the saver's lock is held; from a pool, a connection of
  our own is taken, and never a second one.
- A write is one transaction, or a savepoint where the user has one open: that one is neither
  committed nor rolled back.
- A read leaves no transaction open that was not open before.
- With ``snapshot`` all statements of a transaction of ours see one snapshot (REPEATABLE READ). In a
  transaction that the user opened, the user's isolation level counts.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from typing import Any, Final, Protocol, TypeVar, cast

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from psycopg import AsyncConnection, Connection
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from retaining_saver._steps import Steps, arun, run
from retaining_saver.backends.clones import clone

T = TypeVar("T")
Saver = BaseCheckpointSaver[Any]
Parameters = Mapping[str, Any]
Rows = Sequence[tuple[Any, ...]]
Statements = Generator[tuple[str, Parameters], Rows, T]


class Command(str):
    """A statement that returns no rows; the operation is sent none."""

    __slots__ = ()


PAGE = 1000
_CURSOR = "retaining_saver_rows"
_SNAPSHOT: Final = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"


def streamed(sql: str, parameters: Parameters, take: Callable[[Rows], object]) -> Statements[None]:
    """Give the rows of a query to ``take`` page by page, through a cursor in the server.

    Inside a transaction only, and one stream at a time.
    """
    yield Command(f"DECLARE {_CURSOR} NO SCROLL CURSOR FOR {sql}"), parameters
    while rows := (yield f"FETCH {PAGE} FROM {_CURSOR}", {}):
        take(rows)
    yield Command(f"CLOSE {_CURSOR}"), {}


class Undo(Exception):
    """Ends a transaction without effect; carries the operation's result out of it."""

    def __init__(self, result: Any) -> None:
        super().__init__(result)
        self.result = result


class Session(Protocol):
    """Run an operation's statements: ``read`` those that only look, ``write`` the others."""

    def read(self, statements: Statements[T], *, snapshot: bool = False) -> T: ...
    async def aread(self, statements: Statements[T], *, snapshot: bool = False) -> T: ...
    def write(self, statements: Statements[T], *, snapshot: bool = False) -> T: ...
    async def awrite(self, statements: Statements[T], *, snapshot: bool = False) -> T: ...

    def on_snapshot(self, operation: Callable[[Saver], Steps[T]]) -> T: ...
    async def aon_snapshot(self, operation: Callable[[Saver], Steps[T]]) -> T: ...


class BlockingSession:
    def __init__(self, saver: PostgresSaver) -> None:
        self._saver = saver

    def read(self, statements: Statements[T], *, snapshot: bool = False) -> T:
        if snapshot:
            return self.write(statements, snapshot=True)
        with self._connection() as connection, _transaction_of_read(connection):
            return _execute(connection, statements)

    async def aread(self, statements: Statements[T], *, snapshot: bool = False) -> T:
        return await asyncio.to_thread(self.read, statements, snapshot=snapshot)

    def write(self, statements: Statements[T], *, snapshot: bool = False) -> T:
        try:
            with self._transaction(snapshot=snapshot) as connection:
                return _execute(connection, statements)
        except Undo as undo:
            return cast(T, undo.result)

    async def awrite(self, statements: Statements[T], *, snapshot: bool = False) -> T:
        return await asyncio.to_thread(self.write, statements, snapshot=snapshot)

    def on_snapshot(self, operation: Callable[[Saver], Steps[T]]) -> T:
        with self._transaction(snapshot=True) as connection:
            held: dict[str, Any] = {"conn": connection, "pipe": None, "lock": threading.Lock()}
            return run(operation(clone(self._saver, **held)))

    async def aon_snapshot(self, operation: Callable[[Saver], Steps[T]]) -> T:
        return await asyncio.to_thread(self.on_snapshot, operation)

    @contextmanager
    def _transaction(self, *, snapshot: bool) -> Iterator[Connection[Any]]:
        with self._connection() as connection:
            own = _begins(connection)
            with connection.transaction():
                if own and snapshot:
                    connection.execute(_SNAPSHOT, prepare=False)
                yield connection

    @contextmanager
    def _connection(self) -> Iterator[Connection[Any]]:
        if isinstance(self._saver.conn, ConnectionPool):
            with self._saver.conn.connection() as connection:
                yield connection
            return
        with self._saver.lock:
            if _in_pipeline(self._saver.conn):
                # Leaving one syncs, an inner one too: else our transaction would take in what was
                # sent since the last sync. The saver need not know of the user's pipeline.
                with self._saver.conn.pipeline():
                    pass
            yield self._saver.conn


class AwaitingSession:
    def __init__(self, saver: AsyncPostgresSaver) -> None:
        self._saver = saver

    def read(self, statements: Statements[T], *, snapshot: bool = False) -> T:
        self._refuse_own_loop()
        reading = self.aread(statements, snapshot=snapshot)
        return asyncio.run_coroutine_threadsafe(reading, self._saver.loop).result()

    async def aread(self, statements: Statements[T], *, snapshot: bool = False) -> T:
        if snapshot:
            return await self.awrite(statements, snapshot=True)
        async with self._connection() as connection, _atransaction_of_read(connection):
            return await _aexecute(connection, statements)

    def write(self, statements: Statements[T], *, snapshot: bool = False) -> T:
        self._refuse_own_loop()
        writing = self.awrite(statements, snapshot=snapshot)
        return asyncio.run_coroutine_threadsafe(writing, self._saver.loop).result()

    async def awrite(self, statements: Statements[T], *, snapshot: bool = False) -> T:
        try:
            async with self._transaction(snapshot=snapshot) as connection:
                return await _aexecute(connection, statements)
        except Undo as undo:
            return cast(T, undo.result)

    def on_snapshot(self, operation: Callable[[Saver], Steps[T]]) -> T:
        self._refuse_own_loop()
        reading = self.aon_snapshot(operation)
        return asyncio.run_coroutine_threadsafe(reading, self._saver.loop).result()

    async def aon_snapshot(self, operation: Callable[[Saver], Steps[T]]) -> T:
        async with self._transaction(snapshot=True) as connection:
            held: dict[str, Any] = {"conn": connection, "pipe": None, "lock": asyncio.Lock()}
            return await arun(operation(clone(self._saver, **held)))

    @asynccontextmanager
    async def _transaction(self, *, snapshot: bool) -> AsyncIterator[AsyncConnection[Any]]:
        async with self._connection() as connection:
            own = _begins(connection)
            async with connection.transaction():
                if own and snapshot:
                    await connection.execute(_SNAPSHOT, prepare=False)
                yield connection

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[AsyncConnection[Any]]:
        if isinstance(self._saver.conn, AsyncConnectionPool):
            async with self._saver.conn.connection() as connection:
                yield connection
            return
        async with self._saver.lock:
            if _in_pipeline(self._saver.conn):
                async with self._saver.conn.pipeline():
                    pass
            yield self._saver.conn

    def _refuse_own_loop(self) -> None:
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            return
        if running is self._saver.loop:
            raise asyncio.InvalidStateError(
                "A blocking method was called on an AsyncPostgresSaver from its own event loop, "
                "which would wait for itself. Await the method with the prefix 'a' instead, or "
                "call from another thread."
            )


def session(saver: Saver) -> Session:
    """Return the session that fits ``saver``, a ``PostgresSaver`` or an ``AsyncPostgresSaver``."""
    if isinstance(saver, AsyncPostgresSaver):
        return AwaitingSession(saver)
    return BlockingSession(cast(PostgresSaver, saver))


def _transaction_of_read(connection: Connection[Any]) -> AbstractContextManager[Any]:
    return nullcontext() if _ends_by_itself(connection) else connection.transaction()


def _atransaction_of_read(connection: AsyncConnection[Any]) -> AbstractAsyncContextManager[Any]:
    return nullcontext() if _ends_by_itself(connection) else connection.transaction()


def _ends_by_itself(connection: Connection[Any] | AsyncConnection[Any]) -> bool:
    """Tell whether a single statement neither joins nor leaves open a transaction."""
    return (
        connection.autocommit
        and connection.info.transaction_status == TransactionStatus.IDLE
        and not _in_pipeline(connection)
    )


def _in_pipeline(connection: Connection[Any] | AsyncConnection[Any]) -> bool:
    return connection.info.pipeline_status != PipelineStatus.OFF


def _begins(connection: Connection[Any] | AsyncConnection[Any]) -> bool:
    """Tell whether the next transaction is one of its own, not a savepoint in another."""
    return connection.info.transaction_status == TransactionStatus.IDLE


# Unprepared, because a pooler may give the next statement another server connection.
def _execute(connection: Connection[Any], statements: Statements[T]) -> T:
    with connection.cursor(row_factory=tuple_row) as cursor:
        try:
            sql, parameters = next(statements)
            while True:
                cursor.execute(sql.encode(), parameters, prepare=False)
                rows = [] if isinstance(sql, Command) else cursor.fetchall()
                sql, parameters = statements.send(rows)
        except StopIteration as done:
            return cast(T, done.value)


async def _aexecute(connection: AsyncConnection[Any], statements: Statements[T]) -> T:
    async with connection.cursor(row_factory=tuple_row) as cursor:
        try:
            sql, parameters = next(statements)
            while True:
                await cursor.execute(sql.encode(), parameters, prepare=False)
                rows = [] if isinstance(sql, Command) else await cursor.fetchall()
                sql, parameters = statements.send(rows)
        except StopIteration as done:
            return cast(T, done.value)
