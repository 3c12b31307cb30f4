"""The demo does what it says, from the conversation to the picture."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)  # It draws, on whatever machine.
def test_the_demo_saves_a_row_a_turn_and_resumes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.demo", "--turns", "3", "--output", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    assert ["24", "6"] == _rows(done.stdout, "bare saver")
    assert ["22", "4"] == _rows(done.stdout, "RetainingSaver")
    assert "all 3 turns, 18 messages and 3 durations are there" in done.stdout
    assert (tmp_path / "storage.png").read_bytes().startswith(b"\x89PNG")


def _rows(printed: str, saver: str) -> list[str]:
    lines = [line.strip() for line in printed.splitlines()]
    return [line[len(saver) :].split()[0] for line in lines if line.startswith(saver)]
