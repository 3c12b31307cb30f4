"""Shapes that once lost something to whole-thread retention, and random stories to find more.

A story happens on two savers alike. Only one of them is retained in between, several times; what
is left of its thread must not be told from the other's. Where the savers order by task id, two
threads that nobody retained differ in the order of what ran in parallel, of a turn that was stored
at its exit and of a branch's first writes: there both are given the same ids.
"""

from __future__ import annotations

import operator
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pytest
from langgraph.channels.delta import DeltaChannel
from langgraph.graph import START, StateGraph
from langgraph.types import Command, Send, interrupt
from typing_extensions import TypedDict

from retaining_saver import RetentionPolicy
from tests.support import graphs, releases
from tests.support.alike import AlikeIds
from tests.support.leaves import aput_leaf, put_leaf
from tests.support.retained import (
    Retained,
    is_carrier,
    key_of,
    open_retained,
    said,
    shown,
    timeless,
)
from tests.support.savers import Where
from tests.support.threads import dangling, face_of, named

KINDS = ("memory", "sqlite", "pg")


class _Log(TypedDict):
    log: Annotated[list[str], operator.add]


def _remembering(saver: Any) -> Any:
    """Build a graph whose only node is a persistent subgraph that counts, then asks."""

    def counts(state: Any) -> dict[str, Any]:
        return {"log": [f"r{len(state['log'])}"]}

    child = StateGraph(_Log)
    child.add_node("counts", counts)
    child.add_node("asks", graphs.in_context(lambda state: {"log": [interrupt("which?")]}))
    child.add_edge(START, "counts")
    child.add_edge("counts", "asks")
    builder = StateGraph(_Log)
    builder.add_node("remembers", child.compile(checkpointer=True))
    builder.add_edge(START, "remembers")
    return builder.compile(checkpointer=saver)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_replayed_fork_reads_its_subgraphs_as_before_the_parent_that_went(
    kind: str, where: Where, thread_id: str
) -> None:
    """A replay of a fork reads what was newest before the fork's parent, not before the fork."""
    async with open_retained(kind, where, thread_id, _remembering) as thread:
        await thread.on_bare.say({"log": ["one"]})
        waits = await thread.on_bare.at_rest()
        await thread.on_bare.say(Command(resume="a"))
        await thread.on_bare.update(None, at=waits, as_node="__copy__")
        fork = await thread.on_bare.at_rest()
        twin = await thread.copied("twin")
        await thread.do("prune", [thread_id])
        again = thread.dump()
        await thread.do("prune", [thread_id])
        assert again == thread.dump()
        expected = said(await twin.on_bare.say(None, at=fork))
        assert expected == said(await thread.on_ours.say(None, at=fork))
        answer: Any = Command(resume="b")
        assert said(await twin.on_bare.say(answer)) == said(await thread.on_ours.say(answer))
        assert timeless(await twin.on_bare.state()) == timeless(await thread.on_ours.state())


def _waiting_below(saver: Any, ran: list[str]) -> Any:
    """Build a persistent subgraph that waits inside a subgraph of its own."""

    def begin(state: Any) -> Any:
        ran.append("begins")
        return {"log": ["begun"]}

    asks = StateGraph(_Log)
    asks.add_node("begins", begin)
    asks.add_node("asks", graphs.in_context(lambda state: {"log": [interrupt("which?")]}))
    asks.add_edge(START, "begins")
    asks.add_edge("begins", "asks")
    child = StateGraph(_Log)
    child.add_node("calls", asks.compile())
    child.add_edge(START, "calls")
    builder = StateGraph(_Log)
    builder.add_node("remembers", child.compile(checkpointer=True))
    builder.add_edge(START, "remembers")
    return builder.compile(checkpointer=saver)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_inside_a_subgraph_that_waits_outlives_the_root_checkpoint_it_ran_under(
    kind: str, where: Where, thread_id: str
) -> None:
    """A persistent subgraph's head stays, and goes on in its call when a later turn resumes it."""
    ran: list[str] = []

    def builder(saver: Any) -> Any:
        return _waiting_below(saver, ran)

    async with open_retained(kind, where, thread_id, builder) as thread:
        await thread.on_bare.say({"log": ["one"]})
        await thread.on_bare.say({"log": ["two"]}, interrupt_before=["remembers"])
        twin = await thread.copied("twin")
        await thread.do("prune", [thread_id])
        ran.clear()
        later: tuple[Any, ...] = (None, Command(resume="a"))
        for given in later:
            assert said(await twin.on_bare.say(given)) == said(await thread.on_ours.say(given))
            assert timeless(await twin.on_bare.state()) == timeless(await thread.on_ours.state())
        # What had run before the question is not run again.
        assert [] == ran


@pytest.mark.parametrize("kind", KINDS)
async def test_a_question_below_a_pinned_leaf_outlives_what_is_folded_there(
    kind: str, where: Where, thread_id: str
) -> None:
    """Postgres keeps no mark of an application's leaf: only what it records tells what it is."""
    async with open_retained(kind, where, thread_id, graphs.asking_graph) as thread:
        await thread.on_bare.say({"log": ["one"]})
        waits = await thread.on_bare.at_rest()
        asked = shown(await thread.on_bare.state())
        by_id = shown(await thread.on_bare.state(waits))
        leaf = await _leaf(thread, "run-1")
        await _leaf(thread, "run-2")  # It repeats what the other one records.
        await thread.do("pin", named(thread_id, leaf), ttl=None)
        for _ in range(2):
            await thread.do("prune", [thread_id])
            assert {waits, leaf} == {key_of(f)[1] for f in await thread.rows()}
            assert by_id == shown(await thread.on_bare.state(waits))
            told = await thread.do("run_history", named(thread_id))
            assert {"run-1": 7, "run-2": 7} == told.durations
        for pin in await thread.do("pins", thread_id):
            await thread.do("unpin", named(thread_id, pin.checkpoint_id))
        await thread.do("prune", [thread_id])
        assert asked == shown(await thread.on_bare.state())
        answer: Any = Command(resume="a")
        assert ["one", "a", "p"] == (await thread.on_ours.say(answer))["log"]


async def _leaf(thread: Retained, run_id: str) -> str:
    blocking = partial(put_leaf, thread.bare, thread.thread_id, run_id=run_id)
    awaitable = partial(aput_leaf, thread.bare, thread.thread_id, run_id=run_id)
    return (await face_of(thread.kind)(blocking, awaitable))[1]


# Random stories


class _Mode(TypedDict):
    mode: list[str]


class _Out(TypedDict):
    out: Annotated[list[Any], operator.add]


class _Inner(TypedDict):
    mode: list[str]
    inner: Annotated[list[str], DeltaChannel(graphs.extend, snapshot_frequency=3)]
    out: Annotated[list[Any], operator.add]


class _Outer(TypedDict):
    mode: list[str]
    log: Annotated[list[str], DeltaChannel(graphs.extend, snapshot_frequency=4)]
    notes: Annotated[list[str], DeltaChannel(graphs.extend, snapshot_frequency=9)]
    out: Annotated[list[Any], operator.add]


ASKING = ("asks", "asks too", "calls", "keeps")
MODES = (*ASKING, "fans", "call asks", "keep asks", "below asks")


def _of_everything(saver: Any, ran: list[str]) -> Any:
    """Build parallel nodes, sends and both kinds of subgraph, which ask as ``mode`` says."""

    def add(builder: Any, name: str, write: Any) -> None:
        def node(state: Any) -> Any:
            ran.append(name)
            return write(state)

        builder.add_node(name, graphs.in_context(node))

    def subgraph(name: str, asks: str, below: Any = None) -> Any:
        def end(state: Any) -> Any:
            told = [interrupt(asks)] if asks in state["mode"] else []
            return {"inner": [name, *told], "out": [f"{name}-{len(state['inner'])}", *told]}

        builder = StateGraph(_Inner, input_schema=_Mode, output_schema=_Out)
        add(builder, f"{name} begins", lambda state: {"inner": [f"b{len(state['inner'])}"]})
        add(builder, f"{name} ends", end)
        builder.add_edge(START, f"{name} begins")
        builder.add_edge(f"{name} begins", f"{name} ends")
        if below is not None:
            builder.add_node("below", below)
            builder.add_edge(f"{name} ends", "below")
        return builder.compile(checkpointer=None if below is None else True)

    def route(state: Any) -> list[Any]:
        sends = [Send("sent", {"n": n}) for n in range(3) if "fans" in state["mode"]]
        return [*sends, "works", *(m for m in ASKING if m in state["mode"])]

    builder = StateGraph(_Outer)
    add(builder, "plans", lambda state: {"log": [f"p{len(state['log'])}"], "notes": ["p"]})
    add(builder, "works", lambda state: {"log": [f"w{len(state['log'])}"]})
    add(builder, "asks", lambda state: {"log": [interrupt("asks")]})
    add(builder, "asks too", lambda state: {"notes": [interrupt("asks too")]})
    add(builder, "sent", lambda state: {"log": [f"s{state['n']}"], "notes": ["s"]})
    builder.add_node("calls", subgraph("calls", "call asks"))
    builder.add_node("keeps", subgraph("keeps", "keep asks", subgraph("below", "below asks")))
    builder.add_node("joins", _join(ran), defer=True)
    builder.add_edge(START, "plans")
    ends = ["works", "sent", *ASKING]
    builder.add_conditional_edges("plans", route, ends)
    for name in ends:
        builder.add_edge(name, "joins")
    return builder.compile(checkpointer=saver)


def _join(ran: list[str]) -> Any:
    def join(state: Any) -> Any:
        ran.append("joins")
        return {"log": [f"j{len(state['notes'])}"], "out": [len(state["log"])]}

    return join


@dataclass
class _Story:
    """One thread that is retained and one that is not, of which the same is told.

    ``pairs`` are the root checkpoints that both have, by their ids.
    """

    one: Retained
    other: Retained
    ran: tuple[list[str], list[str]]
    rng: random.Random
    ids: AlikeIds = field(default_factory=AlikeIds)
    pairs: list[tuple[str, str]] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    told: int = 0

    async def happen(self) -> None:
        """Let something happen to both."""
        self.told += 1
        at = self.rng.randrange(len(self.pairs)) if self.pairs and self._likely(0.3) else None
        kinds = (self._say, self._say, self._answer, self._go_on, self._update)
        act = (self.rng.choice(kinds) if self.pairs else self._say)()
        results = []
        for side, thread in enumerate((self.one, self.other)):
            self.ran[side].clear()
            where = None if at is None else self.pairs[at][side]
            with self.ids.of(side):
                results.append(await _outcome(act(thread, where)))
        assert results[1] == results[0]
        assert sorted(self.ran[1]) == sorted(self.ran[0])
        await self._pair()
        await self.compare()

    async def compare(self) -> None:
        """Compare every checkpoint that both have, and the newest."""
        assert await _newest(self.other) == await _newest(self.one)
        for one, other in self.pairs:
            states = [await t.on_ours.state(i) for t, i in ((self.one, one), (self.other, other))]
            assert _exactly(states[1]) == _exactly(states[0])

    async def retain(self) -> None:
        """Retain one of the threads by a random policy, twice."""
        self.one.clock.now += timedelta(hours=1)  # No read of before pins anything any longer.
        self.other.clock.now += timedelta(hours=1)
        policy = self._policy()
        before = {i: shown(await self.one.on_ours.state(i)) for i, _ in self.pairs}
        rest = await _newest(self.one)
        once = self.one.dump()
        for _ in range(2):
            once = self.one.dump()
            if policy is None:
                await self.one.do("prune", [self.one.thread_id])
            else:
                assert () == (await self.one.enforce(policy)).problems
        assert once == self.one.dump()
        rows = await self.one.rows()
        assert [] == dangling(rows)
        assert (set(), set()) == await self.one.orphans()
        listed = await self.one.rows(self.one.ours)
        assert [key_of(f) for f in rows if not is_carrier(f)] == [key_of(f) for f in listed]
        assert rest == await _newest(self.one)
        live = {key_of(f)[1] for f in rows}
        self.pairs = [pair for pair in self.pairs if pair[0] in live]
        for i, _ in self.pairs:
            assert before[i] == shown(await self.one.on_ours.state(i))
        await self.compare()

    async def _pair(self) -> None:
        new = []
        for thread in (self.one, self.other):
            ids = [key_of(f)[1] for f in await thread.rows(thread.ours) if not key_of(f)[0]]
            new.append([i for i in ids if i not in self.known])
        assert len(new[1]) == len(new[0])
        self.known.update(*new)
        self.pairs += zip(*new, strict=True)

    def _likely(self, chance: float) -> bool:
        return self.rng.random() < chance

    def _say(self) -> Any:
        mode = [m for m in MODES if self._likely(0.35)]
        given = {"mode": mode, "log": [f"u{self.told}"], "notes": [], "out": []}
        options: dict[str, Any] = {"durability": self.rng.choice(("sync", "async", "exit"))}
        if self._likely(0.2):
            stop = self.rng.choice(("interrupt_before", "interrupt_after"))
            options[stop] = [self.rng.choice(("plans", "works", "joins"))]
        return lambda thread, at: thread.on_ours.say(dict(given), at=at, **options)

    def _answer(self) -> Any:
        some, told = self._likely(0.5), self.told

        async def answer(thread: Retained, at: str | None) -> Any:
            asked = sorted((await thread.on_ours.state()).interrupts, key=lambda i: str(i.value))
            chosen = asked[: 1 if some else None]
            given: Any = Command(resume={i.id: f"{i.value} {told}" for i in chosen} or "nothing")
            return await thread.on_ours.say(given)

        return answer

    def _go_on(self) -> Any:
        # For an exit run that replays, LangGraph looks into subgraphs as of the parent instead.
        return lambda thread, at: thread.on_ours.say(None, at=at, durability="sync")

    def _update(self) -> Any:
        values, node = (
            {"log": [f"put in {self.told}"]},
            self.rng.choice(("plans", "works", "joins")),
        )
        return lambda thread, at: thread.on_ours.update(dict(values), at=at, as_node=node)

    def _policy(self) -> RetentionPolicy | None:
        if self._likely(0.3):
            return None
        siblings = timedelta(seconds=1) if self._likely(0.3) else None
        turns = self.rng.choice((1, 2, None))
        compacts = self._likely(0.4)
        return RetentionPolicy(
            keep_last_turns=turns, compact_supersteps=compacts, drop_siblings_after=siblings
        )


async def _newest(thread: Retained) -> Any:
    talk = thread.on_ours
    return _deep(await talk.call(talk.graph, "get_state", named(thread.thread_id), subgraphs=True))


def _deep(state: Any) -> Any:
    below = [_deep(t.state) for t in state.tasks if hasattr(t.state, "values")]
    return (*_exactly(state), below)


def _exactly(state: Any) -> Any:
    return (state.values, *timeless(state))


async def _outcome(running: Any) -> Any:
    """Return what a run said, or the kind of error that it ended with."""
    try:
        output = await running
    except Exception as error:
        return type(error)
    # Parallel nodes ask in any order. An update returns a config.
    return None if "configurable" in output else {**output, "__interrupt__": _asked(output)}


def _asked(output: Any) -> list[str]:
    return sorted(str(value) for value in said(output)["__interrupt__"])


@pytest.mark.parametrize("kind", ["memory", "sqlite", "pg"])
@pytest.mark.parametrize("seed", range(4))
async def test_a_retained_thread_is_not_told_from_one_that_is_not(
    kind: str,
    seed: int,
    tmp_path: Path,
    where: Where,
    thread_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: tuple[list[str], list[str]] = ([], [])
    (tmp_path / "other").mkdir()
    places = (where, Where(tmp_path / "other", where.find_postgres))
    async with AsyncExitStack() as stack:
        threads: list[Retained] = []
        for place, own in zip(places, ran, strict=True):
            builder = partial(_of_everything, ran=own)
            name = f"{thread_id}-{len(threads)}"  # Postgres is one place for both.
            opened = open_retained(kind, place, name, builder)
            threads.append(await stack.enter_async_context(opened))
        rng = random.Random(f"{kind} {seed}")
        story = _Story(threads[0], threads[1], ran, rng)
        if not releases.ORDERS_BY_TASK_PATH:
            story.ids.install(monkeypatch)
        for _ in range(3):
            for _ in range(3):
                await story.happen()
            await story.retain()
        await story.happen()
