"""What rewriting whole threads promises on SQLite alone: blobs that hold values, and old tables."""

from __future__ import annotations

import sqlite3
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import pytest
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.base import Checkpoint
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from langgraph.checkpoint.sqlite import SqliteSaver
from pydantic import BaseModel

from retaining_saver.backends.base import Movable
from retaining_saver.backends.opaque import pack_checkpoint, read_checkpoint
from retaining_saver.backends.sqlite import SqliteBackend
from retaining_saver.plan import plan_prune
from tests.contract.stage import Stage, checkpoint, execute, in_transaction, open_stage
from tests.contract.test_threads import (
    copied,
    is_carrier,
    lived,
    matches_nothing,
    of_thread,
    pruned,
    read,
    seen,
)
from tests.support.faces import FACES, Face, faces_of
from tests.support.histories import BY_NAME
from tests.support.savers import Where

KINDS = ("sqlite", "asqlite")
TASK = "6f8a2f0e-5c55-5d0f-9d7c-0f3a3b1f2c11"
EXIT_TASK = "00000003-5c55-5d0f-9d7c-0f3a3b1f2c11"


def cipher(key: bytes = b"0" * 16) -> EncryptedSerializer:
    return EncryptedSerializer.from_pycryptodome_aes(key=key)


@pytest.fixture(params=KINDS)
async def stage(
    request: pytest.FixtureRequest, where: Where, thread_id: str, face: Face
) -> AsyncIterator[Stage]:
    async with open_stage(request.param, where, thread_id, face) as opened:
        yield opened


# Tables without a task path


async def forget_task_paths(stage: Stage) -> None:
    """Turn the table of writes into the one that savers before 3.1.2 made and read."""
    columns = "thread_id, checkpoint_ns, checkpoint_id, task_id, idx, channel, type, value"
    with closing(sqlite3.connect(stage.where.sqlite)) as own, own:
        own.executescript(
            f"""
            CREATE TABLE old (
                thread_id TEXT NOT NULL,
                checkpoint_ns TEXT NOT NULL DEFAULT '',
                checkpoint_id TEXT NOT NULL,
                task_id TEXT NOT NULL,
                idx INTEGER NOT NULL,
                channel TEXT NOT NULL,
                type TEXT,
                value BLOB,
                PRIMARY KEY (thread_id, checkpoint_ns, checkpoint_id, task_id, idx)
            );
            INSERT INTO old ({columns}) SELECT {columns} FROM writes;
            DROP TABLE writes;
            ALTER TABLE old RENAME TO writes;
            """
        )
    # The newer saver reads a table as the older ones do once it believes that it cannot change it.
    cast(Any, stage.saver)._has_task_path = False


@pytest.mark.parametrize("name", ["two-deltas", "questions-delta", "turns-delta"])
async def test_a_table_without_task_paths_reads_as_before(stage: Stage, name: str) -> None:
    await lived(stage, name)
    await forget_task_paths(stage)
    before = after = await seen(stage)
    for _ in range(2):
        thread, decided = await pruned(stage)
        assert await stage.call("apply", thread, decided)
        after = await seen(stage)
        assert {key: before[key] for key in after} == after
    assert 0 < len(after) < len(before)
    assert any(map(is_carrier, await stage.listed()))


async def test_a_carrier_of_a_carrier_keeps_the_order_without_task_paths(stage: Stage) -> None:
    talk = await lived(stage, "two-deltas")
    thread, decided = await pruned(stage)
    assert await stage.call("apply", thread, decided)
    await talk.say({"log": ["once more"], "notes": []})
    await forget_task_paths(stage)
    before = await seen(stage)
    thread, decided = await pruned(stage)
    assert await stage.call("apply", thread, decided)
    after = await seen(stage)
    assert {key: before[key] for key in after} == after


async def test_a_table_without_task_paths_is_copied_and_reclaimed_from(stage: Stage) -> None:
    leaf, parent = await stage.leaf_and_parent()
    await stage.put_write(leaf.checkpoint_id, EXIT_TASK)
    await forget_task_paths(stage)
    copy = await copied(stage, "copy")
    assert stage.dump() == of_thread(copy.dump(), copy, stage)
    assert "reclaimed" == await stage.reclaim(leaf, parent, movable=Movable(exits=True))
    assert await stage.call("has_writes", stage.ref(parent.checkpoint_id))


# Values that stand in blobs


class Address(BaseModel):
    street: str
    since: datetime


@dataclass
class Point:
    x: int
    y: float


VALUES: list[Any] = [
    Address(street="Main", since=datetime(2024, 1, 2, tzinfo=timezone.utc)),
    _DeltaSnapshot([HumanMessage("hello", id="h"), {"nested": {1, 2}}]),
    {"set": {1, 2, 3}, "frozen": frozenset({"a"}), "tuple": (1, (2,)), "bytes": b"\x00\xff"},
    {1: "one", "two": 2, None: [], 2.5: True},
    [
        datetime(2024, 1, 2, tzinfo=timezone.utc),
        timedelta(days=1),
        Decimal("1.10"),
        UUID(int=7),
        Path("/a/b"),
    ],
    [Point(1, 2.0), 1, 1.0, True, None, -(2**63), 2**64 - 1, "é\u0000"],
    None,
    [],
]


@pytest.mark.parametrize("serde", [JsonPlusSerializer(), cipher()], ids=["plain", "encrypted"])
@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_moves_to_another_blob_without_its_class(
    value: Any, serde: SerializerProtocol
) -> None:
    source = checkpoint({"kept": value, "left": object.__name__})
    stored = serde.dumps_typed(source)
    body = read_checkpoint(stored, serde)
    carrier = {**checkpoint(), "channel_values": {"kept": body["channel_values"]["kept"]}}
    kind, data = pack_checkpoint(carrier, serde)
    expected = serde.loads_typed(stored)["channel_values"]["kept"]
    loaded = serde.loads_typed((kind, data))
    assert {**carrier, "channel_values": {"kept": expected}} == loaded
    assert repr(expected) == repr(loaded["channel_values"]["kept"])
    assert stored[0] == kind


@pytest.mark.parametrize("kind", KINDS)
async def test_an_encrypted_thread_stays_encrypted(kind: str, where: Where, thread_id: str) -> None:
    async with open_stage(kind, where, thread_id, faces_of(kind)[-1], serde=cipher()) as stage:
        await lived(stage, "turns-delta")
        before = await seen(stage)
        thread, decided = await pruned(stage)
        assert decided.carry[0].seeds
        assert await stage.call("apply", thread, decided)
        after = await seen(stage)
        assert {key: before[key] for key in after} == after
        types = {row[4] for row in stage.dump()["checkpoints"]}
        assert {"msgpack+aes"} == types


async def test_without_the_cipher_a_thread_is_left_alone(where: Where, thread_id: str) -> None:
    async with open_stage("sqlite", where, thread_id, FACES[0], serde=cipher()) as written:
        await written.talk()
    async with open_stage("sqlite", where, thread_id, FACES[0]) as stage:
        await assert_left_alone(stage, "has no cipher")


async def test_an_unknown_type_leaves_the_thread_alone(stage: Stage) -> None:
    await stage.talk()
    with closing(sqlite3.connect(stage.where.sqlite)) as own, own:
        own.execute("UPDATE checkpoints SET type = 'strange' WHERE rowid = 2")
    await assert_left_alone(stage, "'strange'")


async def assert_left_alone(stage: Stage, why: str) -> None:
    before = stage.dump()
    thread = await read(stage)
    assert thread.problems
    assert [] == [problem for problem in thread.problems if why not in problem]
    decided = plan_prune(thread, (), datetime.now(timezone.utc))
    assert decided.refused
    applied = await stage.call("apply", thread, decided)
    assert applied.before == applied.after
    assert len(before["checkpoints"]) == applied.before.rows["checkpoints"]
    assert before == stage.dump()


class Unpackable:
    """A value that only pickle can store."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unpackable)

    __hash__ = None  # type: ignore[assignment]  # Equal and mutable, like most values.


PICKLING = JsonPlusSerializer(pickle_fallback=True)


async def put_pickled(stage: Stage, value: Callable[[], Any]) -> list[str]:
    """Store three checkpoints in a row, with counters as a delta channel's graph writes them."""
    ids: list[str] = []
    for n in range(3):
        parent = ids[-1] if ids else None
        counted = {"counters_since_delta_snapshot": {"log": n}} if n else {}
        made = checkpoint({"log": value(), "plain": Unpackable()} if n == 0 else {"x": n})
        made["channel_versions"] = {**made["channel_versions"], "log": "1"}
        ids.append(await stage.put(made, parent, metadata={"step": n, **counted}))
    return ids


async def test_a_pickled_value_that_would_have_to_move_leaves_the_thread_alone(
    where: Where, thread_id: str
) -> None:
    async with open_stage("sqlite", where, thread_id, FACES[0], serde=PICKLING) as stage:
        await put_pickled(stage, lambda: _DeltaSnapshot([Unpackable()]))
        await assert_left_alone(stage, "'pickle'")


async def test_pickled_checkpoints_of_full_channels_go(where: Where, thread_id: str) -> None:
    async with open_stage("sqlite", where, thread_id, FACES[0], serde=PICKLING) as stage:
        for n in range(3):
            head = (await stage.stored()).checkpoint_id if n else None
            await stage.put(checkpoint({"plain": Unpackable(), "n": n}), head)
        thread, decided = await pruned(stage)
        assert await stage.call("apply", thread, decided)
        (left,) = await stage.listed()
        assert {"plain": Unpackable(), "n": 2} == left.checkpoint["channel_values"]


# Plain threads

PLAIN = {"turns-full", "exit-full", "questions-full"}


@pytest.mark.parametrize("name", BY_NAME)
async def test_a_plain_thread_is_cut_as_its_plan_says(stage: Stage, name: str) -> None:
    await lived(stage, name)
    quick, slow = await copied(stage, "quick"), await copied(stage, "slow")
    before = quick.dump()
    count = await quick.call("cut_plain", quick.thread_id)
    assert (name in PLAIN) == (count is not None)
    if count is None:
        assert before == quick.dump()
        return
    assert await slow.call("is_plain", slow.thread_id)
    thread, decided = await pruned(slow)
    assert await slow.call("apply", thread, decided)
    assert len(decided.drop) == count
    assert slow.dump() == of_thread(quick.dump(), quick, slow)
    assert not await quick.call("is_plain", quick.thread_id)
    assert await quick.call("cut_plain", quick.thread_id) is None


async def _branch(stage: Stage) -> None:
    head = await stage.stored()
    older = (await stage.stored(head.parent_id)).parent_id
    await stage.put_copy(head.checkpoint_id, parent_id=older)


async def _hole(stage: Stage) -> None:
    head = await stage.stored()
    assert head.parent_id is not None
    above = (await stage.stored(head.parent_id)).parent_id
    assert above is not None
    stage.delete_row(above)


async def _leaf_below(stage: Stage) -> None:
    await stage.put_leaf()
    await stage.talk("on the leaf")


async def _young_orphan(stage: Stage) -> None:
    await stage.put_write(str(uuid6()), TASK)


async def _subgraph(stage: Stage) -> None:
    await stage.put(checkpoint({"x": 1}), ns="child:1")


async def _of_another_type(stage: Stage) -> None:
    with closing(sqlite3.connect(stage.where.sqlite)) as own, own:
        own.execute("UPDATE checkpoints SET type = 'strange' WHERE rowid = 2")


async def _unstored_channel(stage: Stage) -> None:
    head = await stage.stored()
    made = checkpoint({"x": 1})
    made["channel_versions"] = {**made["channel_versions"], "may_be_a_delta_channel": "1"}
    await stage.put(made, head.checkpoint_id, metadata={"step": 9})


async def _old_format(stage: Stage) -> None:
    head = await stage.stored()
    made = cast(Checkpoint, {**checkpoint({"x": 1}), "v": 3})
    await stage.put(made, head.checkpoint_id, metadata={"step": 9})


@pytest.mark.parametrize(
    "spoil",
    [
        _branch,
        _hole,
        _leaf_below,
        _young_orphan,
        _subgraph,
        _of_another_type,
        _unstored_channel,
        _old_format,
    ],
)
async def test_a_thread_with_anything_to_decide_is_not_plain(
    stage: Stage, spoil: Callable[[Stage], Awaitable[None]]
) -> None:
    await stage.talk("one")
    await stage.talk("two")
    untouched = await copied(stage, "untouched")
    await spoil(stage)
    before = stage.dump()
    assert await stage.call("cut_plain", stage.thread_id) is None
    assert before == stage.dump()
    assert 9 == await untouched.call("cut_plain", untouched.thread_id)


# Transactions


async def test_the_user_s_transaction_decides_about_a_plan(stage: Stage) -> None:
    await lived(stage, "leaves-delta")
    thread, decided = await pruned(stage)
    before = stage.dump()
    await execute(stage, "CREATE TABLE mine (x)")
    await execute(stage, "INSERT INTO mine VALUES (1)")
    dry = await stage.call("apply", thread, decided, dry_run=True)
    assert in_transaction(stage)
    assert dry == await stage.call("apply", thread, decided)
    assert await stage.call("copy_thread", stage.thread_id, f"{stage.thread_id}-copy", None)
    assert thread != await read(stage)
    assert in_transaction(stage)
    assert before == stage.dump()
    await execute(stage, "ROLLBACK")
    assert before == stage.dump()
    assert thread == await read(stage)


async def test_a_failure_at_the_last_statement_leaves_everything(stage: Stage) -> None:
    await lived(stage, "leaves-delta")
    thread, decided = await pruned(stage)
    await execute(
        stage,
        """CREATE TRIGGER fails BEFORE DELETE ON writes
            BEGIN SELECT RAISE(ABORT, 'no writes go'); END""",
    )
    before = stage.dump()
    with pytest.raises(sqlite3.IntegrityError, match="no writes go"):
        await stage.call("apply", thread, decided)
    assert not in_transaction(stage)
    assert before == stage.dump()


async def test_reading_and_plans_that_change_nothing_wait_for_no_writer(stage: Stage) -> None:
    await stage.talk()
    thread, decided = await pruned(stage)
    assert await stage.call("apply", thread, decided)
    with closing(sqlite3.connect(stage.where.sqlite, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        thread, decided = await pruned(stage)
        assert not decided.changes
        assert await stage.call("apply", thread, decided)
        assert [] == await stage.call("threads_of_runs", ["no such run"])
        other.execute("ROLLBACK")
    assert not in_transaction(stage)


# Memory

BLOB = 300_000


def test_memory_does_not_grow_with_the_number_of_checkpoints(tmp_path: Path) -> None:
    few, many = (_peak(tmp_path / f"{n}.sqlite", n) for n in (20, 120))
    assert few > BLOB
    # A hundred blobs more are 30 MB more; a hundred records are less than one blob.
    assert many < few + BLOB


def _peak(path: Path, count: int) -> int:
    with closing(sqlite3.connect(path, check_same_thread=False)) as connection:
        saver = SqliteSaver(connection)
        parent_id: str | None = None
        for n in range(count):
            made = checkpoint({"text": f"{n:06}" * (BLOB // 6)})
            config: Any = {
                "configurable": {
                    "thread_id": "t",
                    "checkpoint_ns": "",
                    "checkpoint_id": parent_id,
                }
            }
            saver.put(config, made, {"step": n}, {})
            parent_id = made["id"]
        backend = SqliteBackend(saver)
        tracemalloc.start()
        try:
            thread = backend.stored("t", matches_nothing)
            decided = plan_prune(thread, (), datetime.now(timezone.utc))
            assert count - 1 == len(decided.drop)
            assert backend.apply(thread, decided)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
