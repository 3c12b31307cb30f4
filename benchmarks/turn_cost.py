"""How long a turn takes on the wrapped saver, as a ratio to the bare one.

Three arms hold the same conversations on the same database in one process: the bare saver, the
bare saver once more (what the ratio of two equal things looks like on this machine), and the
wrapped one. In each round every arm does one turn; who goes first changes from round to round.
``ratio`` is of time by the clock, ``cpu_ratio`` of processor time in this process: it does not
see other processes that keep the machine busy, nor the work that the database server does.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from benchmarks import databases
from benchmarks.assistant import build, duration_leaf, question
from retaining_saver import RetainingSaver

ARMS: dict[str, Callable[[Any], Any]] = {
    "bare": lambda saver: saver,
    "bare again": lambda saver: saver,
    "wrapped": RetainingSaver,
}
SCENARIOS = {
    "plain": "turns; no metadata-only checkpoint is ever written",
    "recorded": "turns, each followed by a duration leaf; reading the head for it is timed too",
}
Times = dict[str, list[tuple[float, float]]]
"""By arm: time by the clock and processor time of each turn, in seconds."""

LARGE = {"conversations": 60, "turns": 12}


def measure(conversations: int = 15, turns: int = 8) -> Iterator[dict[str, Any]]:
    """Time every database and scenario; yield one record for each arm."""
    for scenario in SCENARIOS:
        for name, opened in _DATABASES.items():
            times = asyncio.run(_time(opened, scenario, conversations, turns))
            yield from _records(name, scenario, times)


async def _time(
    opened: Callable[[], AbstractAsyncContextManager[Any]],
    scenario: str,
    conversations: int,
    turns: int,
) -> Times:
    times: Times = {arm: [] for arm in ARMS}
    async with opened() as saver:
        wrapped = {arm: wrap(saver) for arm, wrap in ARMS.items()}
        graphs = {arm: build(one) for arm, one in wrapped.items()}
        order = list(ARMS)
        for conversation in range(conversations + 1):
            for turn in range(turns):
                order.append(order.pop(0))
                for arm in order:
                    config = {"configurable": {"thread_id": f"{arm}-{conversation}"}}
                    started = time.perf_counter(), time.process_time()
                    await _turn(graphs[arm], wrapped[arm], config, turn, scenario)
                    if conversation:  # The first one warms everything up.
                        ended = time.perf_counter(), time.process_time()
                        times[arm].append((ended[0] - started[0], ended[1] - started[1]))
    return times


async def _turn(graph: Any, saver: Any, config: Any, turn: int, scenario: str) -> None:
    if _is_async(saver):
        await graph.ainvoke(question(turn), config)
        if scenario == "recorded":
            await saver.aput(*duration_leaf(await saver.aget_tuple(config), f"run-{turn}", 3))
    else:
        # No other task waits on this loop, and another thread would add noise.
        graph.invoke(question(turn), config)
        if scenario == "recorded":
            saver.put(*duration_leaf(saver.get_tuple(config), f"run-{turn}", 3))


def _is_async(saver: Any) -> bool:
    return type(getattr(saver, "inner", saver)).__name__.startswith("Async")


def _records(database: str, scenario: str, times: Times) -> Iterator[dict[str, Any]]:
    for arm, measured in times.items():
        wall = [(ours[0], bare[0]) for ours, bare in zip(measured, times["bare"], strict=True)]
        cpu = [(ours[1], bare[1]) for ours, bare in zip(measured, times["bare"], strict=True)]
        low, high = _interval(wall)
        cpu_low, cpu_high = _interval(cpu)
        yield {
            "database": database,
            "scenario": scenario,
            "arm": arm,
            "turns": len(measured),
            "median_ms": round(statistics.median(ours for ours, _ in wall) * 1e3, 3),
            "ratio": round(_ratio(wall), 4),
            "ratio_low": round(low, 4),
            "ratio_high": round(high, 4),
            "cpu_ratio": round(_ratio(cpu), 4),
            "cpu_ratio_low": round(cpu_low, 4),
            "cpu_ratio_high": round(cpu_high, 4),
        }


def _ratio(pairs: list[tuple[float, float]]) -> float:
    """Return the median over pairs of the same round: a pause of the machine spoils one pair."""
    return statistics.median(ours / bare for ours, bare in pairs)


def _interval(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """Return where 95% of the ratios of resampled rounds lie."""
    chance = random.Random(0)
    ratios = sorted(_ratio(chance.choices(pairs, k=len(pairs))) for _ in range(500))
    return ratios[12], ratios[-13]


@asynccontextmanager
async def _sync_sqlite() -> AsyncIterator[Any]:
    with databases.sqlite() as saver:
        yield saver


@asynccontextmanager
async def _sync_postgres() -> AsyncIterator[Any]:
    with databases.postgres() as saver:
        yield saver


_DATABASES: dict[str, Callable[[], AbstractAsyncContextManager[Any]]] = {
    "SqliteSaver": _sync_sqlite,
    "AsyncSqliteSaver": databases.asqlite,
    "PostgresSaver": _sync_postgres,
    "AsyncPostgresSaver": databases.apostgres,
}


def draw(records: list[dict[str, Any]], path: Any) -> None:
    """Draw the ratios with their intervals: a column a scenario, a row a kind of time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    kinds = {"ratio": "time by the clock, ratio", "cpu_ratio": "processor time, ratio"}
    figure, axes = plt.subplots(2, 2, figsize=(11, 6), layout="constrained", sharey=True)
    for row, (kind, label) in zip(axes, kinds.items(), strict=True):
        for axis, scenario in zip(row, SCENARIOS, strict=True):
            shown = [record for record in records if record["scenario"] == scenario]
            _draw_ratios(axis, shown, kind)
            axis.set(title=f"{scenario} turns", xlabel=label)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    figure.savefig(path, dpi=120)


def _draw_ratios(axis: Any, records: list[dict[str, Any]], kind: str) -> None:
    colors = {"bare again": "#8a8a8a", "wrapped": "#2f6f8f"}
    for shift, (arm, color) in enumerate(colors.items()):
        shown = [record for record in records if record["arm"] == arm]
        axis.errorbar(
            [r[kind] for r in shown],
            [position + 0.15 - 0.3 * shift for position in range(len(shown))],
            xerr=[
                [r[kind] - r[f"{kind}_low"] for r in shown],
                [r[f"{kind}_high"] - r[kind] for r in shown],
            ],
            fmt="o",
            color=color,
            label=f"{arm} / bare",
            capsize=3,
        )
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_yticks(range(len(_DATABASES)), list(_DATABASES))
    axis.grid(axis="x", alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
