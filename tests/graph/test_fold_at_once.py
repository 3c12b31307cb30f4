"""``annotations="fold"``: what is recorded goes into the parent at once, without a row."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from retaining_saver import RetainingSaver
from tests.support import graphs
from tests.support.leaves import aput_leaf, put_leaf
from tests.support.savers import ONE_PER_BACKEND, Where, open_saver
from tests.support.threads import face_of, ids, metadata_only, named, root, stored, story


@pytest.mark.parametrize("durability", ["sync", "exit"])
@pytest.mark.parametrize("mode", graphs.MODES)
@pytest.mark.parametrize("kind", ONE_PER_BACKEND)
async def test_no_metadata_only_row_ever_appears(
    kind: str, mode: graphs.Mode, durability: Any, where: Where
) -> None:
    face = face_of(kind)
    async with open_saver(kind, where) as saver:
        ours = RetainingSaver(saver, annotations="fold")
        threads = {}
        for on in (saver, ours):
            graph = graphs.chat_graph(on, mode)
            threads[on] = thread_id = str(uuid.uuid4())
            for turn in range(1, 7):
                given = graphs.say(f"turn {turn}")
                await face(
                    graph.invoke, graph.ainvoke, given, named(thread_id), durability=durability
                )
                if on is saver:
                    continue
                run_id, before = f"run {turn}", ids(await stored(face, saver, thread_id))
                returned, _ = await face(
                    put_leaf, aput_leaf, ours, thread_id, run_id=run_id, duration=turn
                )
                rows = await stored(face, saver, thread_id)
                assert before == ids(rows)
                head_id = root(rows)[-1].checkpoint["id"]
                assert head_id == returned["configurable"]["checkpoint_id"]
                # Nothing was left to do at the next admission.
                done = await face(ours.admit, ours.aadmit, named(thread_id))
                assert "no_leaf" == done.outcome
        expected, rows = [await stored(face, saver, threads[on]) for on in (saver, ours)]
        history = await face(ours.run_history, ours.arun_history, named(threads[ours]))
    assert [] == metadata_only(rows)
    assert story(expected) == story(rows)
    assert {f"run {turn}": turn for turn in range(1, 7)} == history.durations


@pytest.mark.parametrize("kind", ONE_PER_BACKEND)
async def test_runs_recorded_by_hand_are_folded_as_well(kind: str, where: Where) -> None:
    face = face_of(kind)
    thread_id = str(uuid.uuid4())
    async with open_saver(kind, where) as saver:
        ours = RetainingSaver(saver, annotations="fold")
        graph = graphs.chat_graph(ours)
        await face(graph.invoke, graph.ainvoke, graphs.say("a"), named(thread_id))
        before = ids(await stored(face, saver, thread_id))
        for run_id in ("one", "two"):
            await face(
                ours.record_run,
                ours.arecord_run,
                named(thread_id),
                run_id,
                duration=3,
                message_ids=[f"message of {run_id}"],
            )
        history = await face(ours.run_history, ours.arun_history, named(thread_id))
        assert before == ids(await stored(face, saver, thread_id))
    assert {"one": 3, "two": 3} == history.durations
    assert {"message of one": "one", "message of two": "two"} == history.message_runs


@pytest.mark.parametrize("kind", ONE_PER_BACKEND)
async def test_a_client_that_sends_the_heads_id_with_every_run_leaves_no_links(
    kind: str, where: Where
) -> None:
    face = face_of(kind)
    thread_id = str(uuid.uuid4())
    async with open_saver(kind, where) as saver:
        ours = RetainingSaver(saver, annotations="fold")
        graph = graphs.chat_graph(ours)
        await face(graph.invoke, graph.ainvoke, graphs.say("a"), named(thread_id))
        for text in ("b", "c", "d"):
            returned, _ = await face(put_leaf, aput_leaf, ours, thread_id, run_id=text)
            head = returned["configurable"]["checkpoint_id"]
            await face(graph.invoke, graph.ainvoke, graphs.say(text), named(thread_id, head))
        rows = await stored(face, saver, thread_id)
        history = await face(ours.run_history, ours.arun_history, named(thread_id))
    assert [] == metadata_only(rows)
    assert {"b": 7, "c": 7, "d": 7} == history.durations
