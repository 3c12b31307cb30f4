"""What each rule of a policy keeps and drops of real threads, pins included."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from langgraph.types import Command

from retaining_saver import RetentionPolicy
from retaining_saver.errors import CheckpointNotFoundError
from tests.support import graphs, releases
from tests.support.histories import BY_NAME
from tests.support.retained import Retained, is_carrier, key_of, open_retained, shown
from tests.support.savers import Saver, Where
from tests.support.threads import named, parent_id

KINDS = ("memory", "sqlite", "pg")
HOUR = timedelta(hours=1)
MONTH = timedelta(days=30)
each_kind = pytest.mark.parametrize("kind", KINDS)


def _chat(mode: graphs.Mode) -> Callable[[Saver], Any]:
    return lambda saver: graphs.chat_graph(saver, mode)


def _asking(saver: Saver) -> Any:
    return graphs.asking_graph(saver)


async def _ids(thread: Retained) -> list[str]:
    """List what is stored of the root namespace, but carriers; oldest first."""
    return [key_of(f)[1] for f in await thread.rows() if not key_of(f)[0] and not is_carrier(f)]


async def _turns(thread: Retained, count: int = 4, **options: Any) -> list[list[str]]:
    """Let a chat have turns; return the ids that each of them added."""
    turns: list[list[str]] = []
    known: set[str] = set()
    for n in range(count):
        await thread.on_bare.say(graphs.say(f"turn-{n}"), run_id=f"run-{n}", **options)
        turns.append([i for i in await _ids(thread) if i not in known])
        known.update(turns[-1])
    return turns


@pytest.mark.parametrize("mode", graphs.MODES)
@each_kind
async def test_the_newest_turns_stay_with_the_checkpoint_they_started_from(
    kind: str, mode: graphs.Mode, where: Where, thread_id: str
) -> None:
    async with open_retained(kind, where, thread_id, _chat(mode)) as thread:
        turns = await _turns(thread)
        report = await thread.enforce(RetentionPolicy(keep_last_turns=2))
        expected = [turns[1][-1], *turns[2], *turns[3]]
        assert expected == await _ids(thread)
        assert {*turns[0], *turns[1][:-1]} == {e.checkpoint_id for e in report.dropped}
        assert {"expired"} == {e.reason for e in report.dropped}


@each_kind
async def test_turns_that_store_only_their_ends_are_told_apart(
    kind: str, where: Where, thread_id: str
) -> None:
    async with open_retained(kind, where, thread_id, _chat("delta")) as thread:
        turns = await _turns(thread, durability="exit")
        await thread.enforce(RetentionPolicy(keep_last_turns=2))
        assert [turns[1][-1], *turns[2], *turns[3]] == await _ids(thread)


@each_kind
async def test_turns_stay_for_as_long_as_they_are_young(
    kind: str, where: Where, thread_id: str
) -> None:
    async with open_retained(kind, where, thread_id, _chat("delta")) as thread:
        turns = await _turns(thread)
        made = {key_of(f)[1]: f.checkpoint["ts"] for f in await thread.rows()}
        ended = datetime.fromisoformat(made[turns[1][-1]])
        policy = RetentionPolicy(keep_within=HOUR)
        # The second turn is exactly an hour old one microsecond later.
        thread.clock.now = ended + HOUR - timedelta(microseconds=1)
        await thread.enforce(policy)
        assert [turns[0][-1], *turns[1], *turns[2], *turns[3]] == await _ids(thread)
        thread.clock.now = ended + HOUR
        await thread.enforce(policy)
        assert [turns[1][-1], *turns[2], *turns[3]] == await _ids(thread)
        thread.clock.now += MONTH
        await thread.enforce(policy)
        assert [turns[3][-1]] == await _ids(thread)


@each_kind
async def test_turns_stay_whose_metadata_is_looked_for(
    kind: str, where: Where, thread_id: str
) -> None:
    async with open_retained(kind, where, thread_id, _chat("delta")) as thread:
        turns = await _turns(thread)
        await thread.enforce(RetentionPolicy(keep_where={"run_id": "run-1"}))
        assert [turns[0][-1], *turns[1], turns[3][-1]] == await _ids(thread)


@each_kind
async def test_of_older_turns_only_the_checkpoint_at_rest_stays(
    kind: str, where: Where, thread_id: str
) -> None:
    async with open_retained(kind, where, thread_id, _chat("delta")) as thread:
        turns = await _turns(thread)
        policy = RetentionPolicy(compact_supersteps=True)
        await thread.enforce(policy)
        expected = [*(turn[-1] for turn in turns[:3]), *turns[3]]
        assert expected == await _ids(thread)
        await thread.on_ours.say(graphs.say("one more"))
        await thread.enforce(policy)
        assert [turn[-1] for turn in turns] == (await _ids(thread))[:4]


@each_kind
async def test_rules_add_up(kind: str, where: Where, thread_id: str) -> None:
    async with open_retained(kind, where, thread_id, _chat("delta")) as thread:
        turns = await _turns(thread, 5)
        policy = RetentionPolicy(
            keep_last_turns=2, keep_where={"run_id": "run-1"}, compact_supersteps=True
        )
        await thread.enforce(policy)
        matching = turns[1]  # A compacted turn keeps the checkpoints that it is kept for.
        expected = [turns[0][-1], *matching, turns[2][-1], turns[3][-1], *turns[4]]
        assert expected == await _ids(thread)


async def _regenerated(thread: Retained) -> tuple[list[str], list[str], list[str]]:
    """Answer once, and twice again from the same checkpoint; return the ids of each."""
    await thread.on_bare.say(graphs.say("one"))
    base = await _ids(thread)
    branches: list[list[str]] = []
    for text in ("two", "two again", "two a third time"):
        before = set(await _ids(thread))
        await thread.on_bare.say(graphs.say(text), at=base[-1])
        branches.append([i for i in await _ids(thread) if i not in before])
    return branches[0], branches[1], base


@pytest.mark.parametrize("mode", graphs.MODES)
@each_kind
async def test_old_branches_off_the_main_line_go(
    kind: str, mode: graphs.Mode, where: Where, thread_id: str
) -> None:
    async with open_retained(kind, where, thread_id, _chat(mode)) as thread:
        one, two, _ = await _regenerated(thread)
        made = {key_of(f)[1]: f.checkpoint["ts"] for f in await thread.rows()}
        every = await _ids(thread)
        policy = RetentionPolicy(drop_siblings_after=HOUR)
        thread.clock.now = datetime.fromisoformat(made[one[-1]]) + HOUR
        report = await thread.enforce(policy)
        assert set(one) == {e.checkpoint_id for e in report.dropped}
        assert {"sibling"} == {e.reason for e in report.dropped}
        thread.clock.now += MONTH
        await thread.enforce(policy)
        assert [i for i in every if i not in {*one, *two}] == await _ids(thread)


@each_kind
async def test_a_branch_that_waits_or_is_pinned_stays(
    kind: str, where: Where, thread_id: str
) -> None:
    async with open_retained(kind, where, thread_id, _asking) as thread:
        await thread.on_bare.say({"log": ["one"]})
        await thread.on_bare.say(Command(resume="a"))
        base = (await _ids(thread))[-1]
        for text in ("asks", "is pinned", "goes", "main"):
            await thread.on_bare.say({"log": [text]}, at=base)
            if text != "asks":
                await thread.on_bare.say(Command(resume=text))
        tips = {}
        parents = {parent_id(f) for f in await thread.rows()}
        for f in await thread.rows():
            if key_of(f)[1] not in parents:
                tips[(await thread.on_bare.state(key_of(f)[1])).values["log"][3]] = key_of(f)[1]
        assert {"asks", "is pinned", "goes", "main"} == set(tips)
        await thread.do("pin", named(thread_id, tips["is pinned"]), ttl=None)
        question = shown(await thread.on_bare.state(tips["asks"]))
        assert {"goes"} == set(tips) - await _surviving(thread, tips, drop_siblings_after=HOUR)
        assert question == shown(await thread.on_ours.state(tips["asks"]))
        assert ["which?"] == [i.value for i in question[3]]


async def _surviving(thread: Retained, tips: dict[str, str], **rules: Any) -> set[str]:
    await thread.enforce(RetentionPolicy(**rules))
    stored = await _ids(thread)
    return {text for text, i in tips.items() if i in stored}


# Pins


@pytest.mark.parametrize("name", ["forks-delta", "calls-delta", "two-deltas", "leaves-full"])
@each_kind
async def test_a_pinned_checkpoint_survives_everything_but_deletion(
    kind: str, name: str, where: Where, thread_id: str
) -> None:
    history = BY_NAME[name]
    async with open_retained(kind, where, thread_id, history.graph) as thread:
        await history.live(thread.on_bare)
        every = await _ids(thread)
        pinned = every[len(every) // 2]
        before = shown(await thread.on_bare.state(pinned))
        fork = await thread.copied("twin")
        expected = await _forked(fork.on_bare, history.later[-1], pinned)
        await thread.do("pin", named(thread_id, pinned), ttl=None)
        for policy in (
            RetentionPolicy(keep_last_turns=1, compact_supersteps=True, drop_siblings_after=HOUR),
            RetentionPolicy(keep_last_turns=0, delete_idle_after=HOUR, delete_waiting=True),
        ):
            await thread.enforce(policy)
            assert before == shown(await thread.on_ours.state(pinned)), policy
        await thread.do("prune", [thread_id])
        assert before == shown(await thread.on_ours.state(pinned))
        assert before == shown(await thread.on_bare.state(pinned))
        # A pinned leaf keeps what it annotates; nothing else of the root namespace stays.
        assert {pinned, every[-1]} <= {*await _ids(thread), *_unless_leaf(name, every)}
        assert len(await _ids(thread)) < len(every) / 2
        await thread.do("unpin", named(thread_id, pinned))
        again = await thread.copied("again")
        assert expected == await _forked(again.on_ours, history.later[-1], pinned)
        await thread.do("prune", [thread_id])
        assert pinned not in await _ids(thread)
        await thread.do("pin", named(thread_id), ttl=None)
        await thread.do("prune", [thread_id], strategy="delete")
        assert [] == await _ids(thread)
        assert [] == await thread.do("pins", thread_id)


def _unless_leaf(name: str, every: list[str]) -> set[str]:
    return {every[-1]} if name.startswith("leaves") else set()


async def _forked(talk: Any, given: Any, at: str) -> Any:
    output = await talk.say(given, at=at)
    return {**output, "__interrupt__": [i.value for i in output.get("__interrupt__", ())]}


@each_kind
async def test_a_pin_that_expired_holds_nothing(kind: str, where: Where, thread_id: str) -> None:
    async with open_retained(kind, where, thread_id, _chat("full")) as thread:
        turns = await _turns(thread, 2)
        await thread.do("pin", named(thread_id, turns[0][-1]), ttl=HOUR)
        await thread.do("prune", [thread_id])
        assert [turns[0][-1], turns[1][-1]] == await _ids(thread)
        thread.clock.now += HOUR
        await thread.do("prune", [thread_id])
        assert [turns[1][-1]] == await _ids(thread)


# Idle threads


@pytest.mark.parametrize("name", ["questions-delta", "calls-full"])
@each_kind
async def test_an_idle_thread_goes_whole_unless_it_waits(
    kind: str, name: str, where: Where, thread_id: str
) -> None:
    history = BY_NAME[name]
    async with open_retained(kind, where, thread_id, history.graph) as waits:
        await history.live(waits.on_bare)
        rests = await waits.copied("rests")
        await rests.on_bare.say(Command(resume="the last answer"))
        gone = RetentionPolicy(delete_idle_after=10 * HOUR)
        kept = waits.dump()
        assert () == (await rests.enforce(gone)).dropped
        waits.clock.now += MONTH
        everything = {(e.checkpoint_ns, e.checkpoint_id) for e in await _entries(rests)}
        dry = await rests.enforce(gone, dry_run=True)
        report = await rests.enforce(gone)
        assert dry.after == report.after
        assert everything == {(e.checkpoint_ns, e.checkpoint_id) for e in report.dropped}
        assert [] == [row for rows in rests.dump().values() for row in rows]
        assert () == (await waits.enforce(gone)).dropped
        assert kept == waits.dump()
        await waits.enforce(RetentionPolicy(delete_idle_after=10 * HOUR, delete_waiting=True))
        assert [] == [row for rows in waits.dump().values() for row in rows]


async def _entries(thread: Retained) -> Any:
    return (await thread.do("plan_thread_retention", thread.thread_id, RetentionPolicy())).keep


@pytest.mark.parametrize("interrupts", ["interrupt_before", "interrupt_after"])
@each_kind
async def test_a_thread_at_a_breakpoint_waits(
    kind: str, interrupts: str, where: Where, thread_id: str
) -> None:
    options: dict[str, Any] = {interrupts: ["search"]}

    def builder(saver: Saver) -> Any:
        return graphs.chat_graph(saver, "delta", **options)

    async with open_retained(kind, where, thread_id, builder) as thread:
        await thread.on_bare.say(graphs.say("stops"))
        thread.clock.now += MONTH
        await thread.enforce(RetentionPolicy(delete_idle_after=HOUR))
        assert (await thread.on_ours.state()).next
        await thread.on_ours.say(None)
        thread.clock.now += MONTH
        await thread.enforce(RetentionPolicy(delete_idle_after=HOUR))
        assert [] == await _ids(thread)


# Threads without links


@each_kind
async def test_a_thread_whose_links_were_lost_is_never_guessed_at(
    kind: str, where: Where, thread_id: str
) -> None:
    """An import that kept no parents: every checkpoint stands alone."""
    async with open_retained(kind, where, thread_id, _chat("full")) as thread:
        await _turns(thread, 3)
        every = await _ids(thread)
        for i in every:
            thread.set_parent(i, None)
        states = await thread.states(thread.on_bare, every)
        strict = RetentionPolicy(keep_last_turns=1, compact_supersteps=True)
        for policy in (RetentionPolicy(), strict):
            assert () == (await thread.enforce(policy)).problems
            kept = await _ids(thread)
            assert every[-1] in kept
            assert {i: states[i] for i in kept} == await thread.states(thread.on_ours, kept)
            assert (set(), set()) == await thread.orphans()
        await thread.do("prune", [thread_id])
        assert [every[-1]] == await _ids(thread)
        assert states[every[-1]] == shown(await thread.on_ours.state())
        said = await thread.on_ours.say(graphs.say("and on"))
        assert len(states[every[-1]][0]["messages"]) + 4 == len(said["messages"])


# Links that a run has written its turn onto


@each_kind
async def test_forks_from_where_a_links_writes_went_equal_those_of_an_untouched_twin(
    kind: str, where: Where, thread_id: str
) -> None:
    history = BY_NAME["exit-leaves-delta"]
    async with open_retained(kind, where, thread_id, history.graph) as thread:
        await history.live(thread.on_bare)
        twin = await thread.copied("twin")
        report = await thread.enforce(RetentionPolicy())
        moved = [g.parent_id for g in report.grafted if g.moves_writes]
        assert moved
        for at in moved:
            read = [await talk.state(at) for talk in (twin.on_bare, thread.on_ours)]
            assert read[0].values == read[1].values
            if not releases.SNAPSHOTS_BRANCHES:
                continue  # Older releases read the writes that moved there into the fork.
            for durability in ("sync", "exit"):
                outputs = [
                    await talk.say(graphs.say("fork"), at=at, durability=durability)
                    for talk in (twin.on_bare, thread.on_ours)
                ]
                assert outputs[0] == outputs[1]
                states = [await talk.state() for talk in (twin.on_bare, thread.on_ours)]
                assert states[0].values == states[1].values == outputs[0]


# Carriers


@each_kind
async def test_a_carrier_is_never_offered_as_a_checkpoint(
    kind: str, where: Where, thread_id: str
) -> None:
    async with open_retained(kind, where, thread_id, graphs.two_delta_graph) as thread:
        for n in range(4):
            await thread.on_bare.say({"log": [f"{n}"], "notes": []})
        await thread.do("prune", [thread_id])
        carriers = [key_of(f)[1] for f in await thread.rows() if is_carrier(f)]
        assert 1 == len(carriers)
        shown_ids = {key_of(f)[1] for f in await thread.rows(thread.ours)}
        assert set(await _ids(thread)) == shown_ids
        for read in ("get_tuple", "pin"):
            with pytest.raises(CheckpointNotFoundError):
                await thread.do(read, named(thread_id, carriers[0]))
        with pytest.raises(CheckpointNotFoundError):
            await thread.on_ours.say({"log": ["x"], "notes": []}, at=carriers[0])


@each_kind
async def test_a_copied_head_keeps_what_was_carried(
    kind: str, where: Where, thread_id: str
) -> None:
    """A ``__copy__`` update is put onto the head's parent, which is a carrier now."""
    async with open_retained(kind, where, thread_id, graphs.two_delta_graph) as thread:
        for n in range(4):
            await thread.on_bare.say({"log": [f"{n}"], "notes": []})
        twin = await thread.copied("twin")
        await thread.do("prune", [thread_id])
        for talk in (thread.on_ours, twin.on_bare):
            await talk.update(None, as_node="__copy__")
            await talk.say({"log": ["on"], "notes": []})
        states = [await talk.state() for talk in (twin.on_bare, thread.on_ours)]
        expected, found = (releases.in_told_order(state.values) for state in states)
        assert expected == found
