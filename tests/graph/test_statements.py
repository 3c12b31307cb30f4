"""Which statements reach the database: none of ours without a leaf, and few with one."""

from __future__ import annotations

import copy
import re
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from langgraph.checkpoint.base.id import uuid6

from retaining_saver import RetainingSaver
from tests.support import graphs
from tests.support.faces import Face
from tests.support.leaves import aput_leaf, put_leaf
from tests.support.savers import Saver, Where
from tests.support.threads import face_of, metadata_only, named, stored
from tests.support.traced import KINDS, open_traced

SNAPSHOT = {"BEGIN", "COMMIT", "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"}


def _shape(statement: str) -> str:
    """Spell a statement without its values, which SQLite's trace fills in."""
    text = re.sub(r"[xX]?'(?:[^']|'')*'", "?", statement)
    return " ".join(re.sub(r"\b\d+(\.\d+)?\b", "?", text).split())


@asynccontextmanager
async def _recorded(kind: str, where: Where) -> AsyncIterator[tuple[Saver, list[str]]]:
    statements: list[str] = []
    async with open_traced(kind, where, lambda sql: statements.append(_shape(sql))) as saver:
        yield saver, statements


async def _turns(face: Face, saver: Saver, mode: graphs.Mode, durability: Any) -> None:
    graph = graphs.chat_graph(saver, mode)
    thread_id = str(uuid.uuid4())
    for text in ("a", "b", "c"):
        await face(
            graph.invoke, graph.ainvoke, graphs.say(text), named(thread_id), durability=durability
        )
        await face(graph.get_state, graph.aget_state, named(thread_id))
    await face(graph.update_state, graph.aupdate_state, named(thread_id), graphs.say("more"))


@pytest.mark.parametrize("admission", ["auto", "put"])
@pytest.mark.parametrize("durability", ["sync", "exit"])
@pytest.mark.parametrize("mode", graphs.MODES)
@pytest.mark.parametrize("kind", KINDS)
async def test_without_leaves_the_statements_are_those_of_the_bare_saver(
    kind: str, mode: graphs.Mode, durability: Any, admission: Any, where: Where
) -> None:
    face = face_of(kind)
    async with _recorded(kind, where) as (saver, statements):
        await _turns(face, saver, mode, durability)
        bare = list(statements)
        statements.clear()
        ours = RetainingSaver(saver, admission=admission, history_cache=None)
        await _turns(face, ours, mode, durability)
        found = list(statements)
    assert len(bare) > 10
    assert not Counter(bare) - Counter(found)
    # The statements of a delta history are read on one snapshot.
    assert set(Counter(found) - Counter(bare)) <= (SNAPSHOT if mode == "delta" else set())


@pytest.mark.parametrize("kind", KINDS)
async def test_an_admission_without_a_leaf_is_one_lookup(kind: str, where: Where) -> None:
    face = face_of(kind)
    async with _recorded(kind, where) as (saver, statements):
        ours = RetainingSaver(saver)
        graph = graphs.chat_graph(ours)
        thread_id = str(uuid.uuid4())
        await face(graph.invoke, graph.ainvoke, graphs.say("a"), named(thread_id))
        before = await stored(face, saver, thread_id)
        statements.clear()
        done = await face(ours.admit, ours.aadmit, named(thread_id))
        looked = list(statements)
        assert [c.checkpoint for c in before] == [
            c.checkpoint for c in await stored(face, saver, thread_id)
        ]
    assert "no_leaf" == done.outcome
    # The head, and whether its parent is there.
    assert 1 <= len(looked) <= 2
    assert [] == [s for s in looked if not s.startswith("SELECT")]


async def _lengthen(face: Face, saver: Saver, thread_id: str, until: int) -> None:
    """Store checkpoints one upon the other, as a run does, until the thread has that many."""
    head = await face(saver.get_tuple, saver.aget_tuple, named(thread_id))
    assert head is not None
    config = head.config
    for _ in range(until - len(await stored(face, saver, thread_id))):
        checkpoint = copy.copy(head.checkpoint)
        checkpoint["id"] = str(uuid6())
        metadata: Any = {"source": "loop", "step": 1, "parents": {}}
        config = await face(saver.put, saver.aput, config, checkpoint, metadata, {})


@pytest.mark.parametrize("kind", KINDS)
async def test_an_admission_issues_the_same_statements_on_any_history(
    kind: str, where: Where
) -> None:
    face = face_of(kind)
    async with _recorded(kind, where) as (saver, statements):
        graph = graphs.chat_graph(saver)
        thread_id = str(uuid.uuid4())
        await face(graph.invoke, graph.ainvoke, graphs.say("a"), named(thread_id))
        issued = []
        for length in (10, 2_000):
            await _lengthen(face, saver, thread_id, length)
            await face(put_leaf, aput_leaf, saver, thread_id, run_id=f"run {length}")
            ours = RetainingSaver(saver)
            statements.clear()
            done = await face(ours.admit, ours.aadmit, named(thread_id))
            issued.append(list(statements))
            assert "reclaimed" == done.outcome
        rows = await stored(face, saver, thread_id)
    assert [] == metadata_only(rows)
    assert 2_000 == len(rows)
    assert issued[0] == issued[1]
    # Two lookups, one probe, one transaction with the fold, and one look for late rows.
    assert len(issued[0]) <= 16
    assert [] == re.findall(r"(?:DELETE FROM|UPDATE|INTO) checkpoint_blobs", " ".join(issued[0]))


@pytest.mark.parametrize("kind", KINDS)
async def test_an_admission_lists_nothing(
    kind: str, where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a listing reads the whole history")

    face = face_of(kind)
    async with _recorded(kind, where) as (saver, _):
        graph = graphs.chat_graph(saver)
        thread_id = str(uuid.uuid4())
        await face(graph.invoke, graph.ainvoke, graphs.say("a"), named(thread_id))
        await face(put_leaf, aput_leaf, saver, thread_id)
        ours = RetainingSaver(saver)
        with monkeypatch.context() as patch:
            patch.setattr(saver, "list", refuse)
            patch.setattr(saver, "alist", refuse)
            done = await face(ours.admit, ours.aadmit, named(thread_id))
    assert "reclaimed" == done.outcome
