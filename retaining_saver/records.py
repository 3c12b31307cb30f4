"""Plain records, and the only reader of ``config["configurable"]``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from langchain_core.runnables import RunnableConfig

ROOT_NS = ""

# LangGraph's private keys in ``configurable``, as of langgraph 1.2.
RUN_MARKER = "__pregel_runtime"
TASK_MARKER = "__pregel_task_id"
DURABILITY = "__pregel_durability"


@dataclass(frozen=True, slots=True)
class Ref:
    """What a config names: a checkpoint, or the head of a namespace where the id is ``None``."""

    thread_id: str
    checkpoint_ns: str = ROOT_NS
    checkpoint_id: str | None = None

    @classmethod
    def of(cls, config: RunnableConfig) -> Ref:
        """Read ``config``; a thread id of another type counts as its text, as in LangGraph."""
        configurable = config["configurable"]
        return cls(
            str(configurable["thread_id"]),
            configurable.get("checkpoint_ns") or ROOT_NS,
            configurable.get("checkpoint_id") or None,
        )

    @property
    def id(self) -> str:
        """The checkpoint id; raises ``ValueError`` where none is named."""
        if self.checkpoint_id is None:
            raise ValueError(f"No checkpoint_id is named for thread {self.thread_id}")
        return self.checkpoint_id

    def at(self, checkpoint_id: str | None) -> Ref:
        """Name another checkpoint of the same namespace."""
        return Ref(self.thread_id, self.checkpoint_ns, checkpoint_id)

    def config(self) -> RunnableConfig:
        """Spell this out as savers do."""
        configurable: dict[str, Any] = {
            "thread_id": self.thread_id,
            "checkpoint_ns": self.checkpoint_ns,
        }
        if self.checkpoint_id is not None:
            configurable["checkpoint_id"] = self.checkpoint_id
        return {"configurable": configurable}


def is_root_run(config: RunnableConfig) -> bool:
    """Tell whether the call comes from the root loop of a run.

    ``get_state`` and ``update_state`` carry no run marker; calls made from inside a task carry
    a task marker as well.
    """
    configurable = config["configurable"]
    return (
        RUN_MARKER in configurable
        and TASK_MARKER not in configurable
        and not configurable.get("checkpoint_ns")
    )


def is_exit_run(config: RunnableConfig) -> bool:
    """Tell whether the call comes from a run with ``durability="exit"``."""
    return config["configurable"].get(DURABILITY) == "exit"


def named_refs(config: RunnableConfig) -> tuple[Ref, ...]:
    """List what ``config`` names: its own checkpoint and those of its ``checkpoint_map``."""
    ref = Ref.of(config)
    named: Mapping[str, str] = config["configurable"].get("checkpoint_map") or {}
    refs = [Ref(ref.thread_id, ns, cid) for ns, cid in named.items() if cid]
    if ref.checkpoint_id is not None:
        refs.append(ref)
    return tuple(dict.fromkeys(refs))


def readdressed(config: RunnableConfig, checkpoint_id: str) -> RunnableConfig:
    """Copy ``config`` with another checkpoint id, and change nothing else."""
    copy = config.copy()
    copy["configurable"] = {**config["configurable"], "checkpoint_id": checkpoint_id}
    return copy
