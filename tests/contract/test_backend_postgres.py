"""What the Postgres backend promises beyond the contract of all backends.

It works under whatever settings a user gave the connection, never decides about the user's own
transaction, and asks for nothing that grows with the history. And a warning: if a new release of
the saver changes its tables, the last tests here say so.
"""

from __future__ import annotations

import asyncio
import json
import operator
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import Annotated, Any
from uuid import UUID, uuid5

import psycopg
import pytest
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.graph import START, StateGraph
from langgraph.types import Send, interrupt
from psycopg import AsyncConnection, ClientCursor, Connection, Cursor
from psycopg.pq import TransactionStatus
from psycopg.rows import dict_row, namedtuple_row, scalar_row, tuple_row
from psycopg.types.json import set_json_dumps, set_json_loads
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from typing_extensions import TypedDict

from retaining_saver.backends.base import Backend, Movable, Row
from retaining_saver.backends.postgres import PostgresBackend
from retaining_saver.records import Ref
from tests.contract.stage import lookup
from tests.support import releases
from tests.support.graphs import chat_graph, raw_pregel, say
from tests.support.leaves import aput_leaf, put_leaf

Saver = BaseCheckpointSaver[Any]


@contextmanager
def connected(url: str, **settings: Any) -> Iterator[Connection[Any]]:
    with Connection.connect(url, **{"autocommit": True, **settings}) as connection:
        yield connection


@pytest.fixture
def saver(postgres_url: str) -> Iterator[PostgresSaver]:
    with PostgresSaver.from_conn_string(postgres_url) as opened:
        yield opened


@pytest.fixture
async def async_saver(postgres_url: str) -> AsyncIterator[AsyncPostgresSaver]:
    async with AsyncPostgresSaver.from_conn_string(postgres_url) as opened:
        yield opened


def connection_of(saver: PostgresSaver) -> Connection[Any]:
    assert isinstance(saver.conn, Connection)
    return saver.conn


def stored(backend: Backend, ref: Ref) -> Row:
    row = backend.row(ref)
    assert row is not None
    return row


def put_turn_and_leaf(saver: Saver, thread_id: str) -> tuple[Row, Row]:
    """Run a real graph for one turn, put a leaf on it, and return the leaf and its parent."""
    chat_graph(saver).invoke(say("hello"), Ref(thread_id).config())
    put_leaf(saver, thread_id)
    return leaf_and_parent(PostgresBackend(saver), thread_id)


def leaf_and_parent(backend: Backend, thread_id: str) -> tuple[Row, Row]:
    leaf = stored(backend, Ref(thread_id))
    return leaf, stored(backend, Ref(thread_id, "", leaf.parent_id))


def durations(url: str, thread_id: str) -> list[Any]:
    """What another connection sees: each checkpoint's recorded runs, newest first."""
    with connected(url) as other:
        rows = other.execute(
            "SELECT metadata -> 'run_durations' FROM checkpoints WHERE thread_id = %s "
            "ORDER BY checkpoint_id DESC",
            (thread_id,),
        )
        return [recorded for (recorded,) in rows]


CHAT_ROWS = 5
ONE_LEAF = [{"run-1": 7}, *[None] * CHAT_ROWS]
RECLAIMED = ONE_LEAF[:-1]


# The user's settings


@pytest.mark.parametrize("factory", [dict_row, tuple_row, namedtuple_row, scalar_row])
def test_any_row_factory_of_the_connection_will_do(
    postgres_url: str, thread_id: str, factory: Any
) -> None:
    with connected(postgres_url, row_factory=factory) as connection:
        saver = PostgresSaver(connection)
        leaf, parent = put_turn_and_leaf(saver, thread_id)
        assert PostgresBackend(saver).reclaim(thread_id, "", leaf, parent) == "reclaimed"
    assert durations(postgres_url, thread_id) == RECLAIMED


def test_any_json_functions_of_the_connection_will_do(postgres_url: str, thread_id: str) -> None:
    with connected(postgres_url) as connection:
        saver = PostgresSaver(connection)
        leaf, parent = put_turn_and_leaf(saver, thread_id)
        # From here on the saver itself can store nothing sensible; the backend can.
        set_json_loads(lambda text: json.loads(text, parse_int=Decimal), connection)
        set_json_dumps(lambda value: "{}", connection)
        assert stored(PostgresBackend(saver), Ref(thread_id)) == leaf
        assert PostgresBackend(saver).reclaim(thread_id, "", leaf, parent) == "reclaimed"
    assert durations(postgres_url, thread_id) == RECLAIMED


def test_binding_on_the_client_will_do(postgres_url: str, thread_id: str, saver: Any) -> None:
    leaf, parent = put_turn_and_leaf(saver, thread_id)
    with connected(postgres_url, cursor_factory=ClientCursor) as connection:
        backend = PostgresBackend(PostgresSaver(connection))
        assert leaf_and_parent(backend, thread_id) == (leaf, parent)
        assert backend.surroundings(Ref(thread_id, "", parent.checkpoint_id)).has_newer
        assert backend.reclaim(thread_id, "", leaf, parent) == "reclaimed"
        assert backend.rescue(Ref(thread_id, "", leaf.checkpoint_id), parent.checkpoint_id) == 0
    assert durations(postgres_url, thread_id) == RECLAIMED


def test_a_saver_that_may_not_use_pipelines_will_do(saver: PostgresSaver, thread_id: str) -> None:
    saver.supports_pipeline = False
    leaf, parent = put_turn_and_leaf(saver, thread_id)
    assert PostgresBackend(saver).reclaim(thread_id, "", leaf, parent) == "reclaimed"


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_stricter_isolation_level_will_do(postgres_url: str, thread_id: str, level: str) -> None:
    strict = f"-c default_transaction_isolation={level.replace(' ', chr(92) + ' ')}"
    with connected(postgres_url, options=strict) as connection:
        saver = PostgresSaver(connection)
        leaf, parent = put_turn_and_leaf(saver, thread_id)
        backend = PostgresBackend(saver)
        assert backend.reclaim(thread_id, "", leaf, parent) == "reclaimed"
        gone = Ref(thread_id, "", leaf.checkpoint_id)
        saver.put_writes(gone.config(), [("late", 1)], "task")
        assert backend.rescue(gone, parent.checkpoint_id) == 1
    assert durations(postgres_url, thread_id) == RECLAIMED


def test_tables_are_found_by_the_search_path(postgres_url: str, thread_id: str, saver: Any) -> None:
    put_turn_and_leaf(saver, thread_id)
    schema = f"of_{thread_id.replace('-', '_')}"
    with connected(postgres_url, options=f"-c search_path={schema}") as connection:
        connection.execute(f"CREATE SCHEMA {schema}".encode())
        elsewhere = PostgresSaver(connection)
        elsewhere.setup()
        leaf, parent = put_turn_and_leaf(elsewhere, thread_id)
        assert PostgresBackend(elsewhere).reclaim(thread_id, "", leaf, parent) == "reclaimed"
        rows = connection.execute("SELECT count(*) FROM checkpoints").fetchall()
        assert rows == [(CHAT_ROWS,)]
    assert durations(postgres_url, thread_id) == ONE_LEAF


def test_nothing_is_prepared_because_a_pooler_may_switch_connections(
    postgres_url: str, thread_id: str, saver: Any
) -> None:
    put_turn_and_leaf(saver, thread_id)
    with connected(postgres_url, prepare_threshold=0) as connection:
        backend = PostgresBackend(PostgresSaver(connection))
        leaf, parent = leaf_and_parent(backend, thread_id)
        backend.reclaim(thread_id, "", leaf, parent)
        prepared = connection.execute("SELECT statement FROM pg_prepared_statements", prepare=False)
        assert prepared.fetchall() == []


def test_a_pool_with_one_connection_will_do(postgres_url: str, thread_id: str) -> None:
    with ConnectionPool[Connection[Any]](
        postgres_url, min_size=1, max_size=1, timeout=5, kwargs={"autocommit": True}
    ) as pool:
        saver = PostgresSaver(pool)
        leaf, parent = put_turn_and_leaf(saver, thread_id)
        backend = PostgresBackend(saver)
        with saver.lock:  # A pool's connections are not what the lock is for.
            assert backend.reclaim(thread_id, "", leaf, parent) == "reclaimed"
        gone = Ref(thread_id, "", leaf.checkpoint_id)
        saver.put_writes(gone.config(), [("late", 1)], "task")
        assert backend.rescue(gone, parent.checkpoint_id) == 1


async def test_an_async_pool_with_one_connection_will_do(postgres_url: str, thread_id: str) -> None:
    async with AsyncConnectionPool[AsyncConnection[Any]](
        postgres_url, min_size=1, max_size=1, timeout=5, kwargs={"autocommit": True}
    ) as pool:
        saver = AsyncPostgresSaver(pool)
        await chat_graph(saver).ainvoke(say("hello"), Ref(thread_id).config())
        await aput_leaf(saver, thread_id)
        backend = PostgresBackend(saver)
        async with saver.lock:
            leaf, parent = await aleaf_and_parent(backend, thread_id)
            assert await backend.areclaim(thread_id, "", leaf, parent) == "reclaimed"
        gone = Ref(thread_id, "", leaf.checkpoint_id)
        await saver.aput_writes(gone.config(), [("late", 1)], "task")
        assert await backend.arescue(gone, parent.checkpoint_id) == 1


async def aleaf_and_parent(backend: Backend, thread_id: str) -> tuple[Row, Row]:
    leaf = await backend.arow(Ref(thread_id))
    assert leaf is not None
    parent = await backend.arow(Ref(thread_id, "", leaf.parent_id))
    assert parent is not None
    return leaf, parent


def test_ids_are_data(saver: PostgresSaver) -> None:
    thread_id = "'; DROP TABLE checkpoints; -- %s %(id)s \\ \" \u2028 ' OR '1'='1"
    saver.delete_thread(thread_id)
    leaf, parent = put_turn_and_leaf(saver, thread_id)
    backend = PostgresBackend(saver)
    assert backend.reclaim(thread_id, "", leaf, parent) == "reclaimed"
    assert backend.row(Ref(thread_id, "' OR '1'='1")) is None


# The user's transaction


def test_reads_leave_no_transaction_open(postgres_url: str, thread_id: str, saver: Any) -> None:
    leaf, parent = put_turn_and_leaf(saver, thread_id)
    ref = Ref(thread_id, "", leaf.checkpoint_id)
    with connected(postgres_url, autocommit=False) as connection:
        backend = PostgresBackend(PostgresSaver(connection))
        reads: list[Callable[[], Any]] = [
            lambda: backend.row(ref),
            lambda: backend.metadata(ref),
            lambda: backend.lineage(ref),
            lambda: backend.has_writes(ref),
            lambda: backend.surroundings(ref),
            lambda: backend.exists(ref),
            lambda: backend.reclaimed_into(ref),
            lambda: backend.rescue(ref, parent.checkpoint_id),
            lambda: backend.on_snapshot(lookup(ref)),
        ]
        for read in reads:
            read()
            assert connection.info.transaction_status == TransactionStatus.IDLE


def test_without_autocommit_our_own_work_is_committed(
    postgres_url: str, thread_id: str, saver: Any
) -> None:
    leaf, parent = put_turn_and_leaf(saver, thread_id)
    with connected(postgres_url, autocommit=False) as connection:
        backend = PostgresBackend(PostgresSaver(connection))
        assert backend.reclaim(thread_id, "", leaf, parent) == "reclaimed"
        assert connection.info.transaction_status == TransactionStatus.IDLE
        assert durations(postgres_url, thread_id) == RECLAIMED


@pytest.mark.parametrize("autocommit", [True, False])
@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_the_users_open_transaction_stays_open_and_decides(
    postgres_url: str, thread_id: str, saver: Any, autocommit: bool, end: str
) -> None:
    leaf, parent = put_turn_and_leaf(saver, thread_id)
    with connected(postgres_url, autocommit=autocommit) as connection:
        backend = PostgresBackend(PostgresSaver(connection))
        if autocommit:
            connection.execute("BEGIN")
        connection.execute(
            "UPDATE checkpoints SET metadata = metadata || '{\"mine\": 1}' WHERE thread_id = %s",
            (thread_id,),
        )
        assert backend.reclaim(thread_id, "", leaf, parent) == "reclaimed"
        assert connection.info.transaction_status == TransactionStatus.INTRANS
        assert durations(postgres_url, thread_id) == ONE_LEAF
        connection.execute(end.encode())
    assert durations(postgres_url, thread_id) == (RECLAIMED if end == "COMMIT" else ONE_LEAF)
    has_mine = "mine" in stored(PostgresBackend(saver), Ref(thread_id)).metadata
    assert has_mine == (end == "COMMIT")


def test_a_refusal_and_a_failure_leave_the_users_open_transaction_as_it_was(
    postgres_url: str, thread_id: str, saver: Any
) -> None:
    leaf, parent = put_turn_and_leaf(saver, thread_id)
    saver.put_writes(Ref(thread_id, "", leaf.checkpoint_id).config(), [("x", 1)], "task")
    with connected(postgres_url, autocommit=False) as connection:
        backend = PostgresBackend(PostgresSaver(connection))
        connection.execute("CREATE TEMPORARY TABLE mine ON COMMIT DROP AS SELECT 1 AS one")
        assert backend.reclaim(thread_id, "", leaf, parent) == "has_writes"
        with pytest.raises(psycopg.DataError):
            backend.fold(Ref(thread_id, "", parent.checkpoint_id), "x", {"title": "\0"})
        assert backend.on_snapshot(lookup(Ref(thread_id))) is not None
        with pytest.raises(psycopg.DataError):
            backend.on_snapshot(lookup(Ref(thread_id, "\0")))
        assert connection.info.transaction_status == TransactionStatus.INTRANS
        assert connection.execute("SELECT one FROM mine").fetchall() == [(1,)]
        # The refused attempt holds no lock that would make others wait for the user.
        connection_of(saver).execute("SET lock_timeout = '10s'")
        assert PostgresBackend(saver).fold(Ref(thread_id, "", leaf.checkpoint_id), "x", {"a": 1})


def test_what_the_user_sent_into_a_pipeline_before_is_not_undone_with_our_refusal(
    postgres_url: str, thread_id: str
) -> None:
    with PostgresSaver.from_conn_string(postgres_url, pipeline=True) as saver:
        leaf, parent = put_turn_and_leaf(saver, thread_id)
        put_leaf(saver, thread_id, run_id="run-2")
        connection_of(saver).execute(
            "UPDATE checkpoints SET metadata = metadata || '{\"mine\": 1}' WHERE thread_id = %s",
            (thread_id,),
        )
        assert PostgresBackend(saver).reclaim(thread_id, "", leaf, parent) == "superseded"
        assert stored(PostgresBackend(saver), Ref(thread_id)).metadata["mine"] == 1


def test_a_pipeline_that_the_saver_was_not_told_of_does_no_harm(
    postgres_url: str, thread_id: str
) -> None:
    with connected(postgres_url, row_factory=dict_row) as connection, connection.pipeline():
        saver = PostgresSaver(connection)
        backend = PostgresBackend(saver)
        leaf, parent = put_turn_and_leaf(saver, thread_id)
        for _ in range(2):
            # Nothing has ended what this one began.
            assert saver.get_tuple(Ref(thread_id).config()) is not None
            found: Any = backend.on_snapshot(lookup(Ref(thread_id)))
            assert leaf.checkpoint_id == found.checkpoint["id"]
        assert backend.reclaim(thread_id, "", leaf, parent) == "reclaimed"


async def test_a_pipeline_that_an_async_saver_was_not_told_of_does_no_harm(
    postgres_url: str, thread_id: str, saver: PostgresSaver
) -> None:
    leaf, _ = put_turn_and_leaf(saver, thread_id)
    connection = await AsyncConnection[Any].connect(
        postgres_url, autocommit=True, row_factory=dict_row
    )
    async with connection, connection.pipeline():
        async_saver = AsyncPostgresSaver(connection)
        for _ in range(2):
            assert await async_saver.aget_tuple(Ref(thread_id).config()) is not None
            reading = PostgresBackend(async_saver).aon_snapshot(lookup(Ref(thread_id)))
            found: Any = await reading
            assert leaf.checkpoint_id == found.checkpoint["id"]


@pytest.mark.parametrize("text", ["a\0b", "\ud800"])
@pytest.mark.parametrize("pipeline", [False, True])
def test_text_that_postgres_cannot_store_fails_and_changes_nothing(
    postgres_url: str, thread_id: str, text: str, pipeline: bool
) -> None:
    with PostgresSaver.from_conn_string(postgres_url, pipeline=pipeline) as saver:
        leaf, parent = put_turn_and_leaf(saver, thread_id)
        backend = PostgresBackend(saver)
        with pytest.raises(psycopg.DataError):
            backend.fold(Ref(thread_id, "", parent.checkpoint_id), "x", {"title": text})
        assert leaf_and_parent(backend, thread_id) == (leaf, parent)
        assert backend.reclaim(thread_id, "", leaf, parent) == "reclaimed"


@pytest.mark.parametrize("pipeline", [False, True])
def test_a_refused_reclaim_works_on_afterwards(
    postgres_url: str, thread_id: str, pipeline: bool
) -> None:
    with PostgresSaver.from_conn_string(postgres_url, pipeline=pipeline) as saver:
        leaf, parent = put_turn_and_leaf(saver, thread_id)
        put_leaf(saver, thread_id, run_id="run-2")
        backend = PostgresBackend(saver)
        assert backend.reclaim(thread_id, "", leaf, parent) == "superseded"
        newest, _ = leaf_and_parent(backend, thread_id)
        assert backend.reclaim(thread_id, "", newest, leaf) == "reclaimed"
        assert backend.reclaim(thread_id, "", leaf, parent) == "reclaimed"
    assert durations(postgres_url, thread_id) == [{"run-1": 7, "run-2": 7}, *RECLAIMED[1:]]


# Faces


async def test_a_blocking_call_from_the_savers_own_loop_is_refused(
    async_saver: AsyncPostgresSaver,
) -> None:
    with pytest.raises(asyncio.InvalidStateError, match="prefix 'a'"):
        PostgresBackend(async_saver).row(Ref("any"))
    with pytest.raises(asyncio.InvalidStateError, match="prefix 'a'"):
        PostgresBackend(async_saver).fold(Ref("any", "", "any"), "x", {})


async def test_blocking_calls_on_an_async_saver_work_from_another_thread(
    async_saver: AsyncPostgresSaver, postgres_url: str, thread_id: str
) -> None:
    await chat_graph(async_saver).ainvoke(say("hello"), Ref(thread_id).config())
    await aput_leaf(async_saver, thread_id)
    backend = PostgresBackend(async_saver)
    leaf, parent = await asyncio.to_thread(leaf_and_parent, backend, thread_id)
    outcome = await asyncio.to_thread(backend.reclaim, thread_id, "", leaf, parent)
    assert outcome == "reclaimed"
    assert durations(postgres_url, thread_id) == RECLAIMED


async def test_a_shared_connection_is_used_by_one_call_at_a_time(
    async_saver: AsyncPostgresSaver, thread_id: str
) -> None:
    await chat_graph(async_saver).ainvoke(say("hello"), Ref(thread_id).config())
    await aput_leaf(async_saver, thread_id)
    backend = PostgresBackend(async_saver)
    leaf, parent = await aleaf_and_parent(backend, thread_id)
    at_once = [backend.areclaim(thread_id, "", leaf, parent) for _ in range(8)]
    reads = [async_saver.aget_tuple(Ref(thread_id).config()) for _ in range(8)]
    outcomes, _ = await asyncio.gather(asyncio.gather(*at_once), asyncio.gather(*reads))
    assert sorted(outcomes) == ["reclaimed", *["superseded"] * 7]


# What a checkpoint stores


class Log(TypedDict):
    log: Annotated[list[str], operator.add]


def _log(text: str) -> Any:
    return lambda state: {"log": [text]}


def _asks(state: Log) -> Log:
    return {"log": [interrupt("which?")]}


def _fails(state: Log) -> Log:
    raise RuntimeError("this node always fails")


def _sends(state: Log) -> list[Send]:
    return [Send("second", {"log": []}), Send("second", {"log": []})]


def log_graph(
    saver: Saver,
    second: Any = None,
    *,
    defer: bool = False,
    send: bool = False,
    **options: Any,
) -> Any:
    builder = StateGraph(Log)
    builder.add_node("first", _log("a"))
    builder.add_node("second", second or _log("b"), defer=defer)
    builder.add_edge(START, "first")
    if send:
        builder.add_conditional_edges("first", _sends, ["second"])
    else:
        builder.add_edge("first", "second")
    return builder.compile(checkpointer=saver, **options)


BEFORE = {"interrupt_before": ["second"]}
SHAPES: dict[str, tuple[dict[str, Any], bool]] = {
    "at rest": ({}, False),
    "at rest, after a deferred node": ({"defer": True}, False),
    "at rest, after sends": ({"send": True}, False),
    "before a node": (BEFORE, True),
    "before a deferred node": ({**BEFORE, "defer": True}, True),
    "before sends": ({**BEFORE, "send": True}, True),
    "after a node": ({"interrupt_after": ["first"]}, True),
    "asked": ({"second": _asks}, True),
    "asked in sends": ({"second": _asks, "send": True}, True),
}


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("durability", ["sync", "exit"])
@pytest.mark.parametrize("shape", SHAPES)
def test_due_tells_what_is_about_to_run_from_what_is_at_rest(
    saver: PostgresSaver, thread_id: str, shape: str, durability: Any, encrypted: bool
) -> None:
    if encrypted:
        saver.serde = EncryptedSerializer.from_pycryptodome_aes(key=b"0" * 16)
    options, expected = SHAPES[shape]
    graph, config = log_graph(saver, **options), Ref(thread_id).config()
    graph.invoke({"log": []}, config, durability=durability)
    assert bool(graph.get_state(config).next) == expected
    assert stored(PostgresBackend(saver), Ref(thread_id)).due == expected


def test_a_failed_run_and_an_unread_input_are_due(saver: PostgresSaver, thread_id: str) -> None:
    config = Ref(thread_id).config()
    with pytest.raises(RuntimeError, match="always fails"):
        log_graph(saver, _fails).invoke({"log": []}, config, durability="sync")
    backend = PostgresBackend(saver)
    assert stored(backend, Ref(thread_id)).due
    chain = list(saver.list(config))
    assert [stored(backend, Ref.of(seen.config)).due for seen in chain] == [True, True, True]
    assert [seen.metadata["source"] for seen in chain] == ["loop", "loop", "input"]


def test_without_the_cipher_sends_count_as_due(saver: PostgresSaver, thread_id: str) -> None:
    plain = saver.serde
    saver.serde = EncryptedSerializer.from_pycryptodome_aes(key=b"0" * 16)
    log_graph(saver, send=True).invoke({"log": []}, Ref(thread_id).config())
    saver.serde = plain
    assert stored(PostgresBackend(saver), Ref(thread_id)).due


def test_sends_of_the_format_before_4_are_found_on_the_parent(
    saver: PostgresSaver, thread_id: str
) -> None:
    leaf, parent = put_turn_and_leaf(saver, thread_id)
    saver.put_writes(
        Ref(thread_id, "", parent.checkpoint_id).config(), [("__pregel_tasks", "sent")], "task"
    )
    backend = PostgresBackend(saver)
    assert not stored(backend, Ref(thread_id)).due
    connection_of(saver).execute(
        "UPDATE checkpoints SET checkpoint = checkpoint || '{\"v\": 3}' WHERE thread_id = %s",
        (thread_id,),
    )
    assert stored(backend, Ref(thread_id)).due
    assert stored(backend, Ref(thread_id, "", leaf.checkpoint_id)).due


def test_one_and_one_point_zero_are_different_states(saver: PostgresSaver, thread_id: str) -> None:
    put_turn_and_leaf(saver, thread_id)
    for checkpoint_id, value in zip(
        leaf_ids(saver, thread_id), ('{"n": 1}', '{"n": 1.0}'), strict=True
    ):
        connection_of(saver).execute(
            "UPDATE checkpoints SET checkpoint = checkpoint || "
            "jsonb_build_object('channel_values', %s::jsonb) "
            "WHERE thread_id = %s AND checkpoint_id = %s",
            (value, thread_id, checkpoint_id),
        )
    backend = PostgresBackend(saver)
    leaf, parent = leaf_and_parent(backend, thread_id)
    assert backend.reclaim(thread_id, "", leaf, parent) == "versions_differ"


def leaf_ids(saver: Saver, thread_id: str) -> tuple[str, str]:
    leaf, parent = leaf_and_parent(PostgresBackend(saver), thread_id)
    return leaf.checkpoint_id, parent.checkpoint_id


def test_a_copy_that_names_a_snapshot_which_its_original_only_reads_is_the_same_state(
    saver: PostgresSaver, thread_id: str
) -> None:
    raw_pregel(saver).invoke(["one"], Ref(thread_id).config())
    put_leaf(saver, thread_id)
    inline = connection_of(saver).execute(
        "SELECT checkpoint -> 'channel_values' AS inline FROM checkpoints WHERE thread_id = %s "
        "ORDER BY checkpoint_id DESC LIMIT 2",
        (thread_id,),
    )
    # Else nothing is shown here. Older releases take no snapshot of an input that they forget.
    named = {"log": True} if releases.KEEPS_RAW_INPUT else {}
    assert [row["inline"] for row in inline] == [named, {}]
    backend = PostgresBackend(saver)
    leaf, parent = leaf_and_parent(backend, thread_id)
    assert leaf.body == parent.body
    state = raw_pregel(saver).get_state(Ref(thread_id).config()).values
    assert backend.reclaim(thread_id, "", leaf, parent) == "reclaimed"
    assert raw_pregel(saver).get_state(Ref(thread_id).config()).values == state


@pytest.mark.parametrize("older", ["blob", "no values"])
def test_a_copy_of_a_checkpoint_that_another_release_wrote_is_the_same_state(
    saver: PostgresSaver, thread_id: str, older: str
) -> None:
    config = Ref(thread_id).config()
    log_graph(saver).invoke({"log": []}, config)
    head = stored(PostgresBackend(saver), Ref(thread_id))
    if older == "blob":
        type_, blob = saver.serde.dumps_typed("a scalar")
        version = head.versions["branch:to:second"]
        connection_of(saver).execute(
            "INSERT INTO checkpoint_blobs VALUES (%s, '', 'branch:to:second', %s, %s, %s)",
            (thread_id, version, type_, blob),
        )
    else:
        connection_of(saver).execute(
            "UPDATE checkpoints SET checkpoint = checkpoint - 'channel_values' "
            "WHERE thread_id = %s AND checkpoint_id = %s",
            (thread_id, head.checkpoint_id),
        )
    leaf, parent = put_copy(saver, thread_id)
    assert PostgresBackend(saver).reclaim(thread_id, "", leaf, parent) == "reclaimed"


def put_copy(saver: Saver, thread_id: str) -> tuple[Row, Row]:
    put_leaf(saver, thread_id)
    return leaf_and_parent(PostgresBackend(saver), thread_id)


def test_a_state_that_changed_since_it_was_read_is_not_deleted(
    saver: PostgresSaver, thread_id: str
) -> None:
    leaf, parent = put_turn_and_leaf(saver, thread_id)
    connection_of(saver).execute(
        'UPDATE checkpoints SET checkpoint = checkpoint || \'{"versions_seen": {"other": {}}}\' '
        "WHERE thread_id = %s",
        (thread_id,),
    )
    assert PostgresBackend(saver).reclaim(thread_id, "", leaf, parent) == "versions_differ"
    assert PostgresBackend(saver).exists(Ref(thread_id, "", leaf.checkpoint_id))


def test_blobs_are_never_touched(saver: PostgresSaver, thread_id: str) -> None:
    leaf, parent = put_turn_and_leaf(saver, thread_id)
    count = "SELECT count(*) AS blobs FROM checkpoint_blobs WHERE thread_id = %s"
    before = connection_of(saver).execute(count, (thread_id,)).fetchall()
    state = chat_graph(saver).get_state(Ref(thread_id).config()).values
    assert PostgresBackend(saver).reclaim(thread_id, "", leaf, parent) == "reclaimed"
    assert connection_of(saver).execute(count, (thread_id,)).fetchall() == before
    assert chat_graph(saver).get_state(Ref(thread_id).config()).values == state


def test_a_raw_graphs_input_moves_under_the_parents_own_task(
    saver: PostgresSaver, thread_id: str
) -> None:
    config = Ref(thread_id).config()
    raw_pregel(saver).invoke(["one"], config)
    put_leaf(saver, thread_id)
    leaf, parent = leaf_and_parent(PostgresBackend(saver), thread_id)
    backend = PostgresBackend(saver)
    put_input(saver, Ref(thread_id, "", leaf.checkpoint_id))
    assert backend.reclaim(thread_id, "", leaf, parent) == "has_writes"
    inputs = Movable(inputs=True)
    assert backend.reclaim(thread_id, "", leaf, parent, movable=inputs) == "reclaimed"
    assert writes(saver, thread_id, parent.checkpoint_id) == [input_task(parent.checkpoint_id)]
    assert writes(saver, thread_id, leaf.checkpoint_id) == []


def test_a_movable_write_stays_if_the_parent_has_writes_of_its_own(
    saver: PostgresSaver, thread_id: str
) -> None:
    leaf, parent = put_turn_and_leaf(saver, thread_id)
    put_input(saver, Ref(thread_id, "", leaf.checkpoint_id))
    saver.put_writes(Ref(thread_id, "", parent.checkpoint_id).config(), [("x", 1)], "task")
    outcome = PostgresBackend(saver).reclaim(
        thread_id, "", leaf, parent, movable=Movable(inputs=True, exits=True)
    )
    assert outcome == "has_writes"
    assert writes(saver, thread_id, leaf.checkpoint_id) == [input_task(leaf.checkpoint_id)]


def put_input(saver: Saver, ref: Ref) -> None:
    assert ref.checkpoint_id is not None
    saver.put_writes(ref.config(), [("log", ["typed"])], input_task(ref.checkpoint_id))


def input_task(checkpoint_id: str) -> str:
    return str(uuid5(UUID(checkpoint_id), "__input__"))


def writes(saver: Saver, thread_id: str, checkpoint_id: str) -> list[str]:
    found = saver.get_tuple(Ref(thread_id, "", checkpoint_id).config())
    return [task_id for task_id, _, _ in found.pending_writes or ()] if found else []


def test_a_lineage_ends_at_a_cycle_and_at_a_hole(saver: PostgresSaver, thread_id: str) -> None:
    leaf, parent = put_turn_and_leaf(saver, thread_id)
    backend, ref = PostgresBackend(saver), Ref(thread_id, "", leaf.checkpoint_id)
    assert [i for i, _ in backend.lineage(ref)] == [leaf.checkpoint_id]
    link = (
        "UPDATE checkpoints SET parent_checkpoint_id = %s, "
        'metadata = metadata || \'{"run_durations": {"run-0": 1}}\' '
        "WHERE thread_id = %s AND checkpoint_id = %s"
    )
    for wrong_parent in (leaf.checkpoint_id, "a checkpoint that is not stored"):
        connection_of(saver).execute(link, (wrong_parent, thread_id, parent.checkpoint_id))
        assert [i for i, _ in backend.lineage(ref)] == [leaf.checkpoint_id, parent.checkpoint_id]


# Costs


class Recording(Cursor[Any]):
    """Remembers what was executed, by whom is all the same."""

    statements: list[tuple[bytes, Any]]

    def execute(self, query: Any, params: Any = None, **kwargs: Any) -> Any:
        self.statements.append((query, params))
        return super().execute(query, params, **kwargs)


@contextmanager
def recording(url: str) -> Iterator[tuple[PostgresBackend, list[tuple[bytes, Any]]]]:
    statements: list[tuple[bytes, Any]] = []
    cursors = type("Recording", (Recording,), {"statements": statements})
    with connected(url, cursor_factory=cursors) as connection:
        yield PostgresBackend(PostgresSaver(connection)), statements


def add_history(saver: PostgresSaver, thread_id: str, rows: int) -> None:
    """Put older checkpoints under a thread's, each with writes and a blob of its own."""
    older = "'00000000-0000-6000-8000-' || lpad(n::text, 12, '0')"
    checkpoints = (
        "INSERT INTO checkpoints (thread_id, checkpoint_id, checkpoint, metadata) "
        f"SELECT thread_id, {older}, checkpoint, metadata FROM generate_series(1, %s) AS n, "
        "(SELECT * FROM checkpoints WHERE thread_id = %s ORDER BY checkpoint_id LIMIT 1) AS oldest"
    )
    writes = (
        "INSERT INTO checkpoint_writes "
        "(thread_id, checkpoint_id, task_id, idx, channel, type, blob) "
        f"SELECT thread_id, {older}, 'task', 0, 'messages', 'msgpack', '' "
        "FROM generate_series(1, %s) AS n, (SELECT %s AS thread_id) AS thread"
    )
    blobs = (
        "INSERT INTO checkpoint_blobs (thread_id, channel, version, type, blob) "
        "SELECT thread_id, 'messages', 'v' || n, 'msgpack', '' "
        "FROM generate_series(1, %s) AS n, (SELECT %s AS thread_id) AS thread"
    )
    for insert in (checkpoints, writes, blobs):
        connection_of(saver).execute(insert.encode(), (rows, thread_id))


def admit_once(backend: Backend, thread_id: str) -> None:
    """Do whatever an admission asks of a backend, and more."""
    leaf, parent = leaf_and_parent(backend, thread_id)
    gone, kept = (Ref(thread_id, "", row.checkpoint_id) for row in (leaf, parent))
    backend.metadata(Ref(thread_id))
    backend.lineage(gone)
    backend.exists(kept)
    backend.has_writes(gone)
    backend.surroundings(gone, but=parent.checkpoint_id)
    backend.fold(gone, "folded", {"title": "a title"})
    outcome = backend.reclaim(thread_id, "", leaf, parent, movable=Movable(inputs=True, exits=True))
    assert outcome == "reclaimed"
    assert backend.reclaim(thread_id, "", leaf, parent) == "superseded"
    assert backend.reclaimed_into(gone) == parent.checkpoint_id
    backend.rescue(gone, parent.checkpoint_id)


def test_the_statements_do_not_depend_on_the_length_of_the_history(
    postgres_url: str, saver: PostgresSaver, thread_id: str
) -> None:
    seen = []
    for rows in (10, 2_000):
        thread = f"{thread_id}-{rows}"
        put_turn_and_leaf(saver, thread)
        add_history(saver, thread, rows)
        with recording(postgres_url) as (backend, statements):
            admit_once(backend, thread)
            seen.append([sql for sql, _ in statements])
    assert seen[0] == seen[1]
    assert len(seen[0]) > 10


def test_no_statement_reads_a_whole_table(empty_postgres_url: str, thread_id: str) -> None:
    with PostgresSaver.from_conn_string(empty_postgres_url) as saver:
        for n in range(10):
            put_turn_and_leaf(saver, f"{thread_id}-{n}")
            add_history(saver, f"{thread_id}-{n}", 500)
        for thread in (f"{thread_id}-1", f"{thread_id}-2"):
            put_input(saver, Ref(thread, "", leaf_ids(saver, thread)[0]))
        with recording(empty_postgres_url) as (backend, statements):
            admit_once(backend, f"{thread_id}-1")
            late = Ref(f"{thread_id}-2", "", leaf_ids(saver, f"{thread_id}-2")[0])
            parent_id = leaf_ids(saver, f"{thread_id}-2")[1]
            connection_of(saver).execute(
                "DELETE FROM checkpoints WHERE thread_id = %s AND checkpoint_id = %s",
                (late.thread_id, late.checkpoint_id),
            )
            assert backend.rescue(late, parent_id) == 1
        connection_of(saver).execute("VACUUM ANALYZE")
        scanned = {
            (sql, node)
            for sql, parameters in statements
            for node in whole_table_reads(connection_of(saver), sql, parameters)
        }
    assert scanned == set()


def whole_table_reads(connection: Any, sql: bytes, parameters: Any) -> list[str]:
    with connection.cursor(row_factory=tuple_row) as cursor:
        explain = cursor.execute(b"EXPLAIN (FORMAT JSON) " + sql, parameters, prepare=False)
        (plan,) = explain.fetchall()[0][0]
    return list(seq_scans(plan["Plan"]))


def seq_scans(node: dict[str, Any]) -> Iterator[str]:
    if node["Node Type"] == "Seq Scan":
        yield node["Relation Name"]
    for child in node.get("Plans", ()):
        yield from seq_scans(child)


# What we rely on in the host

COLUMNS = {
    "checkpoints": {
        "thread_id": "text",
        "checkpoint_ns": "text",
        "checkpoint_id": "text",
        "parent_checkpoint_id": "text",
        "type": "text",
        "checkpoint": "jsonb",
        "metadata": "jsonb",
    },
    "checkpoint_blobs": {
        "thread_id": "text",
        "checkpoint_ns": "text",
        "channel": "text",
        "version": "text",
        "type": "text",
        "blob": "bytea",
    },
    "checkpoint_writes": {
        "thread_id": "text",
        "checkpoint_ns": "text",
        "checkpoint_id": "text",
        "task_id": "text",
        "idx": "integer",
        "channel": "text",
        "type": "text",
        "blob": "bytea",
        "task_path": "text",
    },
}
PRIMARY_KEYS = {
    "checkpoints": ["thread_id", "checkpoint_ns", "checkpoint_id"],
    "checkpoint_blobs": ["thread_id", "checkpoint_ns", "channel", "version"],
    "checkpoint_writes": ["thread_id", "checkpoint_ns", "checkpoint_id", "task_id", "idx"],
}


@pytest.mark.parametrize("table", COLUMNS)
def test_the_host_still_has_the_columns_that_the_backend_knows(
    postgres_url: str, table: str
) -> None:
    with connected(postgres_url) as connection:
        columns = connection.execute(
            "SELECT column_name, data_type FROM information_schema.columns WHERE table_name = %s",
            (table,),
        )
        assert dict(columns.fetchall()) == COLUMNS[table]


@pytest.mark.parametrize("table", PRIMARY_KEYS)
def test_the_host_still_has_the_primary_keys_that_the_backend_walks(
    postgres_url: str, table: str
) -> None:
    with connected(postgres_url) as connection:
        key = connection.execute(
            "SELECT a.attname FROM pg_index AS i CROSS JOIN unnest(i.indkey) WITH ORDINALITY "
            "AS k (attnum, position) JOIN pg_attribute AS a ON a.attrelid = i.indrelid "
            "AND a.attnum = k.attnum WHERE i.indrelid = %s::regclass AND i.indisprimary "
            "ORDER BY k.position",
            (table,),
        )
        assert [name for (name,) in key] == PRIMARY_KEYS[table]


async def test_the_hosts_savers_still_have_the_attributes_that_the_backend_uses(
    saver: PostgresSaver, async_saver: AsyncPostgresSaver
) -> None:
    assert isinstance(saver.conn, Connection)
    assert isinstance(async_saver.conn, AsyncConnection)
    assert (saver.pipe, async_saver.pipe) == (None, None)
    assert saver.lock.acquire(blocking=False)
    saver.lock.release()
    assert isinstance(async_saver.lock, asyncio.Lock)
    assert async_saver.loop is asyncio.get_running_loop()
    assert hasattr(EncryptedSerializer.from_pycryptodome_aes(key=b"0" * 16), "cipher")
