"""The wrapper in the wrapped saver's place: savers of any class, their attributes, their clones."""

from __future__ import annotations

import asyncio
import copy
import inspect
import uuid
import warnings
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
)
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver

from retaining_saver import (
    CheckpointReclaimedError,
    Reclaimed,
    RetainingSaver,
    UnsupportedSaverError,
)
from tests.support import graphs
from tests.support.leaves import aput_leaf, put_leaf
from tests.support.savers import KINDS, ONE_PER_BACKEND, Where, open_saver
from tests.support.threads import (
    dangling,
    face_of,
    metadata_only,
    named,
    stored,
    story,
)

Base = BaseCheckpointSaver[Any]


class ForeignSaver(Base):
    """A saver of a class that nobody has an adapter for."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = InMemorySaver()

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        return self.rows.get_tuple(config)

    def list(self, config: RunnableConfig | None, **options: Any) -> Iterator[CheckpointTuple]:
        return self.rows.list(config, **options)

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        return self.rows.put(config, checkpoint, metadata, new_versions)

    def put_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        self.rows.put_writes(config, writes, task_id, task_path)

    def delete_thread(self, thread_id: str) -> None:
        self.rows.delete_thread(thread_id)

    def get_next_version(self, current: Any, channel: None) -> str:
        return self.rows.get_next_version(current, channel)


class SaverWithoutTaskPath(InMemorySaver):
    """A saver from before ``put_writes`` took a task path."""

    def put_writes(  # type: ignore[override]  # It is older than the base class.
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str
    ) -> None:
        super().put_writes(config, writes, task_id)

    async def aput_writes(  # type: ignore[override]  # It is older than the base class.
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str
    ) -> None:
        super().put_writes(config, writes, task_id)


def _converse(saver: Base, recorder: Base | None, turns: int = 3) -> tuple[str, list[Any]]:
    thread_id = str(uuid.uuid4())
    graph = graphs.chat_graph(saver)
    told = []
    for turn in range(turns):
        told.append(graph.invoke(graphs.say(f"turn {turn}"), named(thread_id)))
        if recorder is not None:
            put_leaf(recorder, thread_id, run_id=f"run {turn}")
    return thread_id, told


def test_a_saver_of_an_unknown_class_works_as_before_with_one_warning() -> None:
    foreign = ForeignSaver()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = RetainingSaver(foreign)
        thread_id, told = _converse(ours, ours)
        assert "unsupported" == ours.admit(named(thread_id)).outcome
    assert 1 == len(caught)
    assert "test_drop_in.ForeignSaver" in str(caught[0].message)
    assert __file__ == caught[0].filename
    bare = ForeignSaver()
    bare_id, expected = _converse(bare, bare)
    assert expected == told
    assert story(bare.list(named(bare_id))) == story(foreign.list(named(thread_id)))


def test_what_needs_rows_is_refused_without_an_adapter() -> None:
    with pytest.warns(UserWarning, match="nothing is reclaimed"):
        ours = RetainingSaver(ForeignSaver())
    thread_id, _ = _converse(ours, None, 1)
    for ask in (
        lambda: ours.run_history(named(thread_id)),
        lambda: ours.record_run(named(thread_id), "run", duration=1),
        lambda: ours.annotate(named(thread_id), {"title": "t"}),
    ):
        with pytest.raises(UnsupportedSaverError, match="ForeignSaver"):
            ask()


def test_pins_work_without_an_adapter() -> None:
    with pytest.warns(UserWarning, match="nothing is reclaimed"):
        ours = RetainingSaver(ForeignSaver())
    thread_id, _ = _converse(ours, None, 1)
    pin = ours.pin(named(thread_id))
    assert [pin] == ours.pins(thread_id)


@pytest.mark.parametrize("name", ["ShallowPostgresSaver", "AsyncShallowPostgresSaver"])
async def test_shallow_savers_are_refused_with_the_reason(name: str, where: Where) -> None:
    from langgraph.checkpoint.postgres import shallow

    made_by = "pg" if name == "ShallowPostgresSaver" else "apg"
    async with open_saver(made_by, where) as saver:
        with pytest.warns(DeprecationWarning, match="Shallow"):
            inner = getattr(shallow, name)(saver.conn)  # type: ignore[attr-defined]  # Postgres.
        with pytest.warns(UserWarning, match="keeps one checkpoint per thread"):
            RetainingSaver(inner)


@pytest.mark.parametrize("kind", ONE_PER_BACKEND)
async def test_wrapping_a_wrapper_retains_once(kind: str, where: Where) -> None:
    face = face_of(kind)
    seen: list[Any] = []
    async with open_saver(kind, where) as saver:
        inner = RetainingSaver(saver, hooks=(seen.append,))
        outer = RetainingSaver(inner)
        graph = graphs.chat_graph(outer)
        thread_id = str(uuid.uuid4())
        for turn in range(3):
            given = graphs.say(f"turn {turn}")
            await face(graph.invoke, graph.ainvoke, given, named(thread_id))
            await face(put_leaf, aput_leaf, outer, thread_id, run_id=f"run {turn}")
        rows = await stored(face, saver, thread_id)
        history = await face(outer.run_history, outer.arun_history, named(thread_id))
    assert 2 == len([event for event in seen if isinstance(event, Reclaimed)])
    assert 1 == len(metadata_only(rows))
    assert [] == dangling(rows)
    assert {"run 0": 7, "run 1": 7, "run 2": 7} == history.durations


# What a method of ours takes besides, always by keyword and never required.
OPTIONS_OF_OURS = {("copy_thread", "latest_only")}


def _parameters(method: Any) -> list[inspect.Parameter]:
    found = inspect.signature(method).parameters.values()
    return [p.replace(annotation=inspect.Parameter.empty) for p in found]


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, member in inspect.getmembers(BaseCheckpointSaver)
        if inspect.isfunction(member) and not name.startswith("_")
    ],
)
def test_signatures_are_those_of_the_base_class(name: str) -> None:
    expected = getattr(BaseCheckpointSaver, name)
    found = getattr(RetainingSaver, name)
    ours = [p for p in _parameters(found) if (name.lstrip("a"), p.name) not in OPTIONS_OF_OURS]
    assert _parameters(expected) == ours
    assert inspect.iscoroutinefunction(expected) == inspect.iscoroutinefunction(found)


async def test_a_saver_from_before_task_paths_is_given_none() -> None:
    for face in ("sync", "async"):
        inner = SaverWithoutTaskPath()
        ours = RetainingSaver(inner)
        graph = graphs.asking_graph(ours)
        config = named(str(uuid.uuid4()))
        if face == "sync":
            graph.invoke({"log": ["u"]}, config)
        else:
            await graph.ainvoke({"log": ["u"]}, config)
        assert ["which?"] == [i.value for i in graph.get_state(config).interrupts]


@pytest.mark.parametrize("kind", KINDS)
async def test_attributes_of_the_wrapped_saver_are_reached(kind: str, where: Where) -> None:
    names = {
        "memory": ("storage", "writes", "blobs"),
        "sqlite": ("conn", "lock", "setup", "cursor", "is_setup"),
        "asqlite": ("conn", "lock", "setup", "loop", "is_setup"),
    }.get(kind, ("conn", "lock", "pipe", "setup"))
    async with open_saver(kind, where) as saver:
        ours = RetainingSaver(saver)
        for name in names:
            assert getattr(saver, name) == getattr(ours, name)
        assert saver.serde is ours.serde
        assert saver.config_specs == ours.config_specs
        assert isinstance(ours, BaseCheckpointSaver)
        with pytest.raises(AttributeError, match="no_such_thing"):
            ours.no_such_thing  # noqa: B018  # It raises.


async def test_the_wrapped_saver_numbers_the_versions() -> None:
    inner = InMemorySaver()
    ours = RetainingSaver(inner)
    one = ours.get_next_version(None, None)
    assert isinstance(one, str)
    assert one < ours.get_next_version(one, None)


async def test_a_wrapped_saver_is_opened_and_closed_through_its_wrapper() -> None:
    closed: list[str] = []

    class Closing(InMemorySaver):
        def __exit__(self, *args: object) -> bool | None:
            closed.append("sync")
            return None

        async def __aexit__(self, *args: object) -> bool | None:
            closed.append("async")
            return None

    ours = RetainingSaver(Closing())
    with ours as entered:
        assert ours is entered
    async with ours as aentered:
        assert ours is aentered
    assert ["sync", "async"] == closed


def test_savers_made_by_context_managers_are_wrapped_inside(where: Where) -> None:
    with SqliteSaver.from_conn_string(str(where.sqlite)) as sqlite:
        ours = RetainingSaver(sqlite)
        ours.setup()
        thread_id, _ = _converse(ours, ours)
        assert 1 == len(metadata_only(sqlite.list(named(thread_id))))
    with PostgresSaver.from_conn_string(where.postgres) as postgres:
        ours = RetainingSaver(postgres)
        ours.setup()
        thread_id, _ = _converse(ours, ours)
        assert 1 == len(metadata_only(postgres.list(named(thread_id))))


@pytest.mark.parametrize("kind", ONE_PER_BACKEND)
async def test_a_clone_shares_what_its_original_promised_and_remembers(
    kind: str, where: Where
) -> None:
    face = face_of(kind)
    # Only a serializer with a list of allowed classes is ever cloned.
    serde = JsonPlusSerializer(allowed_msgpack_modules=())
    async with open_saver(kind, where, serde=serde) as saver:
        ours = RetainingSaver(saver)
        clone = ours.with_allowlist([("some.module", "Model")])
        assert clone is not ours
        assert clone.inner is not ours.inner
        assert serde is saver.serde is ours.serde
        graph = graphs.chat_graph(clone)
        thread_id = str(uuid.uuid4())
        await face(graph.invoke, graph.ainvoke, graphs.say("a"), named(thread_id))
        returned, leaf_id = await face(put_leaf, aput_leaf, clone, thread_id)
        pin = await face(clone.pin, clone.apin, returned)
        assert [pin] == await face(ours.pins, ours.apins, thread_id)
        done = await face(ours.admit, ours.aadmit, named(thread_id))
        assert ("pinned", leaf_id) == (done.outcome, done.leaf_id)
        await face(ours.unpin, ours.aunpin, returned)
        assert [] == await face(clone.pins, clone.apins, thread_id)
        done = await face(ours.admit, ours.aadmit, named(thread_id))
        assert "reclaimed" == done.outcome
        with pytest.raises(CheckpointReclaimedError):
            await face(clone.get_tuple, clone.aget_tuple, returned)
        assert [] == dangling(await stored(face, saver, thread_id))


def test_a_clone_is_the_original_where_the_wrapped_saver_makes_none() -> None:
    class Plain(InMemorySaver):
        def with_allowlist(self, extra_allowlist: Any) -> Any:
            return self

    ours = RetainingSaver(Plain())
    assert ours is ours.with_allowlist([("some.module", "Model")])


def test_a_shallow_copy_is_as_good_as_the_original() -> None:
    ours = RetainingSaver(InMemorySaver())
    thread_id, _ = _converse(ours, ours)
    assert "reclaimed" == copy.copy(ours).admit(named(thread_id)).outcome


def test_the_serializer_cannot_be_replaced_for_everybody() -> None:
    ours = RetainingSaver(InMemorySaver())
    with pytest.raises(AttributeError):
        ours.serde = JsonPlusSerializer()  # type: ignore[misc]  # It has no setter.


@pytest.mark.parametrize("thread_id", [42, uuid.UUID(int=7)], ids=["int", "uuid"])
@pytest.mark.parametrize("kind", ONE_PER_BACKEND)
async def test_thread_ids_need_not_be_text(kind: str, thread_id: Any, empty_where: Where) -> None:
    face = face_of(kind)
    async with open_saver(kind, empty_where) as saver:
        ours = RetainingSaver(saver)
        graph = graphs.chat_graph(ours)
        for turn in range(3):
            given = graphs.say(f"turn {turn}")
            done = await face(graph.invoke, graph.ainvoke, given, named(thread_id))
            assert 4 * (turn + 1) == len(done["messages"])
            await face(put_leaf, aput_leaf, ours, str(thread_id), run_id=f"run {turn}")
        assert 1 == len(metadata_only(await stored(face, saver, str(thread_id))))
        pin = await face(ours.pin, ours.apin, named(str(thread_id)))
        assert [pin] == await face(ours.pins, ours.apins, thread_id)
        done = await face(ours.admit, ours.aadmit, named(thread_id))
        assert "pinned" == done.outcome
        await face(ours.unpin, ours.aunpin, named(thread_id, pin.checkpoint_id))
        done = await face(ours.admit, ours.aadmit, named(thread_id))
        assert "reclaimed" == done.outcome
        rows = await stored(face, saver, str(thread_id))
        history = await face(ours.run_history, ours.arun_history, named(thread_id))
    assert [] == dangling(rows)
    assert [] == metadata_only(rows)
    assert {"run 0": 7, "run 1": 7, "run 2": 7} == history.durations


AT_ONCE = 60


@pytest.mark.parametrize("kind", ["memory", "sqlite", "pg_pool"])
async def test_sixty_conversations_at_once_in_os_threads(kind: str, where: Where) -> None:
    async with open_saver(kind, where) as saver:
        ours = RetainingSaver(saver)

        def converse(_: int) -> tuple[str, list[Any]]:
            return _converse(ours, ours, 2)

        def everybody() -> list[tuple[str, list[Any]]]:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                return list(pool.map(converse, range(AT_ONCE)))

        done = await asyncio.to_thread(everybody)
        _, expected = _converse(InMemorySaver(), None, 2)
        for thread_id, told in done:
            assert expected == told
            rows = list(saver.list(named(thread_id)))
            assert [] == dangling(rows)
            assert 1 == len(metadata_only(rows))
            assert {"run 0": 7, "run 1": 7} == ours.run_history(named(thread_id)).durations


@pytest.mark.parametrize("kind", ["memory", "asqlite", "apg", "apg_pool"])
async def test_sixty_conversations_at_once_in_tasks(kind: str, where: Where) -> None:
    async with open_saver(kind, where) as saver:
        ours = RetainingSaver(saver)

        async def converse() -> tuple[str, list[Any]]:
            thread_id = str(uuid.uuid4())
            graph = graphs.chat_graph(ours)
            told = []
            for turn in range(2):
                given = graphs.say(f"turn {turn}")
                told.append(await graph.ainvoke(given, named(thread_id)))
                await aput_leaf(ours, thread_id, run_id=f"run {turn}")
            return thread_id, told

        done = await asyncio.gather(*(converse() for _ in range(AT_ONCE)))
        _, expected = _converse(InMemorySaver(), None, 2)
        for thread_id, told in done:
            assert expected == told
            rows = await stored(face_of("async"), saver, thread_id)
            assert [] == dangling(rows)
            assert 1 == len(metadata_only(rows))
            history = await ours.arun_history(named(thread_id))
            assert {"run 0": 7, "run 1": 7} == history.durations


@pytest.mark.parametrize("kind", ["memory", "sqlite", "pg", "pg_pool", "pg_pipeline"])
async def test_blocking_calls_work_inside_a_running_loop(kind: str, where: Where) -> None:
    async with open_saver(kind, where) as saver:
        ours = RetainingSaver(saver)
        thread_id, _ = _converse(ours, ours)
        rows = list(saver.list(named(thread_id)))
        assert 1 == len(metadata_only(rows))
        assert "reclaimed" == ours.admit(named(thread_id)).outcome


@pytest.mark.parametrize("kind", ["asqlite", "apg", "apg_pool"])
async def test_blocking_calls_on_an_async_saver_in_its_own_loop_are_refused(
    kind: str, where: Where
) -> None:
    async with open_saver(kind, where) as saver:
        ours = RetainingSaver(saver)
        graph = graphs.chat_graph(ours)
        thread_id = str(uuid.uuid4())
        await graph.ainvoke(graphs.say("a"), named(thread_id))
        await aput_leaf(ours, thread_id)
        for ask in (ours.admit, ours.get_tuple, ours.run_history):
            with pytest.raises(asyncio.InvalidStateError):
                ask(named(thread_id))
        # Nobody holds the thread's lock now.
        assert "reclaimed" == (await ours.aadmit(named(thread_id))).outcome


@pytest.mark.parametrize("kind", ONE_PER_BACKEND)
async def test_a_listing_may_be_left_open_while_the_thread_is_admitted(
    kind: str, where: Where
) -> None:
    face = face_of(kind)
    async with open_saver(kind, where) as saver:
        ours = RetainingSaver(saver)
        graph = graphs.chat_graph(ours)
        thread_id = str(uuid.uuid4())
        await face(graph.invoke, graph.ainvoke, graphs.say("a"), named(thread_id))
        await face(put_leaf, aput_leaf, ours, thread_id)

        def blocking() -> str:
            listing = ours.list(named(thread_id))
            next(listing)
            return str(ours.admit(named(thread_id)).outcome)

        async def awaitable() -> str:
            listing: AsyncIterator[CheckpointTuple] = ours.alist(named(thread_id))
            await anext(listing)
            done = await asyncio.wait_for(ours.aadmit(named(thread_id)), 20)
            return str(done.outcome)

        assert "reclaimed" == await asyncio.wait_for(face(blocking, awaitable), 30)
