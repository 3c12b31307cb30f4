"""What the installed releases of LangGraph and its savers do, where older ones do otherwise.

A test that needs the newer behaviour asserts the older one where that is installed.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any


def _at_least(package: str, *release: int) -> bool:
    return tuple(int(n) for n in version(package).split(".")[:3]) >= release


KEEPS_RAW_INPUT = _at_least("langgraph", 1, 2, 15)
"""A raw graph's input to a delta channel is stored, before its run's first ``put``.

Older releases store it as the state of the checkpoint that the run starts from, or lose it.
"""

MARKS_LATE_EXIT_WRITES = _at_least("langgraph", 1, 2, 15)
"""What an exiting run wrote in later steps sorts after what its first step's tasks wrote."""

SNAPSHOTS_BRANCHES = _at_least("langgraph", 1, 2, 15)
"""A branch snapshots the delta channels that its checkpoint has writes of.

In older releases it also reads those writes, which belong to the branch that was there before.
"""

EXPLICIT_RUNS_READ_THE_HEAD = _at_least("langgraph", 1, 2, 15)
"""A run that is given a checkpoint id reads the newest checkpoint as well, and so is admitted."""

ORDERS_BY_TASK_PATH = _at_least("langgraph-checkpoint", 4, 3, 0)
"""Savers return a superstep's writes in the order in which the run applied them.

Older ones order them by task id, which is a hash: the same run made twice may read differently.
"""

SQLITE_KEEPS_TASK_PATHS = _at_least("langgraph-checkpoint-sqlite", 3, 1, 2)
POSTGRES_PRUNES = _at_least("langgraph-checkpoint-postgres", 3, 2, 0)


def in_told_order(values: dict[str, Any]) -> dict[str, Any]:
    """Return a state's values as two like threads must agree on them: without an order of lists
    where the savers forget in which order parallel tasks wrote.
    """
    if ORDERS_BY_TASK_PATH:
        return values
    return {k: sorted(map(repr, v)) if isinstance(v, list) else v for k, v in values.items()}
