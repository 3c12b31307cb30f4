"""The one maker of metadata-only leaves, in the shape in which applications write them."""

from __future__ import annotations

import copy
from datetime import datetime, timezone
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver, Checkpoint, CheckpointTuple
from langgraph.checkpoint.base.id import uuid6

Saver = BaseCheckpointSaver[Any]
Leaf = tuple[RunnableConfig, str]


def put_leaf(
    saver: Saver,
    thread_id: str,
    *,
    run_id: str = "run-1",
    duration: int = 7,
    at: RunnableConfig | None = None,
) -> Leaf:
    """Record a run as an application does: a copy of the head with other metadata.

    ``at`` names another checkpoint than the head to copy. Return the config that ``put``
    returned, and the id that was given to the leaf.
    """
    head = saver.get_tuple(at or _newest(thread_id))
    parent, checkpoint, metadata = _leaf_of(head, thread_id, run_id, duration)
    return saver.put(parent, checkpoint, metadata, {}), checkpoint["id"]


async def aput_leaf(
    saver: Saver,
    thread_id: str,
    *,
    run_id: str = "run-1",
    duration: int = 7,
    at: RunnableConfig | None = None,
) -> Leaf:
    """Record a run through the awaitable methods."""
    head = await saver.aget_tuple(at or _newest(thread_id))
    parent, checkpoint, metadata = _leaf_of(head, thread_id, run_id, duration)
    return await saver.aput(parent, checkpoint, metadata, {}), checkpoint["id"]


def _newest(thread_id: str) -> RunnableConfig:
    return {"configurable": {"thread_id": thread_id, "checkpoint_ns": ""}}


def _leaf_of(
    head: CheckpointTuple | None, thread_id: str, run_id: str, duration: int
) -> tuple[RunnableConfig, Checkpoint, Any]:
    assert head is not None, f"thread {thread_id} has no checkpoint to put a leaf on"
    checkpoint = copy.deepcopy(head.checkpoint)
    checkpoint["id"] = str(uuid6())
    checkpoint["ts"] = datetime.now(timezone.utc).isoformat()
    metadata: dict[str, Any] = dict(copy.deepcopy(head.metadata))
    metadata["source"] = "update"
    metadata["run_durations"] = {**metadata.get("run_durations", {}), run_id: duration}
    metadata["writes"] = {"runtime_run_duration": {"run_id": run_id, "duration": duration}}
    return _addressed(head), checkpoint, metadata


def _addressed(head: CheckpointTuple) -> RunnableConfig:
    named = head.config["configurable"]
    keys = ("thread_id", "checkpoint_ns", "checkpoint_id")
    return {"configurable": {key: named[key] for key in keys}}
