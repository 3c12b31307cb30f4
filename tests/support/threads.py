"""What a thread holds, read through a bare saver, in a form that two runs can be compared in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple

from tests.support.faces import ASYNC, SYNC, Face

Saver = BaseCheckpointSaver[Any]

# What only threads with metadata-only checkpoints have in their metadata.
RECORDED = ("run_durations", "run_message_ids", "retention", "writes")

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_HASH = re.compile(r"\b[0-9a-f]{32}\b")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00")
# A counter of 32 digits and a random number, which may be small enough for an exponent.
_VERSION = re.compile(r"\b0{16}0*(\d+)\.[\d.]+(e-\d+)?\b")


def named(thread_id: Any, checkpoint_id: str | None = None, **others: Any) -> RunnableConfig:
    """Name a thread, or one checkpoint of its root namespace."""
    configurable: dict[str, Any] = {"thread_id": thread_id, **others}
    if checkpoint_id is not None:
        configurable |= {"checkpoint_ns": "", "checkpoint_id": checkpoint_id}
    return {"configurable": configurable}


def face_of(kind: str) -> Face:
    """Return the face that the bare saver of ``kind`` was made for."""
    return ASYNC if kind.startswith("a") else SYNC


async def stored(face: Face, saver: Saver, thread_id: str) -> list[CheckpointTuple]:
    """List every checkpoint of a thread, by the names of its namespaces and oldest first."""

    def blocking() -> list[CheckpointTuple]:
        return list(saver.list(named(thread_id)))

    async def awaitable() -> list[CheckpointTuple]:
        return [found async for found in saver.alist(named(thread_id))]

    # What follows the colon in the namespace of a subgraph's call differs from run to run.
    found = await face(blocking, awaitable)
    return sorted(found, key=lambda row: (_key(row)[0].partition(":")[0], _key(row)[1]))


def _key(found: CheckpointTuple) -> tuple[str, str]:
    return found.config["configurable"]["checkpoint_ns"], found.checkpoint["id"]


def root(found: Iterable[CheckpointTuple]) -> list[CheckpointTuple]:
    """Keep the checkpoints of the root namespace."""
    return [f for f in found if not f.config["configurable"]["checkpoint_ns"]]


def ids(found: Iterable[CheckpointTuple]) -> list[str]:
    """List checkpoint ids."""
    return [f.checkpoint["id"] for f in found]


def parent_id(found: CheckpointTuple) -> str | None:
    """Return the id of the parent, if one is named."""
    parent = found.parent_config
    return None if parent is None else parent["configurable"]["checkpoint_id"]


def dangling(found: Iterable[CheckpointTuple]) -> list[str]:
    """List the ids of checkpoints whose parent is not stored."""
    rows = list(found)
    keys = {_key(row) for row in rows}
    return [
        row.checkpoint["id"]
        for row in rows
        if (parent := parent_id(row)) is not None and (_key(row)[0], parent) not in keys
    ]


def metadata_only(found: Iterable[CheckpointTuple]) -> list[str]:
    """List the ids of checkpoints that repeat their parent and record runs, by comparing both."""
    rows = list(found)
    bodies = {_key(row): _body(row) for row in rows}
    return [
        row.checkpoint["id"]
        for row in rows
        if row.metadata.get("source") == "update"
        and "run_durations" in row.metadata
        and bodies.get((_key(row)[0], parent_id(row) or "")) == bodies[_key(row)]
    ]


def _body(row: CheckpointTuple) -> str:
    checkpoint = row.checkpoint
    kept = {k: v for k, v in sorted(checkpoint.items()) if k not in ("id", "ts")}
    return repr(kept)


@dataclass
class Words:
    """Replaces what differs between two equal runs by what does not.

    Ids become their order of appearance; times vanish; versions lose their random part. An id of
    ``aliases`` counts as the id that it stands for.
    """

    aliases: dict[str, str] = field(default_factory=dict)
    _seen: dict[str, str] = field(default_factory=dict)

    def of(self, value: Any) -> str:
        """Spell ``value`` so that equal runs spell it equally."""
        text = _TIME.sub("<time>", repr(value))
        text = _VERSION.sub(r"v\1", text)
        return _HASH.sub(self._name, _UUID.sub(self._name, text))

    def _name(self, match: re.Match[str]) -> str:
        name = self.aliases.get(match[0], match[0])
        return self._seen.setdefault(name, f"<id {len(self._seen)}>")


def story(
    found: Iterable[CheckpointTuple],
    but: Iterable[str] = (),
    aliases: Mapping[str, str] | None = None,
) -> list[str]:
    """Spell everything stored of a thread, but for the checkpoints ``but`` and what they record."""
    words = Words(dict(aliases or {}))
    skipped = set(but)
    return [
        words.of(
            (
                row.config,
                row.parent_config,
                sorted(row.checkpoint.items()),
                sorted((k, v) for k, v in row.metadata.items() if k not in RECORDED),
                sorted(row.pending_writes or (), key=lambda write: (write[1], repr(write[2]))),
            )
        )
        for row in found
        if row.checkpoint["id"] not in skipped
    ]
