"""Runs on the wrapper, with somebody else's leaves in between, against runs on the bare saver.

One thread of each: the same turns, on the same kind of saver. After every turn on the wrapper an
application records how long it took, by putting a copy of the head. Results, states, streamed
events and everything stored are the same, but for what was recorded.
"""

from __future__ import annotations

import uuid
from typing import Any

import psycopg
import pytest
from langgraph.checkpoint.base import BaseCheckpointSaver

from retaining_saver import RetainingSaver
from tests.support import graphs, releases
from tests.support.faces import Face
from tests.support.leaves import aput_leaf, put_leaf
from tests.support.savers import Where, open_saver
from tests.support.threads import (
    Words,
    dangling,
    face_of,
    metadata_only,
    named,
    parent_id,
    root,
    stored,
    story,
)

KINDS = ("memory", "sqlite", "asqlite", "pg", "apg_pool", "apg_pipeline")
DURABILITIES = ("sync", "async", "exit")
TURNS = 6
STREAMED = ["values", "updates", "checkpoints"]


async def _events(face: Face, graph: Any, given: Any, config: Any, **options: Any) -> list[Any]:
    options = {"stream_mode": STREAMED, **options}

    def blocking() -> list[Any]:
        return list(graph.stream(given, config, **options))

    async def awaitable() -> list[Any]:
        return [event async for event in graph.astream(given, config, **options)]

    return await face(blocking, awaitable)


async def _state(face: Face, graph: Any, thread_id: str) -> tuple[Any, ...]:
    found = await face(graph.get_state, graph.aget_state, named(thread_id))
    return found.values, found.next, found.interrupts, found.tasks


def _without_parent(mode: str, payload: Any) -> tuple[str, Any]:
    return mode, {k: v for k, v in payload.items() if mode != "checkpoints" or k != "parent_config"}


class Thread:
    """One thread's turns, and what was seen of each."""

    def __init__(self, face: Face, graph: Any, saver: BaseCheckpointSaver[Any]) -> None:
        self.face = face
        self.graph = graph
        self.saver = saver
        self.thread_id = str(uuid.uuid4())
        self.words = Words()
        self.seen: list[str] = []

    async def turn(
        self, number: int, durability: str, *, given: Any = None, with_parents: bool = True
    ) -> None:
        given = given or graphs.say(f"turn {number}")
        config = named(self.thread_id)
        events = await _events(self.face, self.graph, given, config, durability=durability)
        if not with_parents:
            events = [_without_parent(*event) for event in events]
        self.seen.append(self.words.of(events))
        self.seen.append(self.words.of(await _state(self.face, self.graph, self.thread_id)))

    async def leaf(self, number: int) -> None:
        """Record the turn as an application does; the state is the same under the leaf."""
        before = await _state(self.face, self.graph, self.thread_id)
        head = await self.face(self.saver.get_tuple, self.saver.aget_tuple, named(self.thread_id))
        assert head is not None
        run_id = f"run {number}"
        _, leaf_id = await self.face(
            put_leaf, aput_leaf, self.saver, self.thread_id, run_id=run_id, duration=number
        )
        # With admission at put, the run's first event still names the leaf as its parent.
        self.words.aliases[leaf_id] = head.checkpoint["id"]
        assert before == await _state(self.face, self.graph, self.thread_id)


def _blobs(url: str, thread_id: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            """SELECT checkpoint_ns, channel, split_part(version, '.', 1), type, blob
            FROM checkpoint_blobs WHERE thread_id = %s ORDER BY 1, 2, 3""",
            (thread_id,),
        )
        return rows.fetchall()


@pytest.mark.parametrize("admission", ["auto", "put"])
@pytest.mark.parametrize("durability", DURABILITIES)
@pytest.mark.parametrize("mode", graphs.MODES)
@pytest.mark.parametrize("kind", KINDS)
async def test_turns_with_leaves_in_between_equal_turns_without(
    kind: str, mode: graphs.Mode, durability: str, admission: Any, where: Where
) -> None:
    face = face_of(kind)
    # A run that does not store before it ends streams the parent of the head that it read as the
    # parent of everything. With admission at put it has read the leaf, so that the two differ.
    with_parents = (durability, admission) != ("exit", "put")
    async with open_saver(kind, where) as saver:
        ours = RetainingSaver(saver, admission=admission)
        bare = Thread(face, graphs.chat_graph(saver, mode), saver)
        wrapped = Thread(face, graphs.chat_graph(ours, mode), ours)
        for number in range(1, TURNS + 1):
            await bare.turn(number, durability, with_parents=with_parents)
            await wrapped.turn(number, durability, with_parents=with_parents)
            assert bare.seen == wrapped.seen
            await wrapped.leaf(number)
        expected = await stored(face, saver, bare.thread_id)
        found = await stored(face, saver, wrapped.thread_id)
        history = await face(ours.run_history, ours.arun_history, named(wrapped.thread_id))
        bare_blobs, blobs = (
            [_blobs(where.postgres, thread.thread_id) for thread in (bare, wrapped)]
            if "pg" in kind
            else ([], [])
        )
    leaves = metadata_only(found)
    assert root(found)[-1].checkpoint["id"] in leaves
    assert 1 == len(leaves)
    assert [] == dangling(found)
    assert story(expected) == story(found, but=leaves)
    assert {f"run {number}": number for number in range(1, TURNS + 1)} == history.durations
    assert bare_blobs == blobs


@pytest.mark.parametrize("kind", KINDS)
async def test_a_leaf_on_the_bare_saver_stays_and_becomes_a_link(kind: str, where: Where) -> None:
    # What the wrapper is for: without it every turn leaves a row that nothing removes.
    face = face_of(kind)
    async with open_saver(kind, where) as saver:
        thread = Thread(face, graphs.chat_graph(saver), saver)
        for number in (1, 2):
            await thread.turn(number, "sync")
            await thread.leaf(number)
        found = await stored(face, saver, thread.thread_id)
    leaves = metadata_only(found)
    assert 2 == len(leaves)
    assert leaves[0] in [parent_id(row) for row in found]


OTHERS: dict[str, tuple[Any, Any]] = {
    "raw": (graphs.raw_pregel, ["u"]),
    "full subgraphs": (lambda on: graphs.subgraph_graph(on, "full", ask=False), {"log": ["u"]}),
    "delta subgraphs": (lambda on: graphs.subgraph_graph(on, "delta", ask=False), {"log": ["u"]}),
}


@pytest.mark.parametrize("durability", DURABILITIES)
@pytest.mark.parametrize("graph", OTHERS)
@pytest.mark.parametrize("kind", ["memory", "asqlite", "pg"])
async def test_turns_of_other_graphs_equal_those_without_leaves(
    kind: str, graph: str, durability: str, where: Where
) -> None:
    face = face_of(kind)
    build, given = OTHERS[graph]
    async with open_saver(kind, where) as saver:
        ours = RetainingSaver(saver)
        bare = Thread(face, build(saver), saver)
        wrapped = Thread(face, build(ours), ours)
        for number in range(1, TURNS + 1):
            await bare.turn(number, durability, given=given)
            await wrapped.turn(number, durability, given=given)
            assert bare.seen == wrapped.seen
            state = await _state(face, bare.graph, bare.thread_id)
            if state[1]:
                # Such a run of older releases is never done: a leaf's tasks would have other ids.
                assert (graph, durability, releases.KEEPS_RAW_INPUT) == ("raw", "exit", False)
                return
            await wrapped.leaf(number)
        expected = await stored(face, saver, bare.thread_id)
        found = await stored(face, saver, wrapped.thread_id)
        history = await face(ours.run_history, ours.arun_history, named(wrapped.thread_id))
    leaves = metadata_only(found)
    assert 1 == len(leaves)
    assert [] == dangling(found)
    assert story(expected) == story(found, but=leaves)
    assert {f"run {number}": number for number in range(1, TURNS + 1)} == history.durations
