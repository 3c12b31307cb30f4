"""Delta histories of real graphs, read through the cache: as on the bare saver, and cheaper."""

from __future__ import annotations

import asyncio
import copy
import operator
import random
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Annotated, Any

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.base import BaseCheckpointSaver, DeltaChannelHistory
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt
from pydantic import BaseModel
from typing_extensions import TypedDict

from retaining_saver import RetainingSaver
from retaining_saver._steps import arun, run
from retaining_saver.backends import find_backend
from retaining_saver.caches import HistoryCache, MemoryHistoryCache, RedisHistoryCache
from retaining_saver.delta_history import (
    MAX_STEPS,
    Readers,
    delta_history,
    purge_sparing,
    put_back,
    writes_arrived,
)
from retaining_saver.errors import CheckpointNotFoundError
from retaining_saver.records import Ref
from tests.support import releases
from tests.support.faces import ASYNC, SYNC, Face, kinds_and_faces
from tests.support.graphs import extend, merge_messages
from tests.support.leaves import put_leaf
from tests.support.savers import ONE_PER_BACKEND, Where, open_saver

CHANNELS = ("messages", "log")
Saver = BaseCheckpointSaver[Any]
Histories = Mapping[str, DeltaChannelHistory]


class Chat(TypedDict):
    messages: Annotated[list[Any], DeltaChannel(merge_messages, snapshot_frequency=3)]
    log: Annotated[list[str], DeltaChannel(extend, snapshot_frequency=11)]
    turns: Annotated[int, operator.add]


def answer(state: Chat) -> dict[str, Any]:
    turn = state["turns"]
    return {"messages": [AIMessage(f"answer {turn}", id=f"ai-{turn}")], "turns": 1}


def note(state: Chat) -> dict[str, Any]:
    return {"log": [f"noted {len(state['log'])}", f"of {len(state['messages'])}"]}


def check(state: Chat) -> dict[str, Any]:
    return {"log": [f"checked {state['turns']}"]}


def chat(saver: Saver) -> Any:
    """Two parallel writers of different channels, then one more."""
    builder = StateGraph(Chat)
    builder.add_node("answer", answer)
    builder.add_node("note", note)
    builder.add_node("check", check)
    builder.add_edge(START, "answer")
    builder.add_edge(START, "note")
    builder.add_edge(["answer", "note"], "check")
    builder.add_edge("check", END)
    return builder.compile(checkpointer=saver)


def at(thread_id: str, checkpoint_id: str | None = None) -> RunnableConfig:
    return Ref(thread_id, "", checkpoint_id).config()


class Reader:
    """One process that reads a saver's delta histories through a cache."""

    def __init__(self, inner: Saver, cache: HistoryCache | None, **options: Any) -> None:
        self.inner = inner
        self.cache = cache
        self.readers = Readers()
        found = find_backend(inner)
        self.options = {"backend": found and found(inner), **options}

    def steps(self, config: RunnableConfig, channels: Sequence[str]) -> Any:
        return delta_history(self.inner, self.cache, self.readers, config, channels, **self.options)

    def read(self, config: RunnableConfig, channels: Sequence[str] = CHANNELS) -> Histories:
        return run(self.steps(config, channels))

    async def aread(self, config: RunnableConfig, channels: Sequence[str] = CHANNELS) -> Histories:
        return await arun(self.steps(config, channels))


async def bare(face: Face, saver: Saver, config: RunnableConfig) -> Histories:
    return await face(
        saver.get_delta_channel_history,
        saver.aget_delta_channel_history,
        config=config,
        channels=CHANNELS,
    )


async def listed(saver: Saver, thread_id: str) -> list[str]:
    """Every checkpoint id of the thread's root namespace, oldest first."""
    if type(saver).__name__.startswith("Async"):
        found = [stored async for stored in saver.alist(at(thread_id))]
    else:
        found = list(saver.list(at(thread_id)))
    return sorted(stored.checkpoint["id"] for stored in found)


async def grow(face: Face, saver: Saver, thread_id: str, rng: random.Random, steps: int) -> None:
    """Grow a tree: turns on the head, turns from old checkpoints, edits of old and new ones."""
    graph = chat(saver)
    for step in range(steps):
        ids = await listed(saver, thread_id)
        old = rng.choice(ids) if ids and rng.random() < 0.4 else None
        config = at(thread_id, old)
        said = {"messages": [HumanMessage(f"say {step}", id=f"human-{step}")], "turns": 0}
        if ids and rng.random() < 0.3:
            edit = {"log": [f"edit {step}"], "messages": [AIMessage("edit", id=f"edit-{step}")]}
            await face(graph.update_state, graph.aupdate_state, config, edit, as_node="check")
        else:
            durability = rng.choice(("sync", "async", "exit"))
            await face(graph.invoke, graph.ainvoke, said, config, durability=durability)


def forget_what_grew_late(cache: MemoryHistoryCache, thread_id: str) -> None:
    """Purge as the wrapper does at a write: older releases write a branch onto its first parent."""
    if not releases.SNAPSHOTS_BRANCHES:
        cache.delete_thread(thread_id)


@pytest.mark.parametrize(
    ("kind", "face"),
    kinds_and_faces(ONE_PER_BACKEND),
    ids=str,
)
@pytest.mark.parametrize("seed", range(3))
async def test_every_checkpoint_of_a_tree_reads_as_on_the_bare_saver(
    kind: str, face: Face, seed: int, where: Where, thread_id: str
) -> None:
    rng = random.Random(seed)
    async with open_saver(kind, where) as saver:
        cache = MemoryHistoryCache(max_entries=6)
        reader = Reader(saver, cache)
        for _ in range(4):
            await grow(face, saver, thread_id, rng, 2)
            forget_what_grew_late(cache, thread_id)
            ids = await listed(saver, thread_id)
            rng.shuffle(ids)
            for checkpoint_id in [*ids, *ids]:
                config = at(thread_id, checkpoint_id)
                ours = await face(reader.read, reader.aread, config)
                assert await bare(face, saver, config) == ours
        assert cache.stats().hits > 0


async def test_two_processes_on_one_redis_read_as_the_bare_saver_does(
    face: Face, where: Where, thread_id: str, redis_url: str
) -> None:
    rng = random.Random(7)
    kind = "sqlite" if face is SYNC else "asqlite"
    async with AsyncExitStack() as stack:
        readers = []
        for _ in range(2):
            saver = await stack.enter_async_context(open_saver(kind, where))
            cache = RedisHistoryCache(redis_url, database=thread_id, max_per_thread=10)
            stack.push_async_callback(cache.aclose)
            readers.append(Reader(saver, cache))
        for _ in range(3):
            await grow(face, readers[0].inner, thread_id, rng, 2)
            for checkpoint_id in await listed(readers[0].inner, thread_id):
                config = at(thread_id, checkpoint_id)
                expected = await bare(face, readers[0].inner, config)
                for reader in (*readers, *reversed(readers)):
                    assert expected == await face(reader.read, reader.aread, config)
        for reader in readers:
            assert isinstance(reader.cache, RedisHistoryCache)
            assert reader.cache.stats().hits > 0


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), max_entries=st.integers(1, 12))
def test_random_trees_read_as_on_the_bare_saver(seed: int, max_entries: int) -> None:
    rng = random.Random(seed)
    saver = InMemorySaver()
    cache = MemoryHistoryCache(max_entries=max_entries)
    reader = Reader(saver, cache)
    for _ in range(3):
        asyncio.run(grow(ASYNC, saver, "t", rng, 3))
        forget_what_grew_late(cache, "t")
        ids = asyncio.run(listed(saver, "t"))
        for checkpoint_id in rng.choices(ids, k=12):
            config = at("t", checkpoint_id)
            expected = saver.get_delta_channel_history(config=config, channels=CHANNELS)
            assert expected == reader.read(config)


class CountingSaver(InMemorySaver):
    """Count what is asked of the saver, and see what a wrapper would see."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def get_tuple(self, config: RunnableConfig) -> Any:
        self.calls["get_tuple"] += 1
        return super().get_tuple(config)

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Histories:
        self.calls["walk"] += 1
        return super().get_delta_channel_history(config=config, channels=channels)


def say(saver: Saver, thread_id: str, turn: int, **options: Any) -> None:
    said = {"messages": [HumanMessage(f"say {turn}", id=f"human-{turn}")], "turns": 0}
    chat(saver).invoke(said, at(thread_id), **options)


def head_of(saver: Saver, thread_id: str) -> Any:
    found = saver.get_tuple(at(thread_id))
    assert found is not None
    return found


def counted(saver: CountingSaver, act: Callable[[], Any]) -> dict[str, int]:
    saver.calls.clear()
    act()
    return dict(saver.calls)


def test_a_running_thread_costs_a_bounded_number_of_lookups_a_turn(thread_id: str) -> None:
    saver = CountingSaver()
    reader = Reader(saver, MemoryHistoryCache())
    costs = []
    for turn in range(40):
        say(saver, thread_id, turn)
        head = head_of(saver, thread_id)
        reader.readers.saw(head)
        costs.append(counted(saver, partial(reader.read, head.config)))
    # A turn stores four checkpoints. The head itself was seen; its ancestors are looked up, as
    # far as the last head or, when both channels are stored on the way, no further than that.
    assert {"get_tuple": 4} == max(costs[1:], key=lambda cost: cost["get_tuple"])
    assert all("walk" not in cost for cost in costs[1:])


def test_a_head_that_was_not_seen_costs_one_lookup_more(thread_id: str) -> None:
    saver = CountingSaver()
    reader = Reader(saver, MemoryHistoryCache())
    for turn in range(2):
        say(saver, thread_id, turn)
        config = head_of(saver, thread_id).config
        saver.calls.clear()
        reader.read(config)
    assert {"get_tuple": 5} == dict(saver.calls)


def test_a_warm_read_asks_the_saver_nothing(thread_id: str) -> None:
    saver = CountingSaver()
    reader = Reader(saver, MemoryHistoryCache())
    say(saver, thread_id, 0)
    config = head_of(saver, thread_id).config
    reader.read(config)
    assert {} == counted(saver, lambda: reader.read(config))


def test_a_cold_deep_chain_costs_one_walk(thread_id: str) -> None:
    saver = CountingSaver()
    for turn in range(MAX_STEPS):
        say(saver, thread_id, turn)
    config = head_of(saver, thread_id).config
    reader = Reader(saver, MemoryHistoryCache())
    assert {"walk": 1} == counted(saver, lambda: reader.read(config))


def test_an_ancestor_too_far_away_costs_one_walk(thread_id: str) -> None:
    saver = CountingSaver()
    reader = Reader(saver, MemoryHistoryCache())
    say(saver, thread_id, 0)
    reader.read(head_of(saver, thread_id).config)
    for turn in range(1, MAX_STEPS):
        say(saver, thread_id, turn)
    config = head_of(saver, thread_id).config
    # The channel that is stored now and then is found on the way; the other is walked for.
    cost = counted(saver, lambda: reader.read(config, ["never-written"]))
    assert 1 == cost["walk"]


def test_older_checkpoints_are_read_without_searching_for_newer_entries(thread_id: str) -> None:
    saver = CountingSaver()
    for turn in range(MAX_STEPS):
        say(saver, thread_id, turn)
    ids = sorted(stored.checkpoint["id"] for stored in saver.list(at(thread_id)))
    reader = Reader(saver, MemoryHistoryCache())
    for checkpoint_id in reversed(ids[-10:]):
        config = at(thread_id, checkpoint_id)
        assert {"walk": 1} == counted(saver, partial(reader.read, config))


def test_latest_is_resolved_first_and_cached_under_its_id(thread_id: str) -> None:
    saver = CountingSaver()
    cache = MemoryHistoryCache()
    reader = Reader(saver, cache)
    for turn in range(3):
        say(saver, thread_id, turn)
        head = head_of(saver, thread_id)
        expected = saver.get_delta_channel_history(config=head.config, channels=CHANNELS)
        assert expected == reader.read(at(thread_id)) == reader.read(at(thread_id))
        held = {key.checkpoint_id for key in cache.epoch(thread_id).held}
        assert head.checkpoint["id"] in held
        assert "" not in held
    assert {"get_tuple": 1} == counted(saver, lambda: reader.read(at(thread_id)))


def test_without_channels_or_without_a_thread_there_is_nothing(thread_id: str) -> None:
    saver = CountingSaver()
    reader = Reader(saver, MemoryHistoryCache())
    assert {} == counted(saver, lambda: reader.read(at(thread_id), []))
    assert {"log": {"writes": []}} == reader.read(at(thread_id), ["log"])


def test_changing_what_was_returned_changes_nothing_later(thread_id: str) -> None:
    saver = InMemorySaver()
    reader = Reader(saver, MemoryHistoryCache())
    for turn in range(2):
        say(saver, thread_id, turn)
    config = head_of(saver, thread_id).config
    expected = saver.get_delta_channel_history(config=config, channels=CHANNELS)
    for _ in range(3):
        history = reader.read(config)
        assert expected == history
        for channel in CHANNELS:
            for _, _, value in history[channel]["writes"]:
                value.append("changed")
                if hasattr(value[0], "content"):
                    value[0].content = "changed"
                    value[0].additional_kwargs["changed"] = True
            seed = history[channel].get("seed")
            if seed is not None:
                seed.value.append("changed")
            history[channel]["writes"].clear()


# Who waits for whom.


class Gate:
    """Opens when as many readers as expected have asked the cache, and so have missed."""

    def __init__(self, expected: int) -> None:
        self._missing = expected
        self._lock = threading.Lock()
        self._open = threading.Event()

    def pass_by(self) -> None:
        with self._lock:
            self._missing -= 1
            if self._missing == 0:
                self._open.set()

    def wait(self) -> None:
        assert self._open.wait(30)

    async def await_(self) -> None:
        await asyncio.to_thread(self.wait)


class GatedCache(MemoryHistoryCache):
    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate

    def epoch(self, thread_id: str) -> Any:
        epoch = super().epoch(thread_id)
        self.gate.pass_by()
        return epoch


class GatedSaver(CountingSaver):
    """Walk only when all readers have missed."""

    gate: Gate | None = None  # Older releases walk for a thread's first turn, too.

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Histories:
        if self.gate is not None:
            self.gate.wait()
        return super().get_delta_channel_history(config=config, channels=channels)

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Histories:
        if self.gate is not None:
            await self.gate.await_()
        return super().get_delta_channel_history(config=config, channels=channels)


async def test_concurrent_misses_walk_once_across_threads_and_tasks(thread_id: str) -> None:
    saver = GatedSaver()
    say(saver, thread_id, 0)
    config = head_of(saver, thread_id).config
    expected = InMemorySaver.get_delta_channel_history(saver, config=config, channels=CHANNELS)
    saver.gate = Gate(8)
    reader = Reader(saver, GatedCache(saver.gate))
    saver.calls.clear()
    found = await asyncio.gather(
        *(asyncio.to_thread(reader.read, config) for _ in range(4)),
        *(reader.aread(config) for _ in range(4)),
    )
    assert [expected] * 8 == found
    assert {"walk": 1} == dict(saver.calls)
    found[0]["log"]["writes"].clear()
    assert [expected] * 7 == found[1:]


class SlowSaver(CountingSaver):
    """Let the test see that an awaitable walk has begun, and when it may end."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Histories:
        self.begun.set()
        await self.may_end.wait()
        return super().get_delta_channel_history(config=config, channels=channels)


async def test_readers_that_are_cancelled_let_the_next_one_go_on(thread_id: str) -> None:
    saver = SlowSaver()
    say(saver, thread_id, 0)
    config = head_of(saver, thread_id).config
    expected = InMemorySaver.get_delta_channel_history(saver, config=config, channels=CHANNELS)
    reader = Reader(saver, MemoryHistoryCache(), backend=None)  # Memory's own does not await.
    walking = asyncio.ensure_future(reader.aread(config))
    await saver.begun.wait()
    waiting, last = (asyncio.ensure_future(reader.aread(config)) for _ in range(2))
    while sum(flight.turn.waiting for flight in reader.readers._flights.values()) < 2:  # noqa: ASYNC110  # Nobody tells when a reader starts to wait.
        await asyncio.sleep(0)
    walking.cancel()
    waiting.cancel()
    saver.may_end.set()
    assert expected == await last
    ended = await asyncio.gather(walking, waiting, return_exceptions=True)
    assert [asyncio.CancelledError] * 2 == [type(result) for result in ended]


async def test_a_blocking_read_on_the_loop_does_not_wait_for_the_loops_own_task(
    thread_id: str,
) -> None:
    saver = SlowSaver()
    say(saver, thread_id, 0)
    config = head_of(saver, thread_id).config
    reader = Reader(saver, MemoryHistoryCache(), backend=None)  # Memory's own does not await.
    task = asyncio.ensure_future(reader.aread(config))
    await saver.begun.wait()
    found = reader.read(config)
    saver.may_end.set()
    assert found == await task


# Targets that are gone.


def reclaimed_leaf(saver: Saver, thread_id: str) -> tuple[RunnableConfig, str, Histories]:
    """Put a leaf on the head, see what it reads as, and take it away again."""
    parent_id = head_of(saver, thread_id).checkpoint["id"]
    _, leaf_id = put_leaf(saver, thread_id)
    config = at(thread_id, leaf_id)
    before = saver.get_delta_channel_history(config=config, channels=CHANNELS)
    assert isinstance(saver, InMemorySaver)
    del saver.storage[thread_id][""][leaf_id]
    return config, parent_id, before


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("turns", [1, 2, 3, 4])
def test_a_reclaimed_leaf_reads_as_it_did(turns: int, cached: bool, thread_id: str) -> None:
    saver = InMemorySaver()
    for turn in range(turns):
        say(saver, thread_id, turn)
    config, parent_id, before = reclaimed_leaf(saver, thread_id)
    cache = MemoryHistoryCache() if cached else None
    reader = Reader(saver, cache, parent_of=lambda _, checkpoint_id: parent_id)
    assert before == reader.read(config)
    # What the next run writes to the parent is not the leaf's.
    say(saver, thread_id, 99, durability="exit")
    assert before == reader.read(config)


def test_a_leaf_that_is_stored_reads_through_its_parent(thread_id: str) -> None:
    saver = InMemorySaver()
    reader = Reader(saver, MemoryHistoryCache())
    for turn in range(5):
        say(saver, thread_id, turn)
        _, leaf_id = put_leaf(saver, thread_id, run_id=f"run-{turn}")
        config = at(thread_id, leaf_id)
        expected = saver.get_delta_channel_history(config=config, channels=CHANNELS)
        assert expected == reader.read(config)


@pytest.mark.parametrize("cached", [True, False])
def test_another_id_that_is_gone_is_an_error(cached: bool, thread_id: str) -> None:
    saver = InMemorySaver()
    say(saver, thread_id, 0)
    config, _, _ = reclaimed_leaf(saver, thread_id)
    reader = Reader(saver, MemoryHistoryCache() if cached else None)
    with pytest.raises(CheckpointNotFoundError, match=str(Ref.of(config).checkpoint_id)):
        reader.read(config)


def test_an_id_on_a_thread_without_checkpoints_has_no_history(thread_id: str) -> None:
    reader = Reader(InMemorySaver(), MemoryHistoryCache())
    config = at(thread_id, "1ef00000-0000-6000-8000-000000000000")
    assert {"log": {"writes": []}} == reader.read(config, ["log"])


def test_a_checkpoint_that_was_seen_and_is_gone_is_an_error(thread_id: str) -> None:
    saver = InMemorySaver()
    reader = Reader(saver, MemoryHistoryCache())
    say(saver, thread_id, 0)
    head = head_of(saver, thread_id)
    reader.readers.saw(head)
    saver.delete_thread(thread_id)
    with pytest.raises(CheckpointNotFoundError):
        reader.read(head.config)


def test_a_child_of_a_reclaimed_leaf_reads_through_the_leafs_parent(thread_id: str) -> None:
    saver = InMemorySaver()
    for turn in range(2):
        say(saver, thread_id, turn)
    parent = head_of(saver, thread_id)
    _, leaf_id = put_leaf(saver, thread_id)
    child = chat(saver).update_state(at(thread_id), None, as_node="check")
    expected = saver.get_delta_channel_history(config=child, channels=CHANNELS)
    del saver.storage[thread_id][""][leaf_id]
    reader = Reader(saver, MemoryHistoryCache(), parent_of=lambda *_: str(parent.checkpoint["id"]))
    assert expected == reader.read(child)


# What must not be cached, and what must not be believed.


class Note(BaseModel):
    text: str


def test_what_this_process_could_not_rebuild_is_not_cached_for_others(thread_id: str) -> None:
    knows = InMemorySaver(serde=JsonPlusSerializer(allowed_msgpack_modules=True))
    builder = StateGraph(Chat)
    builder.add_node("note", lambda state: {"log": [Note(text="typed")]})
    builder.add_edge(START, "note")
    graph: Any = builder.compile(checkpointer=knows)
    graph.invoke({"turns": 0}, at(thread_id))
    config = head_of(knows, thread_id).config
    ignorant = copy.copy(knows)
    ignorant.serde = JsonPlusSerializer(allowed_msgpack_modules=None)
    cache = MemoryHistoryCache()
    shown = Reader(ignorant, cache).read(config, ["log"])
    assert [[{"text": "typed"}]] == [write[2] for write in shown["log"]["writes"]]
    assert frozenset() == cache.epoch(thread_id).held
    for _ in range(2):
        typed = Reader(knows, cache).read(config, ["log"])
        assert [[Note(text="typed")]] == [write[2] for write in typed["log"]["writes"]]
    assert frozenset() != cache.epoch(thread_id).held
    # A strict reader stays strict, whatever others have cached.
    assert shown == Reader(ignorant, cache).read(config, ["log"])


def test_an_entry_that_cannot_be_read_is_a_miss(thread_id: str, redis_url: str) -> None:
    cache = RedisHistoryCache(redis_url, database=thread_id)
    failures: list[Exception] = []

    def encrypted(key: bytes) -> Reader:
        clone = copy.copy(saver)
        clone.serde = EncryptedSerializer.from_pycryptodome_aes(key=key)
        return Reader(clone, cache, cache_failed=lambda _, error: failures.append(error))

    saver = InMemorySaver()
    say(saver, thread_id, 0)
    config = head_of(saver, thread_id).config
    expected = saver.get_delta_channel_history(config=config, channels=CHANNELS)
    assert expected == encrypted(b"0123456789abcdef").read(config)
    assert not failures
    # The rows themselves are plain, so only the cached entries need the key.
    assert expected == encrypted(b"another key 16 b").read(config)
    assert len(CHANNELS) == len(failures)
    cache.close()


class BrokenCache(MemoryHistoryCache):
    def get_many(self, keys: Any) -> Any:
        raise OSError("lookup")

    def epoch(self, thread_id: str) -> Any:
        raise OSError("epoch")


def test_a_cache_that_fails_does_not_fail_a_read(thread_id: str) -> None:
    saver = InMemorySaver()
    say(saver, thread_id, 0)
    config = head_of(saver, thread_id).config
    failures: list[tuple[str, str]] = []
    reader = Reader(
        saver,
        BrokenCache(),
        cache_failed=lambda ref, error: failures.append((ref.thread_id, str(error))),
    )
    expected = saver.get_delta_channel_history(config=config, channels=CHANNELS)
    assert expected == reader.read(config)
    assert [(thread_id, "lookup"), (thread_id, "epoch")] == failures


class PurgedWhileWalking(CountingSaver):
    cache: HistoryCache

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Histories:
        histories = super().get_delta_channel_history(config=config, channels=channels)
        self.cache.delete_thread(Ref.of(config).thread_id)
        return histories


def test_a_read_that_a_purge_overtook_leaves_nothing_in_the_cache(thread_id: str) -> None:
    saver = PurgedWhileWalking()
    saver.cache = cache = MemoryHistoryCache()
    say(saver, thread_id, 0)
    Reader(saver, cache).read(head_of(saver, thread_id).config)
    assert frozenset() == cache.epoch(thread_id).held


# Time travel.


class Wrapped(InMemorySaver):
    """Tell a reader what a wrapper would tell it."""

    reader: Reader

    def get_tuple(self, config: RunnableConfig) -> Any:
        found = super().get_tuple(config)
        if found is not None:
            self.reader.readers.saw(found)
        return found

    def put_writes(
        self, config: RunnableConfig, writes: Any, task_id: str, task_path: str = ""
    ) -> None:
        super().put_writes(config, writes, task_id, task_path)
        run(writes_arrived(self.reader.cache, self.reader.readers, config))


def _asks(state: Chat) -> dict[str, Any]:
    return {"log": [interrupt("which?")]}


def test_an_answer_given_in_the_past_is_read_as_on_the_bare_saver(thread_id: str) -> None:
    saver = Wrapped()
    saver.reader = reader = Reader(saver, MemoryHistoryCache())
    builder = StateGraph(Chat)
    builder.add_node("asks", _asks)
    builder.add_edge(START, "asks")
    graph: Any = builder.compile(checkpointer=saver)
    graph.invoke({"turns": 0}, at(thread_id))
    waiting = head_of(saver, thread_id).config
    child = graph.update_state(waiting, {"turns": 1}, as_node="asks")
    before = reader.read(child, ["log"])
    graph.invoke(Command(resume="late"), waiting)
    bare_now = saver.get_delta_channel_history(config=child, channels=["log"])
    # The host lets the answer into the other branch; if it stops doing so, drop writes_arrived.
    assert before != bare_now
    assert bare_now == reader.read(child, ["log"])


def test_a_run_that_starts_under_a_leaf_purges_nothing(thread_id: str) -> None:
    saver = Wrapped()
    saver.reader = reader = Reader(saver, MemoryHistoryCache())
    for turn in range(3):
        # Stores the turn's writes on the checkpoint that it starts from, which the leaf was on.
        say(saver, thread_id, turn, durability="exit")
        parent = head_of(saver, thread_id)
        reader.read(parent.config)
        _, leaf_id = put_leaf(saver, thread_id, run_id=f"run-{turn}")
        assert leaf_id == head_of(saver, thread_id).checkpoint["id"]
        # As after the leaf was reclaimed at admission.
        del saver.storage[thread_id][""][leaf_id]
    assert reader.cache is not None
    epoch = reader.cache.epoch(thread_id)
    assert epoch is not None
    assert 3 == len({key.checkpoint_id for key in epoch.held})


# Reclaiming a leaf.


async def test_reclaiming_a_leaf_spares_what_its_parent_reads(face: Face, thread_id: str) -> None:
    saver = CountingSaver()
    cache = MemoryHistoryCache()
    reader = Reader(saver, cache)
    for turn in range(3):
        say(saver, thread_id, turn)
        reader.read(head_of(saver, thread_id).config)
    parent = head_of(saver, thread_id)
    _, leaf_id = put_leaf(saver, thread_id)
    reader.read(at(thread_id, leaf_id))
    parent_ref = Ref.of(parent.config)

    async def reclaim() -> None:
        spared = await driven(purge_sparing(cache, parent_ref))
        assert frozenset() == cache.epoch(thread_id).held
        del saver.storage[thread_id][""][leaf_id]
        await driven(put_back(cache, parent_ref, spared))

    async def driven(steps: Any) -> Any:
        return run(steps) if face is SYNC else await arun(steps)

    await reclaim()
    held = {key.checkpoint_id for key in cache.epoch(thread_id).held}
    assert {parent_ref.checkpoint_id} == held
    assert {} == counted(saver, partial(reader.read, parent.config))


def test_nothing_spared_comes_back_to_a_thread_that_was_purged_meanwhile(thread_id: str) -> None:
    saver = InMemorySaver()
    cache = MemoryHistoryCache()
    say(saver, thread_id, 0)
    parent = head_of(saver, thread_id)
    Reader(saver, cache).read(parent.config)
    spared = run(purge_sparing(cache, Ref.of(parent.config)))
    assert spared.entries
    cache.delete_thread(thread_id)
    run(put_back(cache, Ref.of(parent.config), spared))
    assert frozenset() == cache.epoch(thread_id).held


class PurgeFails(MemoryHistoryCache):
    def delete_thread(self, thread_id: str) -> None:
        raise OSError("purge")


def test_a_sparing_purge_that_fails_raises(thread_id: str) -> None:
    with pytest.raises(OSError, match="purge"):
        run(purge_sparing(PurgeFails(), Ref(thread_id, "", "1")))


def test_a_sparing_purge_needs_no_lookup_that_works(thread_id: str) -> None:
    failures: list[str] = []
    cache = BrokenCache()
    spared = run(
        purge_sparing(
            cache,
            Ref(thread_id, "", "1"),
            cache_failed=lambda _, error: failures.append(str(error)),
        )
    )
    assert ({}, ["epoch"]) == (spared.entries, failures)


# Through the wrapper.


def everything_in(redis_url: str) -> str:
    with redis.Redis.from_url(redis_url) as client:
        return repr(
            {
                name: client.hgetall(name) if client.type(name) == b"hash" else client.get(name)
                for name in client.scan_iter()
            }
        )


async def test_nothing_of_a_deleted_thread_is_left_in_redis(
    face: Face, where: Where, thread_id: str, redis_url: str
) -> None:
    canary = f"canary{uuid.uuid4().hex}"
    cache = RedisHistoryCache(redis_url, database=thread_id)
    async with open_saver("sqlite" if face is SYNC else "asqlite", where) as saver:
        wrapped = RetainingSaver(saver, history_cache=cache)
        graph = chat(wrapped)
        for turn in range(3):
            said = {"messages": [HumanMessage(canary, id=f"human-{turn}")], "turns": 0}
            await face(graph.invoke, graph.ainvoke, said, at(thread_id))
            await face(graph.get_state, graph.aget_state, at(thread_id))
        assert canary in everything_in(redis_url)
        await face(wrapped.delete_thread, wrapped.adelete_thread, thread_id)
        assert canary not in everything_in(redis_url)
    await cache.aclose()


async def test_nothing_of_an_encrypted_saver_is_readable_in_redis(
    face: Face, where: Where, thread_id: str, redis_url: str
) -> None:
    secret = f"secret{uuid.uuid4().hex}"
    serde = EncryptedSerializer.from_pycryptodome_aes(key=b"0123456789abcdef")
    kind = "sqlite" if face is SYNC else "asqlite"
    states: list[Any] = []
    hits = 0
    async with open_saver(kind, where, serde=serde) as saver:
        for _ in range(2):
            cache = RedisHistoryCache(redis_url, database=thread_id)
            graph = chat(RetainingSaver(saver, history_cache=cache))
            if not states:
                said = {"messages": [HumanMessage(secret, id="human")], "turns": 0}
                await face(graph.invoke, graph.ainvoke, said, at(thread_id))
            state = await face(graph.get_state, graph.aget_state, at(thread_id))
            states.append(state.values)
            assert secret not in everything_in(redis_url)
            hits = cache.stats().hits
            await cache.aclose()
    assert states[0] == states[1]
    assert secret == states[0]["messages"][0].content
    assert hits > 0


async def test_a_wrapped_thread_reads_as_the_bare_one_does_in_every_turn(
    face: Face, where: Where, thread_id: str
) -> None:
    async with open_saver("sqlite" if face is SYNC else "asqlite", where) as saver:
        bare_graph, wrapped = chat(saver), chat(RetainingSaver(saver))
        for turn in range(8):
            said = {"messages": [HumanMessage(f"say {turn}", id=f"human-{turn}")], "turns": 0}
            graph = wrapped if turn % 3 else bare_graph
            await face(graph.invoke, graph.ainvoke, said, at(thread_id))
            expected = await face(bare_graph.get_state, bare_graph.aget_state, at(thread_id))
            for _ in range(2):
                found = await face(wrapped.get_state, wrapped.aget_state, at(thread_id))
                assert expected.values == found.values
                found.values["messages"][0].content = "changed by the caller"
