"""A thread under whole-thread retention: what users see of it, and every row that it has."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

from retaining_saver import RetainingSaver
from retaining_saver.backends import find_backend
from tests.support import releases
from tests.support.faces import faces_of
from tests.support.histories import Talk
from tests.support.savers import Saver, Where, open_saver
from tests.support.threads import metadata_only, parent_id

Key = tuple[str, str]
Dump = dict[str, list[tuple[Any, ...]]]

_POSTGRES_TABLES = ("checkpoints", "checkpoint_writes", "checkpoint_blobs")
_SQLITE_TABLES = ("checkpoints", "writes")
# Nothing here outlives the test, so nothing has to reach the disk.
_UNSYNCED = "PRAGMA synchronous = OFF"


class Clock:
    """The time that a saver is told."""

    def __init__(self, ahead: timedelta) -> None:
        self.now = datetime.now(timezone.utc) + ahead

    def __call__(self) -> datetime:
        return self.now


@dataclass(frozen=True, slots=True)
class Retained:
    """One thread of a bare saver and of the saver that retains it.

    ``builder`` makes the thread's graph on either of them; ``backend`` is what the retaining
    saver reaches the rows by, for a test that joins its effects.
    """

    kind: str
    where: Where
    bare: Saver
    ours: RetainingSaver
    builder: Callable[[Any], Any]
    thread_id: str
    clock: Clock
    backend: Any

    @property
    def on_bare(self) -> Talk:
        """The thread as its graph sees it on the bare saver."""
        return Talk(self.kind, self.bare, self.builder(self.bare), self.thread_id)

    @property
    def on_ours(self) -> Talk:
        """The thread as its graph sees it on the retaining saver."""
        return Talk(self.kind, self.ours, self.builder(self.ours), self.thread_id)

    def named(self, thread_id: str) -> Retained:
        return replace(self, thread_id=thread_id)

    async def do(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the retaining saver by a face that the saver has."""
        face = faces_of(self.kind)[-1]
        return await face(getattr(self.ours, name), getattr(self.ours, f"a{name}"), *args, **kwargs)

    async def enforce(self, policy: Any = None, **options: Any) -> Any:
        return await self.do("enforce_thread_retention", self.thread_id, policy, **options)

    async def copied(self, suffix: str) -> Retained:
        """Copy the thread through the public method; return the copy."""
        target = f"{self.thread_id}-{suffix}"
        await self.do("copy_thread", self.thread_id, target)
        return self.named(target)

    async def rows(self, saver: Saver | None = None) -> list[CheckpointTuple]:
        """List every checkpoint, through the bare saver unless another is given."""
        saver = saver or self.bare
        config: Any = {"configurable": {"thread_id": self.thread_id}}
        if faces_of(self.kind)[-1].name == "async":
            found = [each async for each in saver.alist(config)]
        else:
            found = await asyncio.to_thread(lambda: list(saver.list(config)))
        return sorted(found, key=key_of)

    async def seen(self, saver: Saver) -> dict[Key, Seen]:
        """Read every checkpoint but carriers, and what its delta channels read."""
        found = await self.rows(saver)
        delta = {c for f in found for c in f.metadata.get("counters_since_delta_snapshot") or ()}
        # Older releases do not count at an update.
        channels = getattr(self.builder(self.bare), "channels", {})
        delta |= {name for name, each in channels.items() if isinstance(each, DeltaChannel)}
        leaves = set(metadata_only(found))
        return {
            key_of(f): Seen(
                f.checkpoint,
                sorted(f.pending_writes or (), key=repr),
                {k: v for k, v in f.metadata.items() if k not in RECORDED},
                await self._histories(saver, f, delta),
                f.checkpoint["id"] in leaves,
            )
            for f in found
            if not is_carrier(f)
        }

    async def _histories(
        self, saver: Saver, found: CheckpointTuple, delta: Iterable[str]
    ) -> dict[str, Any]:
        body = found.checkpoint
        channels = [
            c
            for c in sorted(delta)
            if c in body["channel_versions"] and c not in body["channel_values"]
        ]
        if not channels:
            return {}
        face = faces_of(self.kind)[-1]
        histories = await face(
            saver.get_delta_channel_history,
            saver.aget_delta_channel_history,
            config=found.config,
            channels=channels,
        )
        return {
            channel: (history.get("seed"), [value for _, _, value in history["writes"]])
            for channel, history in histories.items()
        }

    async def states(self, talk: Talk, ids: Iterable[str]) -> dict[str, Any]:
        """Read checkpoints of the root namespace as a graph does."""
        return {i: shown(await talk.state(i)) for i in ids}

    def dump(self, thread_id: str | None = None) -> Dump:
        """Read every row of a thread, by a connection of its own where there is a database."""
        thread_id = thread_id or self.thread_id
        if isinstance(self.bare, InMemorySaver):
            return _dump_memory(self.bare, thread_id)
        if self.kind.endswith("sqlite"):
            with closing(sqlite3.connect(self.where.sqlite)) as own:
                return _dump_tables(own, _SQLITE_TABLES, "?", thread_id)
        with psycopg.connect(self.where.postgres) as pg:
            return _dump_tables(pg, _POSTGRES_TABLES, "%s", thread_id)

    async def orphans(self) -> tuple[set[Key], set[tuple[str, ...]]]:
        """Find write rows of no stored checkpoint, and blobs that none names by its versions."""
        found = await self.rows()
        stored = {key_of(f) for f in found}
        blobs = {
            (key_of(f)[0], channel, str(version))
            for f in found
            for channel, version in f.checkpoint["channel_versions"].items()
        }
        dump = self.dump()
        writes = dump.get("writes", dump.get("checkpoint_writes", []))
        held = dump.get("blobs", dump.get("checkpoint_blobs", []))
        return {row[1:3] for row in writes} - stored, {row[1:4] for row in held} - blobs

    def set_parent(self, checkpoint_id: str, parent_id: str | None) -> None:
        """Change a stored parent id and nothing else, as no method of a saver does."""
        if isinstance(self.bare, InMemorySaver):
            entries = self.bare.storage[self.thread_id][""]
            entries[checkpoint_id] = (*entries[checkpoint_id][:2], parent_id)
            return
        args = (parent_id, self.thread_id, checkpoint_id)
        sql = (
            "UPDATE checkpoints SET parent_checkpoint_id = ? WHERE thread_id = ? "
            "AND checkpoint_ns = '' AND checkpoint_id = ?"
        )
        if self.kind.endswith("sqlite"):
            with closing(sqlite3.connect(self.where.sqlite)) as own, own:
                own.execute(sql, args)
            return
        with psycopg.connect(self.where.postgres) as pg:
            pg.execute(sql.replace("?", "%s").encode(), args)


RECORDED = ("run_durations", "run_message_ids", "retention", "writes")


@dataclass(frozen=True)
class Seen:
    """One checkpoint: its content, pending writes and metadata, and what its deltas read."""

    checkpoint: Mapping[str, Any]
    pending: list[Any]
    metadata: dict[str, Any]
    histories: dict[str, Any]
    is_leaf: bool


@asynccontextmanager
async def open_retained(
    kind: str, where: Where, thread_id: str, builder: Callable[[Any], Any], **options: Any
) -> AsyncIterator[Retained]:
    """Open a saver of ``kind``, wrapped with a clock that a test may set.

    It is some hours ahead, so that nothing that a test made is young.
    """
    async with open_saver(kind, where) as bare:
        clock = Clock(timedelta(hours=5))
        yield await _retained(kind, where, bare, builder, thread_id, clock, options)


@asynccontextmanager
async def open_two(
    kind: str, where: Where, thread_id: str, builder: Callable[[Any], Any], **options: Any
) -> AsyncIterator[tuple[Retained, Retained]]:
    """Open two workers on one database, each with a memory and locks of its own.

    Their clock is right: what a run stores while it runs is young.
    """
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(open_saver(kind, where))
        other = one
        if kind != "memory":
            other = await stack.enter_async_context(open_saver(kind, where))
        clock = Clock(timedelta(0))
        workers = [
            await _retained(kind, where, bare, builder, thread_id, clock, options)
            for bare in (one, other)
        ]
        yield workers[0], workers[1]


async def _retained(
    kind: str,
    where: Where,
    bare: Saver,
    builder: Callable[[Any], Any],
    thread_id: str,
    clock: Clock,
    options: dict[str, Any],
) -> Retained:
    if isinstance(bare, SqliteSaver):
        bare.conn.execute(_UNSYNCED)
    elif isinstance(bare, AsyncSqliteSaver):
        await bare.conn.execute(_UNSYNCED)
    found = find_backend(bare)
    assert found is not None
    backend = found(bare)
    ours = RetainingSaver(bare, clock=clock, backend=backend, **options)
    return Retained(kind, where, bare, ours, builder, thread_id, clock, backend)


def key_of(found: CheckpointTuple) -> Key:
    return found.config["configurable"]["checkpoint_ns"], found.checkpoint["id"]


def is_carrier(found: CheckpointTuple) -> bool:
    mark: Any = found.metadata.get("retention") or {}
    return bool(mark.get("kind") == "carrier" and mark.get("id") == found.checkpoint["id"])


def shown(state: Any) -> tuple[Any, ...]:
    """Keep of a state snapshot what a user decides by."""
    tasks = [(t.name, t.interrupts, t.error, t.result) for t in state.tasks]
    return (state.values, state.next, tasks, state.interrupts)


def timeless(state: Any) -> tuple[Any, ...]:
    """Keep of a state snapshot what two equal runs on two threads share."""
    tasks = [(t.name, [i.value for i in t.interrupts], t.error, t.result) for t in state.tasks]
    return (releases.in_told_order(state.values), state.next, tasks)


def said(output: Any) -> Any:
    """Keep of a run's output what two equal runs on two threads share."""
    asked = [question.value for question in output.get("__interrupt__", ())]
    return {**releases.in_told_order(output), "__interrupt__": asked}


def lines(found: Iterable[CheckpointTuple]) -> dict[Key, list[str]]:
    """Walk from each checkpoint over its parents; the walk ends where none is named or stored."""
    by_key = {key_of(f): f for f in found}
    walked: dict[Key, list[str]] = {}
    for key, row in by_key.items():
        line, at = [], parent_id(row)
        while at is not None:
            line.append(at)
            at = parent_id(by_key[key[0], at]) if (key[0], at) in by_key else None
        walked[key] = line
    return walked


def renamed(dump: Dump, old: str, new: str) -> dict[str, list[str]]:
    """Spell a dump as if it were another thread's."""
    return {
        table: sorted(repr(tuple(new if v == old else v for v in row)) for row in rows)
        for table, rows in dump.items()
    }


def _dump_memory(saver: InMemorySaver, thread_id: str) -> Dump:
    namespaces = dict(saver.storage).get(thread_id, {})
    return {
        "checkpoints": sorted(
            (thread_id, ns, checkpoint_id, *map(repr, entry))
            for ns, entries in namespaces.items()
            for checkpoint_id, entry in entries.items()
        ),
        "writes": sorted(
            (*key, *map(repr, item))
            for key, stored in dict(saver.writes).items()
            if key[0] == thread_id
            for item in stored.items()
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
