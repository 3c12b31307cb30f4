"""A thread that waits goes on waiting for the same answer, whoever records what on top of it."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.checkpoint.base.id import uuid6
from langgraph.types import Command

from retaining_saver import RetainingSaver
from tests.support import graphs
from tests.support.faces import Face
from tests.support.leaves import aput_leaf, put_leaf
from tests.support.savers import ONE_PER_BACKEND, Saver, Where, open_saver
from tests.support.threads import (
    dangling,
    face_of,
    ids,
    metadata_only,
    named,
    parent_id,
    root,
    stored,
    story,
)

DURABILITIES = ("sync", "async", "exit")

Build = Callable[..., Any]


def _static_before(saver: Any, mode: graphs.Mode, ran: list[str]) -> Any:
    return graphs.chat_graph(saver, mode, interrupt_before=["search"])


def _static_after(saver: Any, mode: graphs.Mode, ran: list[str]) -> Any:
    return graphs.chat_graph(saver, mode, interrupt_after=["plan"])


def _asking(saver: Any, mode: graphs.Mode, ran: list[str]) -> Any:
    return graphs.asking_graph(saver, mode, ran=ran)


def _failing(saver: Any, mode: graphs.Mode, ran: list[str]) -> Any:
    return graphs.failing_graph(saver, mode, ran=ran)


def _subgraphs(saver: Any, mode: graphs.Mode, ran: list[str]) -> Any:
    return graphs.subgraph_graph(saver, mode)


@dataclass(frozen=True)
class Wait:
    """How a thread comes to wait, and how it goes on."""

    build: Build
    given: Any
    answer: Any
    fails: bool = False

    def __str__(self) -> str:
        return self.build.__name__.strip("_")


WAITS = [
    Wait(_asking, {"log": ["u"]}, Command(resume="q")),
    Wait(_subgraphs, {"log": ["u"]}, Command(resume="q")),
    Wait(_static_before, graphs.say("hi"), None),
    Wait(_static_after, graphs.say("hi"), None),
    Wait(_failing, {"log": ["u"]}, None, fails=True),
]


@dataclass
class Thread:
    """A thread on one saver. ``ran`` has what its nodes appended to it."""

    face: Face
    saver: Saver
    wait: Wait
    mode: graphs.Mode
    durability: str
    thread_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    ran: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.graph = self.wait.build(self.saver, self.mode, self.ran)

    async def start(self) -> None:
        if not self.wait.fails:
            await self._run(self.wait.given)
            return
        with pytest.raises(RuntimeError, match="fails once"):
            await self._run(self.wait.given)

    async def go_on(self) -> Any:
        return await self._run(self.wait.answer)

    async def _run(self, given: Any) -> Any:
        graph = self.graph
        return await self.face(
            graph.invoke,
            graph.ainvoke,
            given,
            named(self.thread_id),
            durability=self.durability,
        )

    async def waits_for(self) -> Any:
        graph = self.graph
        state = await self.face(graph.get_state, graph.aget_state, named(self.thread_id))
        asked = [i.value for i in state.interrupts]
        done = sorted(task.name for task in state.tasks if task.result is not None)
        return state.next, asked, done

    async def record(self, saver: Saver, run_id: str) -> None:
        await self.face(put_leaf, aput_leaf, saver, self.thread_id, run_id=run_id)

    async def rows(self, saver: Saver) -> list[CheckpointTuple]:
        return await stored(self.face, saver, self.thread_id)


@pytest.mark.parametrize("durability", DURABILITIES)
@pytest.mark.parametrize("wait", WAITS, ids=str)
@pytest.mark.parametrize("mode", graphs.MODES)
@pytest.mark.parametrize("kind", ONE_PER_BACKEND)
async def test_what_is_recorded_while_a_thread_waits_changes_nothing(
    kind: str, mode: graphs.Mode, wait: Wait, durability: str, where: Where
) -> None:
    face = face_of(kind)
    async with open_saver(kind, where) as saver:
        ours = RetainingSaver(saver)
        bare = Thread(face, saver, wait, mode, durability)
        wrapped = Thread(face, ours, wait, mode, durability)
        await bare.start()
        await wrapped.start()
        waiting = await bare.waits_for()
        assert () != waiting[0]
        for run_id in ("one", "two"):
            await wrapped.record(ours, run_id)
            assert waiting == await wrapped.waits_for()
        assert [] == metadata_only(await wrapped.rows(saver))
        assert await bare.go_on() == await wrapped.go_on()
        history = await face(ours.run_history, ours.arun_history, named(wrapped.thread_id))
        expected, found = await bare.rows(saver), await wrapped.rows(saver)
    assert sorted(bare.ran) == sorted(wrapped.ran)
    assert {"one": 7, "two": 7} == history.durations
    assert story(expected) == story(found)


@pytest.mark.parametrize("admits", [True, False], ids=["by hand", "by the run"])
@pytest.mark.parametrize("durability", DURABILITIES)
@pytest.mark.parametrize("wait", WAITS, ids=str)
@pytest.mark.parametrize("mode", graphs.MODES)
@pytest.mark.parametrize("kind", ["memory", "asqlite", "pg"])
async def test_a_leaf_that_hides_a_waiting_thread_is_taken_away_before_the_run_reads(
    kind: str, mode: graphs.Mode, wait: Wait, durability: str, admits: bool, where: Where
) -> None:
    face = face_of(kind)
    async with open_saver(kind, where) as saver:
        ours = RetainingSaver(saver)
        bare = Thread(face, saver, wait, mode, durability)
        wrapped = Thread(face, ours, wait, mode, durability)
        await bare.start()
        await wrapped.start()
        waiting = await bare.waits_for()
        await wrapped.record(saver, "one")
        await wrapped.record(saver, "two")
        assert 2 == len(metadata_only(await wrapped.rows(saver)))
        if admits:
            done = await face(ours.admit, ours.aadmit, named(wrapped.thread_id))
            assert "reclaimed" == done.outcome
            assert waiting == await wrapped.waits_for()
        assert await bare.go_on() == await wrapped.go_on()
        history = await face(ours.run_history, ours.arun_history, named(wrapped.thread_id))
        expected, found = await bare.rows(saver), await wrapped.rows(saver)
    assert sorted(bare.ran) == sorted(wrapped.ran)
    assert {"one": 7, "two": 7} == history.durations
    assert story(expected) == story(found)


@pytest.mark.parametrize("mode", graphs.MODES)
@pytest.mark.parametrize("kind", ONE_PER_BACKEND)
async def test_on_the_bare_saver_a_leaf_hides_the_question(
    kind: str, mode: graphs.Mode, where: Where
) -> None:
    # If a later release of LangGraph looks below the head, this is where it shows.
    async with open_saver(kind, where) as saver:
        thread = Thread(face_of(kind), saver, WAITS[0], mode, "sync")
        await thread.start()
        assert ["which?"] == (await thread.waits_for())[1]
        await thread.record(saver, "one")
        assert [] == (await thread.waits_for())[1]
        await thread.go_on()
    assert ["asks", "asks", "works", "works"] == sorted(thread.ran)


@pytest.mark.parametrize("kind", ONE_PER_BACKEND)
async def test_a_question_withdrawn_by_an_update_stays_withdrawn(kind: str, where: Where) -> None:
    # The update writes a checkpoint with its parent's versions: only what was seen differs.
    face = face_of(kind)
    async with open_saver(kind, where) as saver:
        ours = RetainingSaver(saver)
        wrapped = Thread(face, ours, WAITS[2], "full", "sync")
        await wrapped.start()
        await wrapped.record(ours, "one")
        graph = wrapped.graph
        config = named(wrapped.thread_id)
        await face(graph.update_state, graph.aupdate_state, config, None, as_node="__end__")
        assert ((), [], []) == await wrapped.waits_for()
        before = ids(await wrapped.rows(saver))
        done = await face(ours.admit, ours.aadmit, config)
        assert "no_leaf" == done.outcome
        assert before == ids(await wrapped.rows(saver))
        assert ((), [], []) == await wrapped.waits_for()


@pytest.mark.parametrize("kind", ONE_PER_BACKEND)
async def test_threads_that_went_on_reclaim_as_ever(kind: str, where: Where) -> None:
    face = face_of(kind)
    async with open_saver(kind, where) as saver:
        ours = RetainingSaver(saver)
        wrapped = Thread(face, ours, WAITS[0], "full", "sync")
        await wrapped.start()
        await wrapped.go_on()
        await wrapped.record(ours, "one")
        assert 1 == len(metadata_only(await wrapped.rows(saver)))
        await wrapped.start()
        rows = await wrapped.rows(saver)
    assert [] == metadata_only(rows)
    assert [] == dangling(rows)


@pytest.mark.parametrize("durability", DURABILITIES)
@pytest.mark.parametrize("kind", ["memory", "asqlite", "pg"])
async def test_at_put_a_leaf_that_tasks_ran_from_stays(
    kind: str, durability: str, where: Where
) -> None:
    # Ids of tasks and namespaces of subgraphs were made of its id. It becomes a link.
    face = face_of(kind)
    async with open_saver(kind, where) as saver:
        ours = RetainingSaver(saver, admission="put")
        wrapped = Thread(face, ours, WAITS[2], "full", durability)
        await wrapped.start()
        await wrapped.record(saver, "one")
        leaf_id = root(await wrapped.rows(saver))[-1].checkpoint["id"]
        await wrapped.go_on()
        rows = await wrapped.rows(saver)
    assert [leaf_id] == metadata_only(rows)
    assert leaf_id in [parent_id(row) for row in rows]
    assert [] == dangling(rows)


@pytest.mark.parametrize("through", ["the wrapper", "the bare saver"])
@pytest.mark.parametrize("kind", ONE_PER_BACKEND)
async def test_a_record_that_differs_in_what_nodes_saw_is_state(
    kind: str, through: str, where: Where
) -> None:
    # It has its parent's versions, and answers the question by saying that it was seen.
    face = face_of(kind)
    async with open_saver(kind, where) as saver:
        ours = RetainingSaver(saver)
        wrapped = Thread(face, ours, WAITS[2], "full", "sync")
        await wrapped.start()
        head = root(await wrapped.rows(saver))[-1]
        checkpoint = {
            **head.checkpoint,
            "id": str(uuid6()),
            "versions_seen": {
                **head.checkpoint["versions_seen"],
                "search": {"branch:to:search": head.checkpoint["channel_versions"]["messages"]},
            },
        }
        metadata: Any = {
            **head.metadata,
            "source": "update",
            "run_durations": {"one": 7},
            "writes": {"runtime_run_duration": {"run_id": "one", "duration": 7}},
        }
        on: Saver = ours if through == "the wrapper" else saver
        args: tuple[Any, ...] = (head.config, checkpoint, metadata, {})
        await face(on.put, on.aput, *args)
        done = await face(ours.admit, ours.aadmit, named(wrapped.thread_id))
        # Postgres drops the application's marker: nothing claims to be a leaf there.
        assert ("no_leaf" if "pg" in kind else "versions_differ") == done.outcome
        newest = root(await wrapped.rows(saver))[-1]
    assert checkpoint["id"] == newest.checkpoint["id"]
    assert checkpoint["versions_seen"] == newest.checkpoint["versions_seen"]
    assert "retention" not in newest.metadata
