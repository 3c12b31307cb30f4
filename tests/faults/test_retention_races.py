"""Runs and retention of one thread at the same time, in every order: nothing is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal

import pytest
from langgraph.graph import END, START, StateGraph

from retaining_saver import RetentionPolicy
from retaining_saver.errors import PlanRefused
from retaining_saver.pins import MemoryPins
from tests.support import graphs
from tests.support.interjections import Scripted, When, interject
from tests.support.leaves import aput_leaf, put_leaf
from tests.support.retained import Retained, is_carrier, key_of, open_two, shown
from tests.support.savers import Saver, Where
from tests.support.threads import dangling, face_of, named

SYNC_KINDS = ("memory", "sqlite", "pg")
STRICT = RetentionPolicy(keep_last_turns=1, compact_supersteps=True)


def _chat(mode: graphs.Mode) -> Callable[[Saver], Any]:
    return lambda saver: graphs.chat_graph(saver, mode)


async def _whole(thread: Retained, texts: list[str]) -> None:
    """Nothing dangles, nothing is orphaned, and every turn is in the newest state."""
    assert [] == dangling(await thread.rows())
    assert (set(), set()) == await thread.orphans()
    messages = (await thread.on_bare.state()).values["messages"]
    assert texts == [m.content for m in messages if m.type == "human"]
    assert 4 * len(texts) == len(messages)


async def _whole_at_last(thread: Retained, texts: list[str]) -> None:
    """The same, once writes have gone that came after their checkpoint had.

    LangGraph waits for a task's writes only where a delta channel needs them.
    """
    assert [] == dangling(await thread.rows())
    thread.clock.now += timedelta(hours=2)
    await thread.do("prune", [thread.thread_id])
    await _whole(thread, texts)


@pytest.mark.parametrize("mode", graphs.MODES)
@pytest.mark.parametrize(("effect", "when"), [("stored", "after"), ("apply", "after")])
@pytest.mark.parametrize("kind", [*SYNC_KINDS, "asqlite", "apg_pool"])
async def test_a_run_beside_an_enforcement_loses_nothing(
    kind: str, effect: str, when: When, mode: graphs.Mode, where: Where, thread_id: str
) -> None:
    async with open_two(kind, where, thread_id, _chat(mode)) as (a, b):
        for text in ("one", "two"):
            await a.on_ours.say(graphs.say(text))
        graph, config = b.builder(b.ours), named(thread_id)
        done = interject(
            a.backend,
            effect,
            when,
            lambda: graph.invoke(graphs.say("three"), config),
            lambda: graph.ainvoke(graphs.say("three"), config),
        )
        report = await a.enforce(STRICT)
        assert [effect] == done
        await _whole(a, ["one", "two", "three"])
        # Planned with what the run stored, or applied before it.
        turns = 3 if effect == "stored" else 2
        assert 4 * turns + turns == report.before.rows["checkpoints"]
        await b.on_ours.say(graphs.say("four"))
        await a.do("prune", [thread_id])
        await _whole(b, ["one", "two", "three", "four"])


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
@pytest.mark.parametrize("mode", graphs.MODES)
@pytest.mark.parametrize("kind", SYNC_KINDS)
async def test_a_thread_may_be_pruned_at_any_moment_of_a_run(
    kind: str,
    mode: graphs.Mode,
    durability: Literal["sync", "async", "exit"],
    where: Where,
    thread_id: str,
) -> None:
    """Before each checkpoint and each write that the run stores, all of the thread is pruned."""
    async with open_two(kind, where, thread_id, _chat(mode)) as (a, b):
        texts = ["one", "two"]
        for text in texts:
            await a.on_bare.say(graphs.say(text))
        effects = Scripted(b.bare, ("put", "put_writes"))
        effects.script = lambda _n, _name: a.ours.prune([thread_id])
        for text in ("three", "four"):
            texts.append(text)
            await b.on_ours.say(graphs.say(text), durability=durability)
        assert len(effects.effects) >= 2
        messages = (await a.on_bare.state()).values["messages"]
        assert texts == [m.content for m in messages if m.type == "human"]
        assert 4 * len(texts) == len({m.id for m in messages}) == len(messages)
        await _whole_at_last(a, texts)


@pytest.mark.parametrize("mode", graphs.MODES)
@pytest.mark.parametrize("kind", SYNC_KINDS)
async def test_a_run_from_an_older_checkpoint_keeps_it_from_other_workers(
    kind: str, mode: graphs.Mode, where: Where, thread_id: str
) -> None:
    """The workers share their pins; the run pins what it starts from."""
    async with open_two(kind, where, thread_id, _chat(mode), pins=MemoryPins()) as (a, b):
        await a.on_ours.say(graphs.say("one"))
        base = (await a.on_ours.state()).config["configurable"]["checkpoint_id"]
        await a.on_ours.say(graphs.say("two"))
        effects = Scripted(b.bare, ("put",))
        effects.script = lambda _n, _name: a.ours.prune([thread_id])
        await b.on_ours.say(graphs.say("another two"), at=base)
        assert effects.effects
        await _whole_at_last(a, ["one", "another two"])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", [*SYNC_KINDS, "asqlite", "apg_pool"])
async def test_two_workers_that_prune_at_once_prune_once(
    kind: str, when: When, where: Where, thread_id: str
) -> None:
    async with open_two(kind, where, thread_id, _chat("delta")) as (a, b):
        for text in ("one", "two", "three"):
            await a.on_ours.say(graphs.say(text))
        alone = await a.copied("alone")
        await alone.do("prune", [alone.thread_id])
        done = interject(
            a.backend,
            "apply",
            when,
            lambda: b.ours.prune([thread_id]),
            lambda: b.ours.aprune([thread_id]),
        )
        await a.do("prune", [thread_id])
        assert ["apply"] == done
        count = {table: len(rows) for table, rows in alone.dump().items()}
        assert count == {table: len(rows) for table, rows in a.dump().items()}
        await _whole(a, ["one", "two", "three"])


@pytest.mark.parametrize("durability", ["sync", "exit"])
@pytest.mark.parametrize("mode", graphs.MODES)
@pytest.mark.parametrize("kind", [*SYNC_KINDS, "apg_pool"])
async def test_a_run_that_has_read_a_leaf_loses_nothing_when_another_worker_drops_it(
    kind: str, mode: graphs.Mode, durability: str, where: Where, thread_id: str
) -> None:
    options = {"admission": "manual"}
    async with open_two(kind, where, thread_id, _chat(mode), **options) as (a, b):
        await a.on_bare.say(graphs.say("one"))
        face = face_of(kind)
        _, leaf = await face(put_leaf, aput_leaf, a.bare, thread_id, run_id="recorded")
        done = interject(
            b.bare,
            "put",
            "before",
            lambda: a.ours.prune([thread_id]),
            lambda: a.ours.aprune([thread_id]),
        )
        await b.on_ours.say(graphs.say("two"), durability=durability)
        assert ["put"] == done
        assert leaf not in {key_of(f)[1] for f in await a.rows()}
        await _whole(b, ["one", "two"])
        history = await b.do("run_history", named(thread_id))
        assert {"recorded": 7} == history.durations


# A thread that keeps changing


@pytest.mark.parametrize("kind", SYNC_KINDS)
async def test_a_thread_that_changes_three_times_in_a_row_is_left_alone(
    kind: str, where: Where, thread_id: str
) -> None:
    events: list[Any] = []
    async with open_two(kind, where, thread_id, _chat("delta"), hooks=[events.append]) as (a, b):
        await a.on_ours.say(graphs.say("one"))
        plain, calls = a.backend.stored, []

        def stored(*args: Any) -> Any:
            read = plain(*args)
            calls.append(read)
            b.builder(b.bare).invoke(graphs.say(f"turn {len(calls)}"), named(thread_id))
            return read

        a.backend.stored = stored
        with pytest.raises(PlanRefused, match="3 times in a row"):
            await a.do("enforce_thread_retention", thread_id, STRICT)
        assert 3 == len(calls)
        events.clear()
        await a.do("prune", [thread_id])
        assert [("Refused", "changing")] == [
            (type(e).__name__, e.outcome) for e in events if e.thread_id == thread_id
        ]
        texts = ["one", *(f"turn {n}" for n in range(1, 7))]
        assert 5 * len(texts) == len(await a.rows())  # Nothing was changed.
        await _whole(a, texts)
        a.backend.stored = plain
        await a.do("prune", [thread_id])
        await _whole(a, texts)
        assert 1 == len([f for f in await a.rows() if not is_carrier(f)])


# Many turns beside many prunes

TURNS = 200
POLICIES = (None, STRICT, RetentionPolicy(keep_last_turns=3))
"""In turn; ``None`` stands for a prune."""


def _log(mode: graphs.Mode) -> Callable[[Saver], Any]:
    def adds(state: Any) -> dict[str, Any]:
        return {"log": [f"seen-{len(state['log'])}"]}

    def builder(saver: Saver) -> Any:
        made = StateGraph(graphs.FullLog if mode == "full" else graphs.DeltaLog)
        made.add_node("adds", adds)
        made.add_edge(START, "adds")
        made.add_edge("adds", END)
        return made.compile(checkpointer=saver)

    return builder


@pytest.mark.parametrize("mode", graphs.MODES)
@pytest.mark.parametrize("kind", ["sqlite", "pg"])
async def test_two_hundred_turns_beside_a_loop_of_prunes_are_all_there(
    kind: str, mode: graphs.Mode, where: Where, thread_id: str
) -> None:
    async with open_two(kind, where, thread_id, _log(mode)) as (a, b):
        ended, rested = threading.Event(), threading.Semaphore(0)

        def prune() -> int:
            rounds = 0
            while not ended.wait(0.01):
                if policy := POLICIES[rounds % len(POLICIES)]:
                    with suppress(PlanRefused):  # The thread kept changing.
                        a.ours.enforce_thread_retention(thread_id, policy)
                else:
                    a.ours.prune([thread_id])
                rested.release()
                rounds += 1
            return rounds

        def talk() -> None:
            graph = b.builder(b.ours)
            try:
                for n in range(TURNS):
                    graph.invoke({"log": [f"said-{n}"]}, named(thread_id))
                    if n % 20 == 0:
                        # A thread that keeps changing is left alone: let one prune have its way.
                        while rested.acquire(blocking=False):
                            pass
                        for _ in range(2):  # The first may have begun before.
                            assert rested.acquire(timeout=60)
            finally:
                ended.set()

        with ThreadPoolExecutor(2) as pool:
            pruning, talking = pool.submit(prune), pool.submit(talk)
            talking.result(100)
            assert pruning.result(30) > 0
        assert [] == dangling(await a.rows())
        expected = [text for n in range(TURNS) for text in (f"said-{n}", f"seen-{2 * n + 1}")]
        assert expected == (await a.on_bare.state()).values["log"]
        stored = len(await a.rows())
        assert stored < 3 * TURNS
        newest = shown(await a.on_bare.state())
        a.clock.now += timedelta(hours=2)
        await a.do("prune", [thread_id])
        assert newest == shown(await b.on_ours.state())
        assert (set(), set()) == await a.orphans()
        assert len(await a.rows()) <= 2
