"""The same checkpoint ids for two threads of which the same is told.

LangGraph derives task ids from checkpoint ids. Savers that order writes by task id alone then read
both threads in one order, so that an order which differs is one that was lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import pytest
from langchain_core.runnables.config import var_child_runnable_config
from langgraph.checkpoint.base.id import uuid6

_Place = tuple[str, int | None, int]  # checkpoint_ns, clock_seq, how many were made there before

# LangGraph imports it by name, where it makes checkpoints.
_IMPORTED = ("langgraph.pregel._checkpoint.uuid6", "langgraph.checkpoint.base.uuid6")


@dataclass
class AlikeIds:
    """Ids that one thread's checkpoints were given, for the other's made at the same place.

    What runs in parallel is told apart by its namespace: in each, checkpoints are made in turn.
    """

    _told: dict[_Place, Any] = field(default_factory=dict)
    _counts: Counter[tuple[int, str, int | None]] = field(default_factory=Counter)
    _side: ContextVar[int | None] = field(default_factory=lambda: ContextVar("side", default=None))

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have LangGraph take its checkpoint ids from here until the test ends."""
        for name in _IMPORTED:
            monkeypatch.setattr(name, self._next)

    @contextmanager
    def of(self, side: int) -> Iterator[None]:
        """Give ids to the first thread, ``0``, or the first one's to the second, ``1``."""
        token = self._side.set(side)
        try:
            yield
        finally:
            self._side.reset(token)

    def _next(self, node: int | None = None, clock_seq: int | None = None) -> Any:
        side = self._side.get()
        if side is None:
            return uuid6(node, clock_seq)
        config = var_child_runnable_config.get() or {}
        ns = config.get("configurable", {}).get("checkpoint_ns", "")
        at = (ns, clock_seq, self._counts[side, ns, clock_seq])
        self._counts[side, ns, clock_seq] += 1
        if side == 0:
            self._told[at] = uuid6(node, clock_seq)
        # The second thread makes no checkpoint that the first did not make.
        return self._told[at]
