"""Serializers that encrypt, that allow only listed classes, or that cannot know the graph's."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.serde.base import CipherProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer

from retaining_saver import RetainingSaver
from tests.support import graphs
from tests.support.leaves import aput_leaf, put_leaf
from tests.support.savers import ONE_PER_BACKEND, Where, open_saver
from tests.support.threads import dangling, face_of, metadata_only, named, root, stored, story


class OneTimePad(CipherProtocol):
    """A cipher that never spells the same text twice, as a real one with a nonce does."""

    def encrypt(self, plaintext: bytes) -> tuple[str, bytes]:
        pad = os.urandom(len(plaintext))
        return "pad", pad + _xor(plaintext, pad)

    def decrypt(self, ciphername: str, ciphertext: bytes) -> bytes:
        assert "pad" == ciphername
        half = len(ciphertext) // 2
        return _xor(ciphertext[half:], ciphertext[:half])


def _xor(one: bytes, other: bytes) -> bytes:
    mixed = int.from_bytes(one, "big") ^ int.from_bytes(other, "big")
    return mixed.to_bytes(len(one), "big")


@pytest.mark.parametrize("durability", ["sync", "exit"])
@pytest.mark.parametrize("mode", graphs.MODES)
@pytest.mark.parametrize("kind", ONE_PER_BACKEND)
async def test_encrypted_threads_are_reclaimed_and_stay_encrypted(
    kind: str, mode: graphs.Mode, durability: Any, where: Where
) -> None:
    face = face_of(kind)
    async with open_saver(kind, where, serde=EncryptedSerializer(OneTimePad())) as saver:
        ours = RetainingSaver(saver)
        told = []
        for on in (saver, ours):
            thread_id = str(uuid.uuid4())
            graph = graphs.chat_graph(on, mode)
            for turn in range(4):
                given = graphs.say(f"turn {turn}")
                await face(
                    graph.invoke, graph.ainvoke, given, named(thread_id), durability=durability
                )
                if on is ours:
                    await face(put_leaf, aput_leaf, ours, thread_id, run_id=f"run {turn}")
            rows = await stored(face, saver, thread_id)
            assert [] == dangling(rows)
            told.append(story(rows, but=metadata_only(rows)))
        assert root(rows)[-1].checkpoint["id"] in metadata_only(rows)
        assert 1 == len(metadata_only(rows))
        history = await face(ours.run_history, ours.arun_history, named(thread_id))
    assert told[0] == told[1]
    assert {f"run {turn}": 7 for turn in range(4)} == history.durations


@pytest.mark.parametrize("mode", graphs.MODES)
@pytest.mark.parametrize("kind", ["memory", "sqlite", "pg"])
async def test_an_encrypted_question_stays_under_a_record(
    kind: str, mode: graphs.Mode, where: Where
) -> None:
    async with open_saver(kind, where, serde=EncryptedSerializer(OneTimePad())) as saver:
        ours = RetainingSaver(saver)
        thread_id = str(uuid.uuid4())
        graph = graphs.asking_graph(ours, mode)
        graph.invoke({"log": ["u"]}, named(thread_id))
        put_leaf(ours, thread_id)
        assert ["which?"] == [i.value for i in graph.get_state(named(thread_id)).interrupts]
        assert [] == metadata_only(saver.list(named(thread_id)))


STRICT = Path(__file__).with_name("strict_models.py")


@pytest.mark.parametrize("annotations", ["leaf", "fold"])
@pytest.mark.parametrize("kind", ["memory", "sqlite", "pg"])
def test_models_stay_models_where_only_listed_classes_are_read(
    kind: str, annotations: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # The variable is read when LangGraph is imported.
    place = str(request.getfixturevalue("postgres_url")) if kind == "pg" else str(tmp_path / "db")
    done = subprocess.run(
        [sys.executable, str(STRICT), kind, annotations, place],
        env={**os.environ, "LANGGRAPH_STRICT_MSGPACK": "true", "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    # In memory and on Postgres a leaf re-uses its parent's values; on SQLite it would store what
    # its writer could read, so that there is no leaf to write.
    leaves = "0" if annotations == "fold" or kind == "sqlite" else "1"
    assert ["Model", "Model", "Model", leaves, "strict"] == done.stdout.split()
