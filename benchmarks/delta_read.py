"""How long reading the state of a long thread of delta channels takes, beside the bare saver.

Nothing is snapshotted in the measured thread, so the bare saver rebuilds the whole history at each
read. Both arms read the same rows in one process, in turn; who goes first changes from read to
read. ``warm`` reads a head whose history is cached. ``next turn`` reads a head that is one turn
newer than the cached one. ``cold`` reads with an empty cache. ``ratio`` is the median over rounds,
``best_ratio`` is that of each arm's fastest round, and ``cpu_ratio`` of processor time in this
process: on a machine with other work to do they say more, though the last does not see what a
database server does.
"""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Any, NamedTuple, TypedDict

from langchain_core.messages import AIMessage, HumanMessage
from langgraph.channels.delta import DeltaChannel
from langgraph.graph import START, StateGraph
from langgraph.graph.message import _messages_delta_reducer

from benchmarks import databases
from retaining_saver import RetainingSaver

NEVER = 1_000_000
LARGE = {"turns": (200, 400, 1000), "rounds": 30}


def extend(state: list[Any], writes: Sequence[list[Any]]) -> list[Any]:
    """Append every write."""
    grown = list(state)
    for write in writes:
        grown.extend(write)
    return grown


def _reduced(state: Any, writes: Sequence[Any]) -> Any:
    return _messages_delta_reducer(state, list(writes))


class Texts(TypedDict):
    said: Annotated[list[str], DeltaChannel(extend, snapshot_frequency=NEVER)]


class Messages(TypedDict):
    said: Annotated[list[Any], DeltaChannel(_reduced, snapshot_frequency=NEVER)]


STATES: dict[str, tuple[type[Any], Callable[[str], Any], Callable[[str], Any]]] = {
    "texts": (Texts, str, str),
    "messages": (Messages, HumanMessage, AIMessage),
}


class Took(NamedTuple):
    """Seconds by the clock, and of processor time in this process."""

    wall: float
    cpu: float


Pairs = list[tuple[Took, Took]]
"""Of each round: what the bare saver took, and the wrapped one."""


def measure(turns: Sequence[int] = (200,), rounds: int = 15) -> Iterator[dict[str, Any]]:
    """Time each database, kind of state and length; yield a record for each way of reading."""
    for name, opened in _DATABASES.items():
        for state in STATES:
            with opened() as bare:
                thread = _Thread(bare, state)
                for length in sorted(turns):
                    thread.grow_to(length)
                    for scenario in ("warm", "next turn", "cold"):
                        pairs = [thread.timed(scenario, flip=i % 2 == 1) for i in range(rounds)]
                        yield _record(name, state, length, scenario, pairs)


class _Thread:
    """One conversation, with a graph on the bare saver and one on the wrapped saver."""

    def __init__(self, bare: Any, state: str) -> None:
        self._schema, self._asks, self._answers = STATES[state]
        self._saver = bare
        self._bare = self._graph(bare)
        self._wrapped = self._graph(RetainingSaver(bare))
        self._config = {"configurable": {"thread_id": uuid.uuid4().hex}}
        self._turns = 0

    def grow_to(self, turns: int) -> None:
        """Hold turns on the wrapped saver, which is the faster way to come to a long thread."""
        while self._turns < turns:
            self._hold_turn()

    def timed(self, scenario: str, *, flip: bool) -> tuple[Took, Took]:
        """Return how long the bare and the wrapped saver take for one ``get_state``."""
        if scenario == "cold":
            self._wrapped = self._graph(RetainingSaver(self._saver))
        else:
            self._wrapped.get_state(self._config)
        if scenario == "next turn":
            self._hold_turn(self._bare)
        graphs = [self._bare, self._wrapped]
        times = {id(graph): self._read(graph) for graph in (reversed(graphs) if flip else graphs)}
        return times[id(self._bare)], times[id(self._wrapped)]

    def _read(self, graph: Any) -> Took:
        started = time.perf_counter(), time.process_time()
        state = graph.get_state(self._config)
        took = Took(time.perf_counter() - started[0], time.process_time() - started[1])
        assert 2 * self._turns == len(state.values["said"])
        return took

    def _hold_turn(self, graph: Any = None) -> None:
        question = self._asks(f"What about the part number {self._turns} of this long story?")
        (graph or self._wrapped).invoke({"said": [question]}, self._config, durability="sync")
        self._turns += 1

    def _graph(self, saver: Any) -> Any:
        builder: Any = StateGraph(self._schema)
        told = "It has been told before, in nearly the same words. " * 3

        def answer(_state: Any) -> dict[str, Any]:
            return {"said": [self._answers(told)]}

        builder.add_node("answer", answer)
        builder.add_edge(START, "answer")
        return builder.compile(checkpointer=saver)


def _record(database: str, state: str, turns: int, scenario: str, pairs: Pairs) -> dict[str, Any]:
    ratios = sorted(wrapped.wall / bare.wall for bare, wrapped in pairs)
    return {
        "database": database,
        "state": state,
        "turns": turns,
        "scenario": scenario,
        "rounds": len(pairs),
        "bare_ms": round(statistics.median(bare.wall for bare, _ in pairs) * 1e3, 3),
        "wrapped_ms": round(statistics.median(wrapped.wall for _, wrapped in pairs) * 1e3, 3),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_low": round(ratios[len(ratios) // 10], 4),
        "ratio_high": round(ratios[-1 - len(ratios) // 10], 4),
        "best_ratio": round(min(w.wall for _, w in pairs) / min(b.wall for b, _ in pairs), 4),
        "cpu_ratio": round(statistics.median(w.cpu / b.cpu for b, w in pairs), 4),
    }


_DATABASES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "SqliteSaver": databases.sqlite,
    "PostgresSaver": databases.postgres,
}


def draw(records: list[dict[str, Any]], path: Any) -> None:
    """Draw the ratios of the longest thread, one panel a database."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    longest = max(record["turns"] for record in records)
    figure, axes = plt.subplots(1, len(_DATABASES), figsize=(10, 3), layout="constrained")
    for axis, database in zip(axes, _DATABASES, strict=True):
        shown = [r for r in records if (r["database"], r["turns"]) == (database, longest)]
        shown.reverse()
        labels = [f"{r['state']}, {r['scenario']}" for r in shown]
        axis.barh(labels, [r["ratio"] for r in shown], color="#2f6f8f")
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set(title=f"{database}, {longest} turns", xlabel="time of get_state, ratio to bare")
        axis.grid(axis="x", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
