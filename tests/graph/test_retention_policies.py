"""Every policy on threads of every shape: nothing that stays is changed, and runs go on as before.

Histories are real runs on the bare saver. A copy is retained; the thread and other copies of it
are left alone, to compare with.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
from langgraph.graph import START, StateGraph
from langgraph.types import Command

from retaining_saver import RetentionPolicy
from retaining_saver.planned import RetentionPlan
from tests.support import graphs, releases
from tests.support.faces import faces_of
from tests.support.histories import HISTORIES, History, Talk
from tests.support.retained import (
    Key,
    Retained,
    Seen,
    is_carrier,
    key_of,
    lines,
    open_retained,
    said,
    shown,
    timeless,
)
from tests.support.savers import Saver, Where
from tests.support.threads import dangling, named

HOUR = timedelta(hours=1)


# Threads of more shapes


async def _stopped_at_breakpoints(talk: Talk) -> None:
    for n in range(3):
        await talk.say(graphs.say(f"turn-{n}"))
        await talk.say(None)
    await talk.say(graphs.say("stopped"))


async def _regenerated(talk: Talk) -> None:
    """Two runs from one checkpoint at a time: their ids alternate."""
    await talk.say(graphs.say("one"))
    await talk.say(graphs.say("two"))
    base = await talk.at_rest()
    for texts in (("three", "three again"), ("four", "four again")):
        await _alternate(talk, base, texts)
        base = await talk.at_rest()


async def _alternate(talk: Talk, base: str, texts: Iterable[str]) -> None:
    config: Any = named(talk.thread_id, base)
    options: Any = {"durability": "sync"}
    if faces_of(talk.kind)[-1].name == "async":
        runs = [talk.graph.astream(graphs.say(text), config, **options) for text in texts]
        while runs:
            runs = [run for run in runs if await anext(run, None) is not None]
        return

    def blocking() -> None:
        runs = [talk.graph.stream(graphs.say(text), config, **options) for text in texts]
        while runs:
            runs = [run for run in runs if next(run, None) is not None]

    await asyncio.to_thread(blocking)


async def _exit_subgraphs(talk: Talk) -> None:
    for n in range(4):
        await talk.say({"log": [f"u{n}"]}, durability="exit")


async def _exit_questions(talk: Talk) -> None:
    for n in range(3):
        await talk.say({"log": [f"u{n}"]}, durability="exit")
        await talk.say(Command(resume=f"a{n}"), durability="exit")
    await talk.say({"log": ["last"]}, durability="exit")


async def _left_failed(talk: Talk) -> None:
    await talk.say({"log": ["u0"]})
    BROKEN.set()
    try:
        for text in ("u1", "u2"):
            with pytest.raises(RuntimeError):
                await talk.say({"log": [text]})
    finally:
        BROKEN.clear()


async def _forked_deltas(talk: Talk) -> None:
    for n in range(3):
        await talk.say({"log": [f"u{n}"], "notes": [f"n{n}"]})
    middle = (await talk.ids())[5]
    await talk.say({"log": ["f"], "notes": []}, at=middle)
    fork = await talk.at_rest()
    await talk.leaf("on the fork")
    await talk.say({"log": ["g"], "notes": []}, at=middle)
    await talk.update({"log": ["put in"], "notes": ["too"]}, as_node="last")
    await talk.say({"log": ["h"], "notes": []}, at=fork)


async def _commanded(talk: Talk) -> None:
    await talk.say(graphs.say("one"))
    await talk.say(Command(update=graphs.say("put in"), goto="conclude"))
    await talk.say(graphs.say("two"))
    await talk.say(graphs.say("three"))
    await talk.update(graphs.say("put in again"), as_node="search")


async def _raw(talk: Talk) -> None:
    for n in range(7):
        await talk.say([f"u{n}"])


async def _migrated(talk: Talk, **options: Any) -> None:
    """Turn a channel into a delta channel: its last plain value is what the deltas rest on."""
    before = replace(talk, graph=graphs.chat_graph(talk.saver, "full"))
    for n in range(2):
        await before.say(graphs.say(f"full-{n}"), **options)
    await talk.say(graphs.say("delta"), **options)


async def _exit_migrated(talk: Talk) -> None:
    await _migrated(talk, durability="exit")


def _stopping(mode: graphs.Mode) -> Callable[[Saver], Any]:
    return lambda saver: graphs.chat_graph(saver, mode, interrupt_before=["search"])


def _chat(mode: graphs.Mode) -> Callable[[Saver], Any]:
    return lambda saver: graphs.chat_graph(saver, mode)


BROKEN = threading.Event()
"""While it is set, the last node of the failing graph fails."""


def _failing(saver: Saver) -> Any:
    def end(state: Any) -> Any:
        if BROKEN.is_set():
            raise RuntimeError("this node fails while the test says so")
        return {"log": ["end"]}

    builder = StateGraph(graphs.DeltaLog)
    builder.add_node("works", lambda state: {"log": ["p"]})
    builder.add_node("fails", end)
    builder.add_edge(START, "works")
    builder.add_edge("works", "fails")
    return builder.compile(checkpointer=saver)


def _asking(mode: graphs.Mode) -> Callable[[Saver], Any]:
    return lambda saver: graphs.asking_graph(saver, mode)


def _subgraphs(mode: graphs.Mode) -> Callable[[Saver], Any]:
    return lambda saver: graphs.subgraph_graph(saver, mode, ask=False)


_SAID = (graphs.say("and now"), graphs.say("and then"))
_LOGGED = ({"log": ["v"], "notes": ["m"]}, {"log": ["w"], "notes": []})
_ANSWERED: tuple[Any, ...] = (Command(resume="later"), {"log": ["more"]})

MORE = [
    *(
        History(f"breakpoints-{m}", _stopping(m), _stopped_at_breakpoints, (None, _SAID[0]))
        for m in graphs.MODES
    ),
    *(History(f"regenerated-{m}", _chat(m), _regenerated, _SAID) for m in graphs.MODES),
    *(
        History(f"exit-subgraphs-{m}", _subgraphs(m), _exit_subgraphs, ({"log": ["v"]},))
        for m in graphs.MODES
    ),
    *(History(f"exit-questions-{m}", _asking(m), _exit_questions, _ANSWERED) for m in graphs.MODES),
    *(History(f"commands-{m}", _chat(m), _commanded, (None, *_SAID)) for m in graphs.MODES),
    History("migrated", _chat("delta"), _migrated, _SAID),
    History("exit-migrated", _chat("delta"), _exit_migrated, _SAID),
    History("failed", _failing, _left_failed, (None, {"log": ["more"]})),
    History("forked-deltas", graphs.two_delta_graph, _forked_deltas, _LOGGED),
]
if releases.KEEPS_RAW_INPUT:
    MORE.append(History("raw", graphs.raw_pregel, _raw, (["v"], ["w"])))

POLICIES: dict[str, RetentionPolicy] = {
    "annotations": RetentionPolicy(),
    "one turn": RetentionPolicy(keep_last_turns=1),
    "two turns, leaves too": RetentionPolicy(keep_last_turns=2, drop_annotations=False),
    "heads": RetentionPolicy(keep_last_turns=0, delete_idle_after=30 * HOUR),
    "where": RetentionPolicy(keep_where={"step": 5}),
    "compacted": RetentionPolicy(compact_supersteps=True),
    "siblings": RetentionPolicy(drop_siblings_after=HOUR),
    "all rules": RetentionPolicy(
        keep_last_turns=1,
        keep_where={"step": 3},
        keep_within=HOUR,
        drop_siblings_after=HOUR,
        compact_supersteps=True,
        delete_idle_after=30 * HOUR,
    ),
}


# What holds of every policy on every thread


@dataclass(frozen=True)
class Before:
    """A thread before retention."""

    thread: Retained
    seen: dict[Key, Seen]
    lines: dict[Key, list[str]]
    states: dict[str, Any]
    newest: Any
    orphans: tuple[set[Key], set[tuple[str, ...]]]

    @classmethod
    async def of(cls, thread: Retained) -> Before:
        seen = await thread.seen(thread.bare)
        talk = thread.on_bare
        return cls(
            thread,
            seen,
            lines(await thread.rows()),
            await thread.states(talk, (i for ns, i in seen if not ns)),
            shown(await talk.state()),
            await thread.orphans(),
        )

    def heads(self) -> set[Key]:
        """The newest checkpoint of every namespace that outlives a call, under leaves."""
        newest: dict[str, Key] = {}
        for key, found in self.seen.items():
            if ":" not in key[0] and not found.is_leaf:
                newest[key[0]] = max(key, newest.get(key[0], key))
        return set(newest.values())


async def _retain(before: Before, copy: Retained, name: str) -> RetentionPlan:
    """Apply a policy, twice, after a dry run; check all that users may rely on."""
    policy = POLICIES[name]
    # What is cached before retention must not be read after it.
    cached = await copy.seen(copy.ours)
    assert before.seen == cached, name
    plan: RetentionPlan = await copy.do("plan_thread_retention", copy.thread_id, policy)
    untouched = copy.dump()
    dry = await copy.enforce(policy, dry_run=True)
    assert untouched == copy.dump(), name
    real = await copy.enforce(policy)
    assert replace(dry, dry_run=False) == real, name
    assert plan.drop == real.dropped, name
    assert () == real.problems, name
    once = copy.dump()
    again = await copy.enforce(policy)
    assert ((), (), ()) == (again.dropped, again.grafted, again.carried), name
    assert real.after == again.before == again.after, name
    assert once == copy.dump(), name
    await _check(before, copy, plan, name)
    return plan


async def _check(before: Before, copy: Retained, plan: RetentionPlan, name: str) -> None:
    rows = await copy.rows()
    assert [] == dangling(rows), name
    writes, blobs = await copy.orphans()
    assert writes <= before.orphans[0], name
    assert blobs <= before.orphans[1], name
    kept = before.seen.keys() - {(e.checkpoint_ns, e.checkpoint_id) for e in plan.drop}
    assert before.heads() <= kept, name
    moved_to = {g.parent_id for g in plan.graft if g.moves_writes}
    for saver in (copy.bare, copy.ours):
        after = await copy.seen(saver)
        assert kept == after.keys(), name
        for key, found in after.items():
            expected = before.seen[key]
            if key[1] in moved_to:
                expected = replace(expected, pending=found.pending)
            assert expected == found, (name, key)
    root = [i for ns, i in kept if not ns]
    assert {i: before.states[i] for i in root} == await copy.states(copy.on_ours, root), name
    for talk in (copy.on_bare, copy.on_ours):
        assert before.newest == shown(await talk.state()), name
    carriers = {key_of(f)[1] for f in rows if is_carrier(f)}
    for key, line in lines(rows).items():
        if key in kept:
            expected_line = [i for i in before.lines[key] if (key[0], i) in kept]
            assert expected_line == [i for i in line if i not in carriers], (name, key)


async def _goes_on(before: Before, copy: Retained, twin: Retained, later: Any, name: str) -> None:
    """Run both on: from the head, from older checkpoints, and one of those again."""
    one, other = copy.on_ours, twin.on_bare
    kept = sorted(i for ns, i in (await copy.seen(copy.bare)) if not ns)
    for given in later:
        assert said(await other.say(given)) == said(await one.say(given)), name
        assert timeless(await other.state()) == timeless(await one.state()), name
    unfinished = [i for i in kept if before.states[i][1]]
    for given, at in [(later[-1], kept[0]), (None, unfinished[0] if unfinished else None)]:
        if at is not None:
            assert said(await other.say(given, at=at)) == said(await one.say(given, at=at)), name
            assert timeless(await other.state()) == timeless(await one.state()), (name, at)
    assert [] == dangling(await copy.rows()), name


EVERY = [*HISTORIES, *MORE]


# Memory sees every shape; the databases those in which their tables differ most.
SQLITE = (
    "leaves-delta",
    "regenerated-delta",
    "calls-delta",
    "exit-subgraphs-delta",
    "commands-",
    "migrated",
)
POSTGRES = (
    *SQLITE,
    "exit-migrated",
    "exit-leaves",
    "forks-full",
    "exit-questions-delta",
    "forked-",
    "raw",
)
ASYNC = ("forked-deltas", "calls-delta")


def _cases() -> list[tuple[str, History]]:
    chosen = {"sqlite": SQLITE, "pg": POSTGRES, "asqlite": ASYNC, "apg_pool": ASYNC}
    return [
        *(("memory", h) for h in EVERY),
        *((kind, h) for kind, names in chosen.items() for h in EVERY if h.name.startswith(names)),
    ]


@pytest.mark.parametrize(("kind", "history"), _cases(), ids=str)
async def test_what_a_policy_keeps_is_as_it_was_and_goes_on_as_before(
    kind: str, history: History, where: Where, thread_id: str
) -> None:
    async with open_retained(kind, where, thread_id, history.graph) as thread:
        await history.live(thread.on_bare)
        before = await Before.of(thread)
        for number, name in enumerate(POLICIES):
            copy = await thread.copied(f"{number}")
            plan = await _retain(before, copy, name)
            if plan.drop:
                twin = await thread.copied(f"{number}-twin")
                await _goes_on(before, copy, twin, history.later, name)
