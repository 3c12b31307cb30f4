"""The shared support does what the other tests take for granted."""

from __future__ import annotations

import pytest
import redis
from langchain_core.runnables import RunnableConfig
from langgraph.types import Command

from tests.support import graphs, releases
from tests.support.faces import Face, kinds_and_faces
from tests.support.leaves import aput_leaf, put_leaf
from tests.support.savers import KINDS, Where, open_saver


def _config(thread_id: str) -> RunnableConfig:
    return {"configurable": {"thread_id": thread_id}}


@pytest.mark.parametrize(("kind", "face"), kinds_and_faces(KINDS), ids=str)
async def test_a_leaf_is_the_head_and_a_copy_of_its_parent(
    kind: str, face: Face, where: Where, thread_id: str
) -> None:
    async with open_saver(kind, where) as saver:
        graph = graphs.chat_graph(saver)
        await face(graph.invoke, graph.ainvoke, graphs.say("hi"), _config(thread_id))
        parent = await face(saver.get_tuple, saver.aget_tuple, _config(thread_id))
        _, leaf_id = await face(put_leaf, aput_leaf, saver, thread_id, run_id="r", duration=3)
        leaf = await face(saver.get_tuple, saver.aget_tuple, _config(thread_id))
    assert leaf is not None
    assert parent is not None
    assert leaf_id == leaf.checkpoint["id"]
    assert leaf.parent_config == parent.config
    changed = {k for k, v in leaf.checkpoint.items() if v != parent.checkpoint.get(k)}
    assert {"id", "ts"} == changed
    assert {"r": 3} == leaf.metadata["run_durations"]  # type: ignore[typeddict-item]  # Not the host's key.


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "memory"])
async def test_two_savers_on_one_place_see_the_same_threads(
    kind: str, where: Where, thread_id: str
) -> None:
    face = kinds_and_faces((kind,))[0][1]
    async with open_saver(kind, where) as one, open_saver(kind, where) as other:
        graph = graphs.chat_graph(one)
        await face(graph.invoke, graph.ainvoke, graphs.say("hi"), _config(thread_id))
        assert await face(other.get_tuple, other.aget_tuple, _config(thread_id)) is not None


@pytest.mark.parametrize("mode", graphs.MODES)
async def test_a_chat_turn_adds_four_messages_with_stable_ids(
    mode: graphs.Mode, where: Where, thread_id: str
) -> None:
    async with open_saver("sqlite", where) as saver:
        graph = graphs.chat_graph(saver, mode)
        for text in ("one", "two"):
            graph.invoke(graphs.say(text), _config(thread_id))
        messages = graph.get_state(_config(thread_id)).values["messages"]
    ids = [m.id for m in messages]
    assert ["human-one", "plan-human-one"] == ids[:2]
    assert 8 == len(set(ids))


@pytest.mark.parametrize("mode", graphs.MODES)
async def test_the_asking_graph_waits_and_takes_the_answer(
    mode: graphs.Mode, where: Where, thread_id: str
) -> None:
    async with open_saver("memory", where) as saver:
        graph = graphs.asking_graph(saver, mode)
        graph.invoke({"log": ["u"]}, _config(thread_id))
        assert 1 == len(graph.get_state(_config(thread_id)).interrupts)
        done = graph.invoke(Command(resume="q"), _config(thread_id))
    assert {"log": ["u", "p", "q"]} == {"log": [done["log"][0], *sorted(done["log"][1:])]}


@pytest.mark.parametrize("mode", graphs.MODES)
async def test_subgraphs_remember_or_start_anew(
    mode: graphs.Mode, where: Where, thread_id: str
) -> None:
    async with open_saver("memory", where) as saver:
        graph = graphs.subgraph_graph(saver, mode)
        for answer in ("a", "b"):
            graph.invoke({"log": ["u"]}, _config(thread_id))
            assert 1 == len(graph.get_state(_config(thread_id)).interrupts)
            graph.invoke(Command(resume=answer), _config(thread_id))
        namespaces = {t.config["configurable"]["checkpoint_ns"] for t in saver.list(None)}
    assert {"", "remembers"} < namespaces
    assert 2 == len([ns for ns in namespaces if ns.startswith("helps:")])


async def test_a_raw_graph_writes_its_input_into_the_delta_channel(
    where: Where, thread_id: str
) -> None:
    async with open_saver("memory", where) as saver:
        graph = graphs.raw_pregel(saver)
        graph.invoke(["a"], _config(thread_id))
        done = graph.invoke(["b"], _config(thread_id))
    kept = {"log": ["a", "b"], "answers": ["seen-1", "seen-2"]}
    lost = {"log": ["b"], "answers": ["seen-1", "seen-1"]}
    assert (kept if releases.KEEPS_RAW_INPUT else lost) == done


async def test_an_empty_place_holds_no_other_threads(empty_where: Where, where: Where) -> None:
    async with open_saver("pg", empty_where) as saver:
        assert [] == list(saver.list(None))
    assert empty_where.postgres != where.postgres


def test_redis_answers(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        assert client.ping()
