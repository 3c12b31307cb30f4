"""Runs and reads that name a checkpoint: it stays, or its absence is a loud error."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.checkpoint.base.id import uuid6
from langgraph.graph import END
from langgraph.types import Command

from retaining_saver import (
    CheckpointNotFoundError,
    CheckpointReclaimedError,
    MemoryPins,
    RetainingSaver,
)
from tests.support import graphs, releases
from tests.support.faces import Face
from tests.support.leaves import aput_leaf, put_leaf
from tests.support.savers import ONE_PER_BACKEND, Saver, Where, open_saver
from tests.support.threads import (
    Words,
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


@dataclass
class Desk:
    """A wrapped saver, a chat on it, and one thread."""

    face: Face
    saver: Saver
    ours: RetainingSaver
    graph: Any
    thread_id: str

    async def run(self, given: Any, checkpoint_id: str | None = None, **others: Any) -> Any:
        config = named(self.thread_id, checkpoint_id, **others)
        return await self.face(self.graph.invoke, self.graph.ainvoke, given, config)

    async def say(self, text: str, checkpoint_id: str | None = None, **others: Any) -> list[str]:
        done = await self.run(graphs.say(text), checkpoint_id, **others)
        return [m.id for m in done["messages"] if m.id.startswith("human")]

    async def leaf(self, run_id: str = "run-1") -> str:
        _, leaf_id = await self.face(put_leaf, aput_leaf, self.ours, self.thread_id, run_id=run_id)
        return leaf_id

    async def rows(self) -> list[CheckpointTuple]:
        return await stored(self.face, self.saver, self.thread_id)

    async def read(self, checkpoint_id: str | None = None, **others: Any) -> Any:
        config = named(self.thread_id, checkpoint_id, **others)
        return await self.face(self.ours.get_tuple, self.ours.aget_tuple, config)

    async def state(self, checkpoint_id: str | None = None) -> Any:
        config = named(self.thread_id, checkpoint_id)
        return await self.face(self.graph.get_state, self.graph.aget_state, config)

    async def update(self, values: Any, checkpoint_id: str | None = None, **options: Any) -> str:
        config = named(self.thread_id, checkpoint_id)
        updated = await self.face(
            self.graph.update_state, self.graph.aupdate_state, config, values, **options
        )
        made: str = updated["configurable"]["checkpoint_id"]
        return made

    async def admit(self, checkpoint_id: str | None = None, **others: Any) -> str:
        config = named(self.thread_id, checkpoint_id, **others)
        done = await self.face(self.ours.admit, self.ours.aadmit, config)
        return str(done.outcome)

    async def durations(self, config: RunnableConfig | None = None) -> dict[str, int]:
        ours = self.ours
        config = config or named(self.thread_id)
        history = await self.face(ours.run_history, ours.arun_history, config)
        return history.durations


@asynccontextmanager
async def _desk(kind: str, where: Where, **options: Any) -> AsyncIterator[Desk]:
    async with open_saver(kind, where) as saver:
        ours = RetainingSaver(saver, **options)
        graph = graphs.chat_graph(ours)
        yield Desk(face_of(kind), saver, ours, graph, str(uuid.uuid4()))


each_backend = pytest.mark.parametrize("kind", ONE_PER_BACKEND)


@pytest.mark.parametrize("admission", ["auto", "put"])
@each_backend
async def test_a_run_that_names_the_leaf_keeps_it_as_a_link(
    kind: str, admission: Any, where: Where
) -> None:
    async with _desk(kind, where, admission=admission) as desk:
        await desk.say("a")
        leaf_id = await desk.leaf()
        assert ["human-a", "human-b"] == await desk.say("b", leaf_id)
        rows = await desk.rows()
        assert leaf_id in [parent_id(row) for row in rows]
        assert leaf_id in metadata_only(rows)
        assert leaf_id == (await desk.read(leaf_id)).checkpoint["id"]
        assert "no_leaf" == await desk.admit()
        assert {"run-1": 7} == await desk.durations()
        # It is history now, as good a starting point as any other checkpoint.
        assert ["human-a", "human-c"] == await desk.say("c", leaf_id)
        assert [] == dangling(await desk.rows())


@each_backend
async def test_a_named_leaf_stays_for_as_long_as_the_pin_says(kind: str, where: Where) -> None:
    now = [datetime(2030, 1, 1, tzinfo=timezone.utc)]
    pins = MemoryPins(ttl=timedelta(minutes=1))
    async with _desk(kind, where, pins=pins, clock=lambda: now[0]) as desk:
        await desk.say("a")
        leaf_id = await desk.leaf()
        assert "pinned" == await desk.admit(leaf_id)
        assert "pinned" == await desk.admit()
        now[0] += timedelta(seconds=59)
        assert "pinned" == await desk.admit()
        now[0] += timedelta(seconds=1)
        assert "reclaimed" == await desk.admit()


@each_backend
async def test_ids_of_a_checkpoint_map_are_pinned(kind: str, where: Where) -> None:
    async with _desk(kind, where) as desk:
        await desk.say("a")
        leaf_id = await desk.leaf()
        assert "pinned" == await desk.admit(checkpoint_map={"": leaf_id})
        assert "pinned" == await desk.admit()
        assert ["human-a", "human-b"] == await desk.say("b", checkpoint_map={"": leaf_id})
        assert leaf_id in ids(await desk.rows())


@each_backend
async def test_a_run_from_the_leafs_parent_still_cleans_up_at_its_second_read(
    kind: str, where: Where
) -> None:
    # An explicit run reads "latest" once more, without the id, to learn where the thread is.
    async with _desk(kind, where) as desk:
        await desk.say("a")
        head = (await desk.read()).checkpoint["id"]
        leaf_id = await desk.leaf()
        assert ["human-a", "human-b"] == await desk.say("b", head)
        rows = await desk.rows()
        assert leaf_id not in ids(rows)
        assert {"run-1": 7} == await desk.durations()
        assert [] == dangling(rows)


@pytest.mark.parametrize("mode", graphs.MODES)
@each_backend
async def test_forks_equal_those_of_the_bare_saver(
    kind: str, mode: graphs.Mode, where: Where
) -> None:
    face = face_of(kind)
    async with open_saver(kind, where) as saver:
        ours = RetainingSaver(saver)
        told = []
        for on in (saver, ours):
            graph = graphs.chat_graph(on, mode)
            desk = Desk(face, saver, ours, graph, str(uuid.uuid4()))
            await desk.say("a")
            at_rest = root(await desk.rows())[-1].checkpoint["id"]
            before_search = root(await desk.rows())[-3].checkpoint["id"]
            skipped = []
            for step, (text, checkpoint_id) in enumerate(
                [("b", None), ("c", at_rest), (None, before_search), ("d", None), ("e", at_rest)]
            ):
                given = None if text is None else graphs.say(text)
                await desk.run(given, checkpoint_id)
                if on is ours:
                    await desk.leaf(f"run-{step}")
            rows = await desk.rows()
            skipped = metadata_only(rows)
            left = 1 if releases.EXPLICIT_RUNS_READ_THE_HEAD else 4
            assert on is saver or left == len(skipped)
            assert [] == dangling(rows)
            told.append(story(rows, but=skipped))
    assert told[0] == told[1]


@each_backend
async def test_replaying_a_waiting_checkpoint_equals_the_bare_savers(
    kind: str, where: Where
) -> None:
    face = face_of(kind)
    async with open_saver(kind, where) as saver:
        ours = RetainingSaver(saver)
        told, done = [], []
        for on in (saver, ours):
            graph = graphs.asking_graph(on)
            desk = Desk(face, saver, ours, graph, str(uuid.uuid4()))
            await desk.run({"log": ["u"]})
            waiting = root(await desk.rows())[-1].checkpoint["id"]
            await desk.run(Command(resume="q"))
            if on is ours:
                await desk.leaf()
            words = Words()
            done.append(words.of(await desk.run(None, waiting)))
            done.append(words.of(await desk.run(Command(resume="other"), waiting)))
            rows = await desk.rows()
            told.append(story(rows, but=metadata_only(rows)))
    assert done[:2] == done[2:]
    assert told[0] == told[1]


@each_backend
async def test_an_update_on_a_leaf_gives_the_same_state(kind: str, where: Where) -> None:
    async with _desk(kind, where) as desk:
        await desk.say("a")
        leaf_id = await desk.leaf()
        made = await desk.update(graphs.say("more"))
        state = await desk.state()
        assert made == state.config["configurable"]["checkpoint_id"]
        assert "human-more" == state.values["messages"][-1].id
        rows = await desk.rows()
        assert [] == dangling(rows)
        assert {"run-1": 7} == await desk.durations()
        assert leaf_id not in ids(rows) or leaf_id in [parent_id(row) for row in rows]
        assert ["human-a", "human-more", "human-b"] == await desk.say("b")
        assert [] == dangling(await desk.rows())


@each_backend
async def test_an_update_on_an_older_checkpoint_forks(kind: str, where: Where) -> None:
    async with _desk(kind, where) as desk:
        await desk.say("a")
        head = (await desk.read()).checkpoint["id"]
        await desk.leaf()
        await desk.say("b")
        await desk.leaf("run-2")
        made = await desk.update(graphs.say("c"), head, as_node="conclude")
        rows = await desk.rows()
        assert head == next(parent_id(row) for row in rows if row.checkpoint["id"] == made)
        values = (await desk.state()).values["messages"]
        assert ["human-a", "human-c"] == [m.id for m in values if m.id.startswith("human")]
        assert [] == dangling(rows)
        assert {"run-1": 7} == await desk.durations()


@each_backend
async def test_an_empty_update_on_a_leaf_keeps_the_id_that_it_returned(
    kind: str, where: Where
) -> None:
    # It repeats its parent's versions, and copies the metadata of a head that records runs.
    async with _desk(kind, where) as desk:
        await desk.say("a")
        await desk.leaf()
        for values, as_node in (({}, "conclude"), (None, END)):
            made = await desk.update(values, as_node=as_node)
            assert made == (await desk.state()).config["configurable"]["checkpoint_id"]
            assert "no_leaf" == await desk.admit()
            assert made == (await desk.read(made)).checkpoint["id"]
        assert [] == dangling(await desk.rows())


@each_backend
async def test_a_copy_of_a_checkpoint_is_a_fork_and_stays(kind: str, where: Where) -> None:
    async with _desk(kind, where) as desk:
        await desk.say("a")
        await desk.leaf()
        head = (await desk.read()).checkpoint["id"]
        made = await desk.update(None, head, as_node="__copy__")
        copied = await desk.read(made)
        assert "fork" == copied.metadata["source"]
        assert "no_leaf" == await desk.admit()
        assert made in ids(await desk.rows())
        assert ["human-a", "human-b"] == await desk.say("b")
        assert made in ids(await desk.rows())
        assert [] == dangling(await desk.rows())


@pytest.mark.parametrize("mode", graphs.MODES)
@each_backend
async def test_commands_on_a_leaf_equal_those_without(
    kind: str, mode: graphs.Mode, where: Where
) -> None:
    face = face_of(kind)
    async with open_saver(kind, where) as saver:
        ours = RetainingSaver(saver)
        told, done = [], []
        for on in (saver, ours):
            graph = graphs.chat_graph(on, mode)
            desk = Desk(face, saver, ours, graph, str(uuid.uuid4()))
            await desk.say("a")
            for command in (
                Command(update=graphs.say("more")),
                Command(update=graphs.say("again"), goto="plan"),
            ):
                if on is ours:
                    await desk.leaf()
                done.append(await desk.run(command))
            rows = await desk.rows()
            assert [] == dangling(rows)
            told.append(story(rows, but=metadata_only(rows)))
    assert done[:2] == done[2:]
    assert told[0] == told[1]


@each_backend
async def test_a_read_of_a_reclaimed_id_names_the_heir(kind: str, where: Where) -> None:
    async with _desk(kind, where) as desk:
        await desk.say("a")
        head = (await desk.read()).checkpoint["id"]
        leaf_id = await desk.leaf()
        assert "reclaimed" == await desk.admit()
        for fresh in (False, True):
            if fresh:  # Another process, which knows only what is stored.
                desk.ours = RetainingSaver(desk.saver)
                desk.graph = graphs.chat_graph(desk.ours)
            for ask in (desk.read(leaf_id), desk.state(leaf_id), desk.say("b", leaf_id)):
                with pytest.raises(CheckpointReclaimedError) as caught:
                    await ask
                assert (desk.thread_id, leaf_id, head) == (
                    caught.value.thread_id,
                    caught.value.leaf_id,
                    caught.value.parent_id,
                )
        assert [head] == [root(await desk.rows())[-1].checkpoint["id"]]


@each_backend
async def test_a_run_from_an_unknown_id_is_refused_where_there_are_others(
    kind: str, where: Where
) -> None:
    unknown = str(uuid.uuid4())
    async with _desk(kind, where) as desk:
        await desk.say("a")
        before = ids(await desk.rows())
        with pytest.raises(CheckpointNotFoundError, match=unknown):
            await desk.say("b", unknown)
        assert before == ids(await desk.rows())


@each_backend
async def test_a_run_from_an_unknown_id_starts_a_thread_that_has_none(
    kind: str, where: Where
) -> None:
    async with _desk(kind, where) as desk:
        assert ["human-a"] == await desk.say("a", str(uuid.uuid4()))
        assert ["human-a", "human-b"] == await desk.say("b")


@each_backend
async def test_a_read_of_an_unknown_id_finds_nothing(kind: str, where: Where) -> None:
    async with _desk(kind, where) as desk:
        unknown = str(uuid.uuid4())
        assert await desk.read(unknown) is None
        await desk.say("a")
        assert await desk.read(unknown) is None


@each_backend
async def test_on_the_bare_saver_a_run_from_a_gone_id_loses_the_conversation(
    kind: str, where: Where
) -> None:
    async with open_saver(kind, where) as saver:
        ours = RetainingSaver(saver)
        graph = graphs.chat_graph(saver)
        desk = Desk(face_of(kind), saver, ours, graph, str(uuid.uuid4()))
        await desk.say("a")
        assert ["human-b"] == await desk.say("b", str(uuid.uuid4()))
        assert ["human-b", "human-c"] == await desk.say("c")


@pytest.mark.parametrize("source", ["fork", "update"])
@pytest.mark.parametrize("through", ["the wrapper", "the bare saver"])
@each_backend
async def test_a_copy_with_a_leafs_metadata_is_no_leaf(
    kind: str, through: str, source: str, where: Where
) -> None:
    # Whoever put it was given its id. A fork may even record a run of its own.
    async with _desk(kind, where) as desk:
        await desk.say("a")
        leaf = await desk.read(await desk.leaf())
        metadata = {**leaf.metadata, "source": source}
        if source == "fork":
            metadata["run_durations"] = {"run-1": 7, "run-2": 7}
        else:
            metadata.pop("writes", None)
        checkpoint = {**leaf.checkpoint, "id": str(uuid6())}
        on: Saver = desk.ours if through == "the wrapper" else desk.saver
        args: tuple[Any, ...] = (leaf.config, checkpoint, metadata, {})
        put = await desk.face(on.put, on.aput, *args)
        assert checkpoint["id"] == put["configurable"]["checkpoint_id"]
        assert "no_leaf" == await desk.admit()
        await desk.say("b")
        rows = await desk.rows()
        assert checkpoint["id"] in ids(rows)
        assert [] == dangling(rows)
