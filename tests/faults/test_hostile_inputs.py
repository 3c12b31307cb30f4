"""Metadata, ids and configs that nobody should write: runs go on as on the bare saver."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.memory import InMemorySaver

from retaining_saver import MemoryPins, RetainingSaver
from tests.support import graphs
from tests.support.leaves import put_leaf
from tests.support.savers import Saver, Where, open_saver
from tests.support.threads import named, story

KINDS = ("memory", "sqlite", "pg")
THREAD_IDS = (
    "a'b",
    "%s %(thread)s",
    "; DROP TABLE checkpoints; --",
    'quoted "name"',
    "back\\slash",
    "new\nline",
    "é" * 600,
    " ",
    "*?[]{}:|",
)
UNSTORABLE = ("with\x00nul", "lone \ud800 surrogate")


@pytest.mark.parametrize("thread_id", THREAD_IDS)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_thread_id_is_only_a_name(kind: str, thread_id: str, empty_where: Where) -> None:
    async with open_saver(kind, empty_where) as bare:
        saver = RetainingSaver(bare)
        for name in (thread_id, "bystander"):
            graphs.chat_graph(saver).invoke(graphs.say("a"), named(name))
            put_leaf(saver, name, run_id="one")
        saver.pin(saver.record_run(named("bystander"), "two", duration=7))
        bystander = story(bare.list(named("bystander")))
        assert "reclaimed" == saver.admit(named(thread_id)).outcome
        assert {"one": 7} == saver.run_history(named(thread_id)).durations
        saver.pin(named(thread_id))
        assert [thread_id] == [pin.thread_id for pin in saver.pins(thread_id)]
        saver.delete_thread(thread_id)
        assert [] == list(bare.list(named(thread_id)))
        assert [] == saver.pins(thread_id)
        assert bystander == story(bare.list(named("bystander")))


@pytest.mark.parametrize("thread_id", UNSTORABLE, ids=ascii)
@pytest.mark.parametrize("kind", KINDS)
async def test_what_cannot_name_a_thread_fails_as_on_the_bare_saver(
    kind: str, thread_id: str, empty_where: Where
) -> None:
    async with open_saver(kind, empty_where) as bare:
        ours = RetainingSaver(bare)
        config = named(thread_id)
        expected = _outcome(lambda: graphs.chat_graph(bare).invoke(graphs.say("a"), config))
        bare_again = _outcome(lambda: bare.delete_thread(thread_id))
        assert expected == _outcome(lambda: graphs.chat_graph(ours).invoke(graphs.say("a"), config))
        assert bare_again == _outcome(lambda: ours.delete_thread(thread_id))
        assert ours.admit(config).outcome in ("no_leaf", "delete_failed")
        assert 0 == len(ours._locks)


def _outcome(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as error:
        return type(error).__name__
    return "done"


NAMES = ("kind", "id", "added", "folded", "reclaimed", "entries", "run_durations", "run_id", "a")


def _junk(rng: random.Random, depth: int = 0) -> Any:
    plain = [None, True, False, 0, 1.5, -3, 2**40, "", "x", "run-1", "\u2028"]
    choice = rng.random()
    if depth > 2 or choice < 0.5:
        return rng.choice(plain)
    if choice < 0.7:
        return [_junk(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return {rng.choice(NAMES): _junk(rng, depth + 1) for _ in range(rng.randint(0, 4))}


def _mark(rng: random.Random, checkpoint_id: str) -> dict[str, Any]:
    """A mark that is right in some places."""
    names: list[Any] = [None, {}, {"run_durations": ["r"]}, {"run_durations": [None, 1, {}]}, [1]]
    folded = {"id": checkpoint_id, "entries": rng.choice(names)}
    right: dict[str, Any] = {
        "kind": rng.choice(["duration", "carrier"]),
        "id": checkpoint_id,
        "added": rng.choice(names),
        "whole": True,
        "folded": folded,
        "reclaimed": rng.choice([["x"], "abc", [None, {"a": 2}], {"a": 1}]),
    }
    return {k: v if rng.random() < 0.7 else _junk(rng) for k, v in right.items()}


def _metadata(rng: random.Random, checkpoint_id: str) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "source": rng.choice(["update", "update", "loop", "fork", None, 5, ["x"]]),
        "step": 1,
        "parents": {},
        "retention": rng.choice([_mark(rng, checkpoint_id), _junk(rng)]),
        "run_durations": rng.choice([_junk(rng), {"r": 3}, {"r": None}, {"": 1}]),
        "run_message_ids": rng.choice([_junk(rng), {"m": "r"}]),
        "writes": rng.choice([_junk(rng), {"runtime_run_duration": _junk(rng)}]),
    }
    return {k: v for k, v in metadata.items() if k in ("step", "parents") or rng.random() < 0.7}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
async def test_no_metadata_stop_a_run_or_a_record(kind: str, seed: int, where: Where) -> None:
    rng = random.Random(seed)
    async with open_saver(kind, where) as bare:
        ours = RetainingSaver(bare, hooks=())
        for _ in range(12):
            thread_id = str(uuid6())
            graphs.chat_graph(bare).invoke(graphs.say("a"), named(thread_id))
            for _ in range(rng.randint(1, 3)):
                _put_copy(rng.choice([bare, ours]), bare, thread_id, rng)
            ours.record_run(named(thread_id), "recorded", duration=9)
            assert 9 == ours.run_history(named(thread_id)).durations["recorded"]
            assert ours.admit(named(thread_id)).outcome in (
                "reclaimed",
                "no_leaf",
                "superseded",
                "versions_differ",
            )
            assert 9 == ours.run_history(named(thread_id)).durations["recorded"]
            list(ours.list(named(thread_id)))
            done = graphs.chat_graph(ours).invoke(graphs.say("b"), named(thread_id))
            assert 8 == len(done["messages"])


def _put_copy(saver: Saver, bare: Saver, thread_id: str, rng: random.Random) -> None:
    head = bare.get_tuple(named(thread_id))
    assert head is not None
    checkpoint = copy.deepcopy(head.checkpoint)
    checkpoint["id"] = str(uuid6())
    metadata: Any = _metadata(rng, checkpoint["id"])
    saver.put(named(thread_id, head.checkpoint["id"]), checkpoint, metadata, {})


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpoint_id": None},
        {"checkpoint_id": "not a uuid"},
        {"checkpoint_id": 5},
        {"checkpoint_ns": None},
        {"checkpoint_ns": "some:subgraph"},
    ],
    ids=str,
)
@pytest.mark.parametrize("body", [{}, {"id": "0"}, {"channel_versions": {"messages": 3}}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_put_with_an_odd_config_ends_as_on_the_bare_saver(
    kind: str, body: dict[str, Any], changes: dict[str, Any], where: Where
) -> None:
    ends = []
    async with open_saver(kind, where) as bare:
        for saver in (bare, RetainingSaver(bare)):
            thread_id = str(uuid6())
            graphs.chat_graph(bare).invoke(graphs.say("a"), named(thread_id))
            ends.append(_put_and_go_on(saver, thread_id, changes, body))
    assert ends[0] == ends[1]


def _put_and_go_on(
    saver: Saver, thread_id: str, changes: dict[str, Any], body: dict[str, Any]
) -> tuple[str, ...]:
    head = saver.get_tuple(named(thread_id))
    assert head is not None
    config: Any = {"configurable": {**head.config["configurable"], **changes}}
    checkpoint: Any = {**head.checkpoint, "id": str(uuid6()), **body}
    metadata: Any = {"source": "update", "step": 1, "parents": {}, "run_durations": {"r": 1}}
    graph = graphs.chat_graph(saver)
    return (
        _outcome(lambda: saver.put(config, checkpoint, metadata, {})),
        _outcome(lambda: graph.get_state(named(thread_id))),
        _outcome(lambda: graph.invoke(graphs.say("b"), named(thread_id))),
        str(len(graph.get_state(named(thread_id)).values.get("messages") or ())),
    )


@pytest.mark.parametrize("answer", [True, 1, {"a": 1}, ["x"], object()], ids=type)
async def test_a_classifier_that_answers_no_text_recognises_nothing(answer: Any) -> None:
    saver = RetainingSaver(InMemorySaver(), classify=lambda metadata: answer)
    graphs.chat_graph(saver).invoke(graphs.say("a"), named("thread"))
    put_leaf(saver, "thread")
    head = saver.get_tuple(named("thread"))
    assert head is not None
    assert "retention" not in head.metadata


def test_a_pin_for_longer_than_time_goes_is_for_ever() -> None:
    saver = RetainingSaver(InMemorySaver(), pins=MemoryPins(ttl=timedelta.max))
    graph = graphs.chat_graph(saver)
    graph.invoke(graphs.say("a"), named("thread"))
    leaf = saver.record_run(named("thread"), "one", duration=7)
    done = graph.invoke(graphs.say("b"), leaf)
    assert 8 == len(done["messages"])
    assert [None] == [pin.expires_at for pin in saver.pins("thread")]
    assert saver.pin(leaf, ttl=timedelta.max).expires_at is None


def test_a_clock_that_goes_backwards_stops_nothing() -> None:
    times = iter([datetime(2030, 1, 1, tzinfo=timezone.utc)] * 3)
    early = datetime(2020, 1, 1, tzinfo=timezone.utc)
    saver = RetainingSaver(InMemorySaver(), clock=lambda: next(times, early))
    graph = graphs.chat_graph(saver)
    graph.invoke(graphs.say("a"), named("thread"))
    for n in range(3):
        saver.record_run(named("thread"), f"run-{n}", duration=n)
        assert "reclaimed" == saver.admit(named("thread")).outcome
    assert {"run-0": 0, "run-1": 1, "run-2": 2} == saver.run_history(named("thread")).durations


TOO_DEEP: Any = "bottom"
for _ in range(200):
    TOO_DEEP = {"in": TOO_DEEP}
CYCLE: dict[str, Any] = {}
CYCLE["again"] = CYCLE
REFUSED: list[tuple[Any, type[Exception]]] = [
    (None, TypeError),
    ([("a", 1)], TypeError),
    ({}, ValueError),
    ({"a": object()}, TypeError),
    ({"a": {1, 2}}, TypeError),
    ({("a",): 1}, TypeError),
    ({"a": float("nan")}, ValueError),
    ({"a": "\x00"}, ValueError),
    ({"\ud800": 1}, ValueError),
    ({"a": 2**63}, ValueError),
    ({"a": [{"b": -(2**70)}]}, ValueError),
    ({"a": TOO_DEEP}, ValueError),
    (CYCLE, ValueError),
    ({"source": "loop"}, ValueError),
    ({"retention": {}}, ValueError),
]


class Untouched(InMemorySaver):
    """A saver that must not be asked for anything."""

    def get_tuple(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("The arguments were to be refused before any I/O.")


@pytest.mark.parametrize(("metadata", "error"), REFUSED, ids=lambda value: repr(value)[:20])
async def test_what_cannot_be_recorded_is_refused_before_any_io(
    metadata: Any, error: type[Exception]
) -> None:
    saver = RetainingSaver(Untouched())
    with pytest.raises(error):
        saver.annotate(named("thread"), metadata)
    with pytest.raises(error):
        await saver.aannotate(named("thread"), metadata)


@pytest.mark.parametrize(
    ("run_id", "options", "error"),
    [
        (None, {"duration": 1}, TypeError),
        (5, {"duration": 1}, TypeError),
        ("", {"duration": 1}, ValueError),
        ("r", {"duration": True}, TypeError),
        ("r", {"duration": 1.5}, TypeError),
        ("r", {"duration": -1}, ValueError),
        ("r", {"duration": 2**63}, ValueError),
        ("r", {}, ValueError),
        ("r", {"message_ids": "abc"}, TypeError),
        ("r", {"message_ids": [None]}, TypeError),
        ("r", {"message_ids": [""]}, ValueError),
        ("r\x00", {"duration": 1}, ValueError),
    ],
)
async def test_a_run_that_cannot_be_recorded_is_refused_before_any_io(
    run_id: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    saver = RetainingSaver(Untouched())
    with pytest.raises(error):
        saver.record_run(named("thread"), run_id, **options)
    with pytest.raises(error):
        await saver.arecord_run(named("thread"), run_id, **options)


@pytest.mark.parametrize(
    ("ttl", "error"),
    [(5, TypeError), (True, TypeError), ("5", TypeError), (timedelta(0), ValueError)],
    ids=str,
)
async def test_a_ttl_that_is_no_duration_is_refused_before_any_io(
    ttl: Any, error: type[Exception]
) -> None:
    saver = RetainingSaver(Untouched())
    with pytest.raises(error):
        saver.pin(named("thread"), ttl=ttl)
    with pytest.raises(error):
        await saver.apin(named("thread"), ttl=ttl)


async def test_a_clock_without_a_time_zone_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="aware"):
        RetainingSaver(InMemorySaver(), clock=lambda: datetime(2026, 1, 2))  # noqa: DTZ001  # Asked.
