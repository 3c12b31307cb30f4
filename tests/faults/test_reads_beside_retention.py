"""A thread of delta channels is read while retention replaces what the read walks along."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Annotated, Any, TypedDict

import pytest
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import START, StateGraph

from retaining_saver import RetainingSaver, RetentionPolicy
from tests.support import graphs
from tests.support.faces import ASYNC, SYNC, Face
from tests.support.savers import Saver, Where, open_saver
from tests.support.threads import face_of, named
from tests.support.traced import KINDS, open_traced

TURNS = 6
# The second leaves the newest turns' checkpoints, and moves the rows of those that go.
POLICIES = {
    "prune": RetentionPolicy(keep_last_turns=1, compact_supersteps=True),
    "compact": RetentionPolicy(keep_last_turns=2, compact_supersteps=True),
    "window": RetentionPolicy(keep_last_turns=2),
}


class Log(TypedDict):
    """Two channels, of which one takes a snapshot now and then, and one never."""

    often: Annotated[list[str], DeltaChannel(graphs.extend, snapshot_frequency=5)]
    never: Annotated[list[str], DeltaChannel(graphs.extend, snapshot_frequency=1_000)]


def _graph(saver: Saver) -> Any:
    def adds(state: Any) -> dict[str, Any]:
        said = [f"seen {len(state['never'])}"]
        return {"often": said, "never": said}

    made = StateGraph(Log)
    made.add_node("first", adds)
    made.add_node("second", adds)
    made.add_edge(START, "first")
    made.add_edge("first", "second")
    return made.compile(checkpointer=saver)


def _hold_turns(saver: Saver, thread_id: str, durability: Any) -> tuple[Any, str]:
    """Hold a conversation; return its values, and a checkpoint from the middle of it."""
    talk = _graph(saver)
    for n in range(TURNS):
        said = {"often": [f"turn {n}"], "never": [f"turn {n}"]}
        talk.invoke(said, named(thread_id), durability=durability)
    told = talk.get_state(named(thread_id)).values
    assert 3 * TURNS == len(told["often"]) == len(told["never"])
    older = (s for s in talk.get_state_history(named(thread_id)) if s.metadata["step"] > 0)
    middle = next(s for s in older if 2 * len(s.values["never"]) <= len(told["never"]))
    return told, middle.config["configurable"]["checkpoint_id"]


class _Interruption:
    """Does something once, right before the n-th step that is told."""

    def __init__(self, what: Callable[[], object]) -> None:
        self._what = what
        self._left = 0
        self.done = False

    def arm(self, n: int) -> None:
        self._left, self.done = n, False

    def disarm(self) -> None:
        self._left = 0

    def tell(self, _step: str = "") -> None:
        self._left -= 1
        if self._left == 0:
            self.done = True
            self._what()


@pytest.mark.parametrize("durability", ["sync", "exit"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("start", ["cold", "ancestor"])
@pytest.mark.parametrize("kind", KINDS)
async def test_whatever_is_retained_between_two_statements_of_a_read_is_read_whole(
    kind: str, start: str, policy: str, durability: Any, where: Where, thread_id: str
) -> None:
    """Also what that read leaves in the cache is whole."""
    face = face_of(kind)
    async with open_saver(kind.removeprefix("a"), where) as other:
        retains = RetainingSaver(other)
        told, older = _hold_turns(retains, thread_id, durability)
        target = ""
        interruption = _Interruption(
            lambda: retains.enforce_thread_retention(target, POLICIES[policy])
        )
        async with open_traced(kind, where, interruption.tell) as bare:
            n = 0
            for n in range(1, 100):
                target = f"{thread_id}-{n}"
                retains.copy_thread(thread_id, target)
                graph = _graph(RetainingSaver(bare))
                if start == "ancestor":
                    await face(graph.get_state, graph.aget_state, named(target, older))
                interruption.arm(n)
                read = await face(graph.get_state, graph.aget_state, named(target))
                interruption.disarm()
                cached = await face(graph.get_state, graph.aget_state, named(target))
                assert told == read.values == cached.values
                if not interruption.done:
                    break
    # A checkpoint with its writes, and the statements of a history.
    assert 3 <= n < 99


class _Told(JsonPlusSerializer):
    """Tells each value that it rebuilds."""

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__()
        self._tell = tell

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        self._tell()
        return super().loads_typed(data)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("face", [SYNC, ASYNC], ids=str)
async def test_whatever_is_retained_in_another_thread_while_memory_is_read_is_read_whole(
    face: Face, policy: str, thread_id: str
) -> None:
    """The other thread may have to wait for the read."""
    target = ""
    pending: list[Thread] = []

    def retain() -> None:
        args = (target, POLICIES[policy])
        pending.append(Thread(target=retains.enforce_thread_retention, args=args))
        pending[-1].start()
        pending[-1].join(0.05)

    interruption = _Interruption(retain)
    bare = InMemorySaver(serde=_Told(interruption.tell))
    retains = RetainingSaver(bare)
    told, _ = _hold_turns(retains, thread_id, "sync")
    n = 0
    for n in range(1, 200):
        target = f"{thread_id}-{n}"
        retains.copy_thread(thread_id, target)
        graph = _graph(RetainingSaver(bare))
        interruption.arm(n)
        read = await face(graph.get_state, graph.aget_state, named(target))
        interruption.disarm()
        if not interruption.done:
            break
        pending[-1].join(10)
        assert not pending[-1].is_alive()
        cached = await face(graph.get_state, graph.aget_state, named(target))
        assert told == read.values == cached.values
    assert 3 * TURNS < n < 199
