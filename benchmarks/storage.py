"""What a conversation with a recorded duration after each turn stores, wrapped and bare.

The conversation is the demo's: ``python -m benchmarks.demo`` draws it for SQLite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from benchmarks import databases
from benchmarks.assistant import build, duration_leaf, question
from retaining_saver import RetainingSaver

LARGE = {"turns": 200}

_ARMS: dict[str, Callable[[Any], Any]] = {"bare": lambda saver: saver, "wrapped": RetainingSaver}
_DATABASES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "SqliteSaver": databases.sqlite,
    "PostgresSaver": databases.postgres,
}
_SIZE = {
    "SqliteSaver": {
        "checkpoints": "length(checkpoint) + length(metadata)",
        "writes": "length(value)",
    },
    "PostgresSaver": {
        "checkpoints": "pg_column_size(t.*)",
        "checkpoint_writes": "pg_column_size(t.*)",
        "checkpoint_blobs": "pg_column_size(t.*)",
    },
}


def measure(turns: int = 30) -> Iterator[dict[str, Any]]:
    """Hold the conversation once on each database, in each durability, on each saver."""
    for database in _DATABASES:
        for durability in ("async", "exit"):
            for arm in _ARMS:
                yield {
                    "database": database,
                    "durability": durability,
                    "arm": arm,
                    "turns": turns,
                    **_stored(database, durability, arm, turns),
                }


def _stored(database: str, durability: str, arm: str, turns: int) -> dict[str, int]:
    with _DATABASES[database]() as inner:
        saver = _ARMS[arm](inner)
        graph = build(saver)
        thread: Any = {"configurable": {"thread_id": "one"}}
        for turn in range(turns):
            graph.invoke(question(turn), thread, durability=durability)
            saver.put(*duration_leaf(saver.get_tuple(thread), f"run-{turn}", 3))
        found: dict[str, int] = {}
        for table, size in _SIZE[database].items():
            rows, stored = _one(inner, f"SELECT count(*), sum({size}) FROM {table} AS t")
            found[f"{table}_rows"] = int(rows)
            found[f"{table}_bytes"] = int(stored or 0)
        return found


def _one(saver: Any, statement: str) -> tuple[Any, ...]:
    row = saver.conn.execute(statement).fetchone()
    return tuple(row.values()) if isinstance(row, dict) else tuple(row)
