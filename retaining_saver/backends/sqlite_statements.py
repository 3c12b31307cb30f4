"""Statements as data, and the two executors that run them on SQLite.

Each operation is a generator of statements: it yields ``(sql, parameters)`` and is answered with
the rows, or the number of rows changed. ``run_statements`` and ``transact`` run it on a
``sqlite3`` cursor, ``arun_statements`` and ``atransact`` on an ``aiosqlite`` one.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import aiosqlite

T = TypeVar("T")
Params = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What one statement gave."""

    rows: list[tuple[Any, ...]]
    changed: int


Statements = Generator[tuple[str, Params], Answer, T]


@dataclass(frozen=True, slots=True)
class Bounds:
    """The statements around a transaction."""

    begin: str
    commit: str
    undo: tuple[str, ...]


WRITING = Bounds("BEGIN IMMEDIATE", "COMMIT", ("ROLLBACK",))
READING = Bounds("BEGIN", "COMMIT", ("ROLLBACK",))
"""One snapshot for several statements, which only read."""
# The user's transaction stays open, with our work in it or without.
_NESTED = Bounds(
    "SAVEPOINT retaining_saver",
    "RELEASE retaining_saver",
    ("ROLLBACK TO retaining_saver", "RELEASE retaining_saver"),
)


def run_statements(cursor: sqlite3.Cursor, statements: Statements[T]) -> T:
    """Run an operation as it is, in whatever transaction the connection has."""
    try:
        statement = next(statements)
        while True:
            cursor.execute(*statement)
            statement = statements.send(Answer(cursor.fetchall(), cursor.rowcount))
    except StopIteration as done:
        value: T = done.value
        return value


async def arun_statements(cursor: aiosqlite.Cursor, statements: Statements[T]) -> T:
    """Run an operation as it is, in whatever transaction the connection has."""
    try:
        statement = next(statements)
        while True:
            await cursor.execute(*statement)
            rows: list[Any] = list(await cursor.fetchall())
            statement = statements.send(Answer(rows, cursor.rowcount))
    except StopIteration as done:
        value: T = done.value
        return value


def transact(cursor: sqlite3.Cursor, statements: Statements[T], own: Bounds = WRITING) -> T:
    """Run an operation in one transaction, or inside the one that the user has open."""
    with transaction(cursor, own):
        return run_statements(cursor, statements)


@contextmanager
def transaction(cursor: sqlite3.Cursor, own: Bounds) -> Iterator[None]:
    """Hold one transaction, or a savepoint in the one that the user has open."""
    bounds = _NESTED if cursor.connection.in_transaction else own
    cursor.execute(bounds.begin)
    try:
        yield
        cursor.execute(bounds.commit)
    except BaseException:
        for statement in bounds.undo:
            with suppress(sqlite3.OperationalError):  # A full disk has ended it already.
                cursor.execute(statement)
        raise


async def atransact(
    connection: aiosqlite.Connection,
    cursor: aiosqlite.Cursor,
    statements: Statements[T],
    own: Bounds = WRITING,
) -> T:
    """Run an operation in one transaction, or inside the one that the user has open."""
    async with atransaction(connection, cursor, own):
        return await arun_statements(cursor, statements)


@asynccontextmanager
async def atransaction(
    connection: aiosqlite.Connection, cursor: aiosqlite.Cursor, own: Bounds
) -> AsyncIterator[None]:
    """Hold one transaction, or a savepoint in the one that the user has open."""
    bounds = _NESTED if connection.in_transaction else own
    await cursor.execute(bounds.begin)
    try:
        yield
        await cursor.execute(bounds.commit)
    except BaseException:
        for statement in bounds.undo:
            with suppress(sqlite3.OperationalError):  # A full disk has ended it already.
                await cursor.execute(statement)
        raise


def load_metadata(stored: bytes | str | None) -> dict[str, Any]:
    """Read stored metadata."""
    loaded: dict[str, Any] = {} if stored is None else json.loads(stored)
    return loaded


def dump_metadata(metadata: Mapping[str, Any]) -> bytes:
    """Spell metadata as the savers store it."""
    return json.dumps(metadata, ensure_ascii=False).encode("utf-8", "ignore")
