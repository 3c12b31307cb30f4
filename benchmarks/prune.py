"""How long it takes to cut one long thread to its newest state, as a ratio to the shortest way.

On Postgres the shortest way is the saver's own ``prune``, which refuses delta channels and sees
no metadata-only checkpoint. SQLite's saver has none: there it is one transaction written by hand
that knows what to keep. Both threads of a round hold the same rows; who goes first changes from
round to round.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from langchain_core.messages import AIMessage
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.checkpoint.sqlite import SqliteSaver

from benchmarks import databases
from retaining_saver import RetainingSaver

LARGE = {"checkpoints": 20_000, "rounds": 7}

PER_TURN = 5
"""Checkpoints of a turn: the input, and four supersteps."""

# A chat: every superstep stores the messages anew and leaves two writes behind.
_POSTGRES = """
WITH numbered AS (
    SELECT n, 139900000000000000 + n::bigint * 20000 AS ticks,
        lpad(n::text, 32, '0') || '.0.5' AS version,
        lpad(greatest(n - 1, 1)::text, 32, '0') || '.0.5' AS before,
        lpad((n - (n - 1) %% 5)::text, 32, '0') || '.0.5' AS started
    FROM generate_series(1, %(checkpoints)s) AS n
), named AS (
    SELECT *, concat_ws('-', lpad(to_hex(ticks >> 28), 8, '0'),
        lpad(to_hex(ticks >> 12 & 65535), 4, '0'), '6' || lpad(to_hex(ticks & 4095), 3, '0'),
        '8000', lpad(to_hex(n), 12, '0')) AS id
    FROM numbered
), stored AS (
    INSERT INTO checkpoints
        (thread_id, checkpoint_ns, checkpoint_id, parent_checkpoint_id, checkpoint, metadata)
    SELECT %(thread)s, '', id, lag(id) OVER (ORDER BY n), jsonb_build_object(
        'v', 4, 'id', id, 'ts', '2025-01-01T00:00:00+00:00',
        'updated_channels', '["messages"]'::jsonb,
        'channel_values', CASE WHEN n %% 5 IN (0, 1) THEN '{}'
            ELSE jsonb_build_object('branch:to:' || n %% 5, NULL) END,
        'channel_versions', jsonb_build_object('messages', version, '__start__', started,
            'branch:to:2', before, 'branch:to:3', before, 'branch:to:4', before),
        'versions_seen', jsonb_build_object('__input__', '{}'::jsonb,
            '__start__', jsonb_build_object('__start__', started),
            'plan', jsonb_build_object('branch:to:2', before),
            'search', jsonb_build_object('branch:to:3', before),
            'conclude', jsonb_build_object('branch:to:4', before))
    ), jsonb_build_object('step', n - 2, 'parents', '{}'::jsonb,
        'source', CASE WHEN n %% 5 = 1 THEN 'input' ELSE 'loop' END)
    FROM named
), wrote AS (
    INSERT INTO checkpoint_writes
        (thread_id, checkpoint_ns, checkpoint_id, task_id, idx, channel, type, blob, task_path)
    SELECT %(thread)s, '', id, md5(id)::uuid::text, idx, channel, 'msgpack',
        decode(repeat('ab', size), 'hex'), '~__pregel_pull, plan'
    FROM named CROSS JOIN (
        VALUES (0, 'messages', 300), (1, 'branch:to:2', 0)
    ) AS w (idx, channel, size)
    WHERE n < %(checkpoints)s
)
INSERT INTO checkpoint_blobs (thread_id, checkpoint_ns, channel, version, type, blob)
SELECT %(thread)s, '', 'messages', version, 'msgpack', decode(repeat(md5(id), 60), 'hex') FROM named
UNION ALL
SELECT %(thread)s, '', '__start__', version, 'msgpack', decode(repeat('ab', 150), 'hex') FROM named
WHERE n %% 5 = 1
"""


class _Twins(Protocol):
    """Two threads with the same rows, and two ways to cut one."""

    async def build(self, thread_id: str, checkpoints: int) -> None: ...
    async def ours(self, thread_id: str) -> None: ...
    async def shortest(self, thread_id: str) -> None: ...
    async def left(self, thread_id: str) -> list[Any]:
        """Say what is stored, but for the thread's name, and delete it."""
        ...


_TABLES = ("checkpoints", "checkpoint_writes", "checkpoint_blobs")


@dataclass
class _Postgres:
    saver: PostgresSaver

    async def build(self, thread_id: str, checkpoints: int) -> None:
        parameters = {"thread": thread_id, "checkpoints": checkpoints}
        self._rows(_POSTGRES, parameters)
        for table in _TABLES:
            self._rows(f"VACUUM ANALYZE {table}")

    async def ours(self, thread_id: str) -> None:
        RetainingSaver(self.saver).prune([thread_id])

    async def shortest(self, thread_id: str) -> None:
        self.saver.prune([thread_id])

    async def left(self, thread_id: str) -> list[Any]:
        found = [
            {**row, "thread_id": ""}
            for table in _TABLES
            for row in self._rows(
                f"DELETE FROM {table} WHERE thread_id = %(thread)s RETURNING *",
                {"thread": thread_id},
            )
        ]
        return sorted(found, key=repr)

    def _rows(self, sql: str, parameters: dict[str, Any] | None = None) -> list[Any]:
        cursor = self.saver.conn.execute(sql, parameters)  # type: ignore[union-attr]  # No pool.
        return cursor.fetchall() if cursor.description else []


@dataclass
class _AsyncPostgres:
    saver: AsyncPostgresSaver

    async def build(self, thread_id: str, checkpoints: int) -> None:
        await self._rows(_POSTGRES, {"thread": thread_id, "checkpoints": checkpoints})
        for table in _TABLES:
            await self._rows(f"VACUUM ANALYZE {table}")

    async def ours(self, thread_id: str) -> None:
        await RetainingSaver(self.saver).aprune([thread_id])

    async def shortest(self, thread_id: str) -> None:
        await self.saver.aprune([thread_id])

    async def left(self, thread_id: str) -> list[Any]:
        found = [
            {**row, "thread_id": ""}
            for table in _TABLES
            for row in await self._rows(
                f"DELETE FROM {table} WHERE thread_id = %(thread)s RETURNING *",
                {"thread": thread_id},
            )
        ]
        return sorted(found, key=repr)

    async def _rows(self, sql: str, parameters: dict[str, Any] | None = None) -> list[Any]:
        cursor = await self.saver.conn.execute(sql, parameters)  # type: ignore[union-attr]  # No pool.
        return await cursor.fetchall() if cursor.description else []


_CUT = (
    "DELETE FROM writes WHERE thread_id = ? AND checkpoint_ns = '' AND checkpoint_id <> ?",
    "DELETE FROM checkpoints WHERE thread_id = ? AND checkpoint_ns = '' AND checkpoint_id <> ?",
    "UPDATE checkpoints SET parent_checkpoint_id = NULL WHERE thread_id = ? AND checkpoint_id = ?",
)


@dataclass
class _Sqlite:
    saver: SqliteSaver

    async def build(self, thread_id: str, checkpoints: int) -> None:
        connection, serde = self.saver.conn, self.saver.serde
        value = serde.dumps_typed([AIMessage("x" * 300)])
        messages = [AIMessage("x" * 2_000)]
        ids = [str(uuid6()) for _ in range(checkpoints)]
        for n, checkpoint_id in enumerate(ids):
            parent_id = ids[n - 1] if n else None
            stored = serde.dumps_typed(_checkpoint(n, checkpoint_id, messages))
            source = "loop" if n % PER_TURN else "input"
            metadata = f'{{"source": "{source}", "step": {n - 1}, "parents": {{}}}}'
            row = (thread_id, "", checkpoint_id, parent_id, *stored, metadata.encode())
            connection.execute("INSERT INTO checkpoints VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            if n + 1 < checkpoints:
                for idx, (channel, typed) in enumerate(
                    (("messages", value), ("branch:to:2", ("null", b"")))
                ):
                    write = (thread_id, "", checkpoint_id, "task", "", idx, channel, *typed)
                    connection.execute(
                        "INSERT INTO writes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", write
                    )
        connection.commit()

    async def ours(self, thread_id: str) -> None:
        RetainingSaver(self.saver).prune([thread_id])

    async def shortest(self, thread_id: str) -> None:
        connection = self.saver.conn
        ((head,),) = connection.execute(
            "SELECT max(checkpoint_id) FROM checkpoints WHERE thread_id = ?", (thread_id,)
        )
        with connection:
            for sql in _CUT:
                connection.execute(sql, (thread_id, head))

    async def left(self, thread_id: str) -> list[Any]:
        found: list[Any] = []
        for table in ("checkpoints", "writes"):
            rows = self.saver.conn.execute(
                f"SELECT count(*) FROM {table} WHERE thread_id = ?", (thread_id,)
            )
            found += rows.fetchall()
            self.saver.conn.execute(f"DELETE FROM {table} WHERE thread_id = ?", (thread_id,))
        self.saver.conn.commit()
        return found


def _checkpoint(n: int, checkpoint_id: str, messages: list[Any]) -> dict[str, Any]:
    def version(of: int) -> str:
        return f"{max(of, 1):032}.0.5"

    branches = {f"branch:to:{k}": version(n - 1) for k in (2, 3, 4)}
    waiting = f"branch:to:{n % PER_TURN}"
    return {
        "v": 4,
        "id": checkpoint_id,
        "ts": "2025-01-01T00:00:00+00:00",
        "channel_values": {
            "messages": messages,
            **({waiting: None} if waiting in branches else {}),
        },
        "channel_versions": {
            "messages": version(n),
            "__start__": version(n - n % PER_TURN),
            **branches,
        },
        "versions_seen": {"__input__": {}, **{k: {k: v} for k, v in branches.items()}},
        "updated_channels": ["messages"],
    }


def measure(checkpoints: int = 4_000, rounds: int = 5) -> Iterator[dict[str, Any]]:
    """Cut twin threads on every database; yield one record for each."""
    for name, opened in _DATABASES.items():
        yield asyncio.run(_record(name, opened, checkpoints, rounds))


async def _record(
    name: str,
    opened: Callable[[], AbstractAsyncContextManager[_Twins]],
    checkpoints: int,
    rounds: int,
) -> dict[str, Any]:
    pairs: list[tuple[float, float]] = []
    async with opened() as twins:
        for number in range(rounds + 1):
            await twins.build("ours", checkpoints)
            await twins.build("shortest", checkpoints)
            times: dict[str, float] = {}
            for arm in ("ours", "shortest") if number % 2 else ("shortest", "ours"):
                times[arm] = await _timed(getattr(twins, arm), arm)
            assert await twins.left("ours") == await twins.left("shortest")
            if number:  # The first one warms everything up.
                pairs.append((times["ours"], times["shortest"]))
    ratios = sorted(ours / shortest for ours, shortest in pairs)
    return {
        "database": name,
        "checkpoints": checkpoints,
        "rounds": rounds,
        "ours_s": round(statistics.median(ours for ours, _ in pairs), 3),
        "shortest_s": round(statistics.median(shortest for _, shortest in pairs), 3),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_low": round(ratios[0], 3),
        "ratio_high": round(ratios[-1], 3),
    }


async def _timed(cut: Callable[[str], Any], thread_id: str) -> float:
    started = time.perf_counter()
    await cut(thread_id)
    return time.perf_counter() - started


@asynccontextmanager
async def _sqlite() -> AsyncIterator[_Twins]:
    with databases.sqlite() as saver:
        yield _Sqlite(saver)


@asynccontextmanager
async def _postgres() -> AsyncIterator[_Twins]:
    with databases.postgres() as saver:
        yield _Postgres(saver)


@asynccontextmanager
async def _async_postgres() -> AsyncIterator[_Twins]:
    async with databases.apostgres() as saver:
        yield _AsyncPostgres(saver)


_DATABASES: dict[str, Callable[[], AbstractAsyncContextManager[_Twins]]] = {
    "SqliteSaver": _sqlite,
    "PostgresSaver": _postgres,
    "AsyncPostgresSaver": _async_postgres,
}
