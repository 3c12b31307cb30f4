"""Delta histories of real graphs, read through the cache: equal to the bare saver's, and cheaper."""

from __future__ import annotations

import asyncio
import operator
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Annotated, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.base import BaseCheckpointSaver, DeltaChannelHistory
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from typing_extensions import TypedDict

from retaining_saver._steps import arun, run
from retaining_saver.caches import HistoryCache, MemoryHistoryCache, RedisHistoryCache
from retaining_saver.delta_history import MAX_STEPS, Readers, delta_history
from retaining_saver.errors import CheckpointNotFoundError
from retaining_saver.records import Ref
from tests.support.faces import ASYNC, SYNC, Face, kinds_and_faces
from tests.support.graphs import extend, merge_messages
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
        self.options = options

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
            ids = await listed(saver, thread_id)
            rng.shuffle(ids)
            for checkpoint_id in [*ids, *ids]:
                config = at(thread_id, checkpoint_id)
                ours = await face(reader.read, reader.aread, config)
                assert await bare(face, saver, config) == ours
        assert cache.stats().hits > 0
