"""What every backend decides alike before it moves or deletes a row. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from uuid import UUID, uuid5

from retaining_saver.backends.base import Movable, ReclaimOutcome, Row
from retaining_saver.entries import NULL_TASK_ID

# LangGraph spells the step with eight digits. One in forty ordinary task ids begins with eight
# digits, too; hardly any with three zeros, and no thread has a hundred thousand steps.
_EXIT_TASK_ID = re.compile(r"(?:000\d{5}|ffffffff)-")


def input_task_id(checkpoint_id: str) -> str | None:
    """Return the task id under which a raw graph's input for a checkpoint is stored.

    ``None`` if the checkpoint id is no UUID: then LangGraph stored no such input.
    """
    try:
        return str(uuid5(UUID(checkpoint_id), "__input__"))
    except ValueError:
        return None


def moved_task_id(task_id: str, leaf_id: str, parent_id: str, movable: Movable) -> str | None:
    """Return the task id of a leaf's write once it is the parent's; ``None`` if it must stay."""
    if movable.inputs and task_id == input_task_id(leaf_id):
        return input_task_id(parent_id)
    # Writes of the null task are the checkpoint's own state: they keep their leaf.
    if movable.exits and task_id != NULL_TASK_ID and _EXIT_TASK_ID.match(task_id):
        return task_id
    return None


def planned_moves(
    task_ids: Iterable[str], leaf_id: str, parent_id: str, movable: Movable
) -> dict[str, str]:
    """Map the task id of every write on the leaf to its new one; empty if one of them must stay."""
    moves: dict[str, str] = {}
    for task_id in task_ids:
        moved = moved_task_id(task_id, leaf_id, parent_id, movable)
        if moved is None:
            return {}
        moves[task_id] = moved
    return moves


def rescued_task_id(task_id: str, leaf_id: str, parent_id: str) -> str:
    """Return the task id under which a deleted leaf's write belongs to the parent."""
    return moved_task_id(task_id, leaf_id, parent_id, Movable(inputs=True)) or task_id


def mismatch(leaf: Row, parent: Row) -> ReclaimOutcome | None:
    """Tell why two rows, as read, cannot be a leaf and its parent; ``None`` if they can."""
    if leaf.parent_id != parent.checkpoint_id or leaf.body != parent.body:
        return "versions_differ"
    return None


def stored_from_below(task_id: str, checkpoint_id: str) -> bool:
    """Tell whether runs that started from a checkpoint store rows on it under this task id.

    They do when they exit, and raw graphs for their input.
    """
    exits = task_id != NULL_TASK_ID and _EXIT_TASK_ID.match(task_id)
    return bool(exits) or task_id == input_task_id(checkpoint_id)
