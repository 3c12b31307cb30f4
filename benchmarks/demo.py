"""Thirty turns of a real agent on two SQLite files: the bare saver, and the same saver wrapped.

After each turn the application records how long the run took, as one more checkpoint. Prints what
was stored, draws it, and then resumes the conversation from the file in a new process.

    python -m benchmarks.demo [--turns N] [--output DIRECTORY]
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from langgraph.checkpoint.sqlite import SqliteSaver

from benchmarks.assistant import build, duration_leaf, question
from retaining_saver import RetainingSaver

THREAD: Any = {"configurable": {"thread_id": "demo"}}
SAVERS: dict[str, Callable[[SqliteSaver], Any]] = {
    "bare saver": lambda saver: saver,
    "RetainingSaver": RetainingSaver,
}
DURABILITIES = {
    "async": "every step stored (LangGraph's default)",
    "exit": 'one checkpoint per turn (durability="exit")',
}


@dataclass
class Measured:
    """What one saver stored: checkpoint rows and their bytes after each turn."""

    path: Path
    rows: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)


@contextmanager
def opened(path: Path) -> Iterator[SqliteSaver]:
    """Open a bare saver on a file."""
    with closing(sqlite3.connect(path, check_same_thread=False)) as connection:
        yield SqliteSaver(connection)


def converse(
    path: Path, wrap: Callable[[SqliteSaver], Any], durability: str, turns: int
) -> Measured:
    """Hold the conversation on a new file, recording a duration after each turn."""
    measured = Measured(path)
    with opened(path) as inner:
        saver = wrap(inner)
        graph = build(saver)
        for turn in range(turns):
            graph.invoke(question(turn), THREAD, durability=durability)
            saver.put(*duration_leaf(saver.get_tuple(THREAD), f"run-{turn + 1}", 2 + turn % 9))
            rows, size = inner.conn.execute(
                "SELECT count(*), sum(length(checkpoint) + length(metadata)) FROM checkpoints"
            ).fetchone()
            measured.rows.append(rows)
            measured.size.append(size)
    return measured


def resume(path: Path) -> dict[str, Any]:
    """Open the file anew, read what was said and what was recorded, and hold one more turn."""
    with opened(path) as inner:
        saver = RetainingSaver(inner)
        graph = build(saver)
        messages = graph.get_state(THREAD).values["messages"]
        turns = sum(message.type == "human" for message in messages)
        history = saver.run_history(THREAD)
        after = graph.invoke(question(turns), THREAD)["messages"]
        return {
            "turns": turns,
            "messages": len(messages),
            "last answer": messages[-1].content,
            "durations": history.durations,
            "next answer": after[-1].content,
            "messages after it": len(after),
        }


def last_answer(path: Path) -> str:
    """Read the last answer with the bare saver."""
    with opened(path) as inner:
        return str(build(inner).get_state(THREAD).values["messages"][-1].content)


def table(durability: str, measured: dict[str, Measured], turns: int) -> None:
    """Print what each saver stored."""
    print(f"\n{DURABILITIES[durability]}, {turns} turns")
    print(f"  {'':<16}{'rows':>7}{'per turn':>10}{'bytes':>14}{'per turn':>12}{'file':>14}")
    for name, one in measured.items():
        rows, size, on_disk = one.rows[-1], one.size[-1], one.path.stat().st_size
        print(
            f"  {name:<16}{rows:>7,}{rows / turns:>10.2f}{size:>14,}{size / turns:>12,.0f}"
            f"{on_disk:>14,}"
        )
    bare, ours = measured.values()
    rows, size = bare.rows[-1] - ours.rows[-1], bare.size[-1] - ours.size[-1]
    print(
        f"  {'saved':<16}{rows:>7,}{'':>10}{size:>14,}"
        f"   = {rows / bare.rows[-1]:.0%} of the rows, {size / bare.size[-1]:.0%} of the bytes"
    )


def draw(results: dict[str, dict[str, Measured]], turns: int, path: Path) -> None:
    """Draw stored bytes over turns."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(11, 4.2), layout="constrained")
    styles = {"bare saver": ("#b5484b", "--"), "RetainingSaver": ("#2f6f8f", "-")}
    for axis, (durability, measured) in zip(axes, results.items(), strict=True):
        for name, one in measured.items():
            color, line = styles[name]
            megabytes = [size / 1e6 for size in one.size]
            axis.plot(range(1, turns + 1), megabytes, line, color=color, label=name)
            label = f" {one.rows[-1]} rows\n {megabytes[-1]:.1f} MB"
            axis.text(turns, megabytes[-1], label, color=color, va="center")
        axis.set(title=DURABILITIES[durability], xlabel="turns", ylabel="MB in checkpoints")
        axis.set(ylim=(0, None), xlim=(0, turns * 1.22))
        axis.grid(alpha=0.3)
        axis.legend(loc="upper left", frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="Show what is saved on an embedded database.")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    parser.add_argument("--resume", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.resume:
        print(json.dumps(resume(options.resume)))
        return
    results = run(options.turns, options.output)
    for durability, measured in results.items():
        table(durability, measured, options.turns)
    picture = options.output / "storage.png"
    draw(results, options.turns, picture)
    print(f"\nPicture: {picture}")
    show_resumed(results["async"], options.turns)


def run(turns: int, output: Path) -> dict[str, dict[str, Measured]]:
    """Hold every conversation, each on a new file."""
    output.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Measured]] = {}
    for durability in DURABILITIES:
        results[durability] = {}
        for name, wrap in SAVERS.items():
            path = output / f"{name.split()[0].lower()}-{durability}.sqlite"
            path.unlink(missing_ok=True)
            results[durability][name] = converse(path, wrap, durability, turns)
    return results


def show_resumed(measured: dict[str, Measured], turns: int) -> None:
    """Go on with the wrapped conversation in a new process, and check that nothing is lost."""
    expected = last_answer(measured["bare saver"].path)
    path = measured["RetainingSaver"].path
    command = [sys.executable, "-m", "benchmarks.demo", "--resume", str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    resumed = json.loads(done.stdout)
    print(f"\nResumed from {path} in a new process")
    print(f"  last answer   {resumed['last answer']}")
    print(f"  on the bare   {expected}")
    print(f"  run history   {len(resumed['durations'])} durations: {_short(resumed['durations'])}")
    print(f"  went on       {resumed['next answer']}")
    assert resumed["last answer"] == expected
    assert resumed["durations"] == {f"run-{t + 1}": 2 + t % 9 for t in range(turns)}
    assert (resumed["turns"], resumed["messages"]) == (turns, 6 * turns)
    assert resumed["messages after it"] == 6 * (turns + 1)
    print(
        f"  checked       all {turns} turns, {6 * turns} messages and {turns} durations are there"
    )


def _short(durations: dict[str, int]) -> str:
    first, *_, last = durations.items()
    return f"{first[0]} took {first[1]} s ... {last[0]} took {last[1]} s"


if __name__ == "__main__":
    main()
