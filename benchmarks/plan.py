"""Whether planning a thread takes time in proportion to its length.

Threads of 10,000 and of 100,000 checkpoints are planned in turn, from records that were made
before: nothing is read from a database. ``ratio`` is the processor time of the long one divided by
that of the short one of the same round; ten is proportional. The garbage collector runs as in any
process.
"""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

from retaining_saver.entries import NO_WRITES, StoredThread, ThreadRecords, Writes
from retaining_saver.plan import plan
from retaining_saver.policy import RetentionPolicy

LARGE = {"short": 50_000, "rounds": 25}

TIMES = 10
"""How much longer the long thread is."""
NOW = datetime(2025, 1, 2, tzinfo=timezone.utc)
DELTA = ("messages", "files")
_ASKED = Writes(2, frozenset(DELTA))


def measure(short: int = 10_000, rounds: int = 15) -> Iterator[dict[str, Any]]:
    """Plan both threads of each shape by each policy; yield one record for each."""
    for shape, build in SHAPES.items():
        threads = build(short), build(short * TIMES)
        for name, policy in POLICIES.items():
            yield {
                "shape": shape,
                "policy": name,
                "short": short,
                "long": short * TIMES,
                "rounds": rounds,
                **_ratio(*threads, policy, rounds),
                "bytes_per_entry": round(_peak(threads[1], policy) / (short * TIMES)),
            }


def _ratio(
    short: StoredThread, long: StoredThread, policy: RetentionPolicy, rounds: int
) -> dict[str, float]:
    pairs = []
    for number in range(rounds + 1):
        pair = _seconds(short, policy), _seconds(long, policy)
        if number:  # The first one warms everything up.
            pairs.append(pair)
    ratios = sorted(long / short for short, long in pairs)
    return {
        "ratio": round(statistics.median(ratios), 2),
        "ratio_low": round(ratios[0], 2),
        "ratio_high": round(ratios[-1], 2),
        "long_s": round(statistics.median(long for _, long in pairs), 3),
    }


def _seconds(thread: StoredThread, policy: RetentionPolicy) -> float:
    started = time.process_time()
    plan(thread, policy, (), NOW)
    return time.process_time() - started


def _peak(thread: StoredThread, policy: RetentionPolicy) -> int:
    gc.collect()
    tracemalloc.start()
    plan(thread, policy, (), NOW)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def _chain(count: int) -> StoredThread:
    """One line of turns, four checkpoints each."""
    thread = _Thread()
    for number in range(count):
        thread.step("input" if number % 4 == 0 else "loop")
    return thread.records.thread()


def _branched(count: int) -> StoredThread:
    """The same with delta channels, forks, recorded runs, and a subgraph that keeps its state."""
    thread = _Thread(DELTA)
    for number in range(count):
        if number % 50 == 49:
            thread.fork()
        elif number % 10 == 9:
            thread.leaf()
        elif number % 5 == 4:
            thread.subgraph()
        else:
            thread.step("input" if number % 10 == 0 else "loop")
    return thread.records.thread()


class _Thread:
    """Adds the records of a thread as runs would add its checkpoints."""

    def __init__(self, delta: tuple[str, ...] = ()) -> None:
        self.records = ThreadRecords("t")
        self._delta = delta
        self._count = 0
        self._turn = 0
        self._last: dict[str, str | None] = {}
        self._line: list[str] = []
        self._state = b""

    def step(self, source: str) -> None:
        self._turn += source == "input"
        self._line.append(self._add("", self._last.get(""), {"source": source}))

    def fork(self) -> None:
        """Go on from an older checkpoint."""
        self._add("", self._line[-20:][0], {"source": "fork"})

    def leaf(self) -> None:
        """Record how long the run took, in a checkpoint of its own."""
        checkpoint_id = _id(self._count)
        run = {f"run-{self._turn}": 3}
        mark = {"kind": "duration", "id": checkpoint_id}
        metadata = {"source": "update", "run_durations": run, "retention": mark}
        self._add("", self._last.get(""), metadata, state=self._state)

    def subgraph(self) -> None:
        parents = {"parents": {"": self._line[-1]}}
        self._add("memory", self._last.get("memory"), {"source": "loop", **parents})

    def _add(
        self, ns: str, parent: str | None, metadata: dict[str, Any], state: bytes | None = None
    ) -> str:
        number, made = self._count, _id(self._count)
        self._count += 1
        self._last[ns] = made
        self._state = number.to_bytes(16, "big") if state is None else state
        counted = {channel: [1, 1] for channel in self._delta}
        snapshot = self._delta if number % 100 == 0 else ()
        self.records.add(
            ns,
            made,
            parent,
            metadata={"step": number, "counters_since_delta_snapshot": counted, **metadata},
            parent_metadata=lambda: None,
            body={"v": 4, "channel_versions": dict.fromkeys(("__start__", *DELTA), self._turn)},
            ts=NOW - timedelta(seconds=1_000_000 - number),
            stored=snapshot,
            snapshots=snapshot,
            fingerprint=self._state,
            # What a fork starts from was written before it; nothing runs from it here.
            writes=_ASKED if self._delta and metadata["source"] == "loop" else NO_WRITES,
        )
        return made


def _id(number: int) -> str:
    digits = f"{number:012x}"
    return f"1ef{digits[:5]}-{digits[5:9]}-6{digits[9:]}-8000-{number:012x}"


SHAPES: dict[str, Callable[[int], StoredThread]] = {"chain": _chain, "branched": _branched}
POLICIES = {
    "the newest 20 turns": RetentionPolicy(keep_last_turns=20),
    "every turn": RetentionPolicy(),
    "everything at once": RetentionPolicy(
        keep_last_turns=20,
        keep_within=timedelta(hours=1),
        keep_where={"starred": True},
        drop_siblings_after=timedelta(hours=2),
        compact_supersteps=True,
        delete_idle_after=timedelta(days=30),
    ),
}
