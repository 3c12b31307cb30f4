"""Every example runs by itself, as a reader would run it, and checks itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import servers

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(ROOT.glob("examples/*.py"))


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_runs(example: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    source = example.read_text()
    if "DATABASE_URL" in source or servers.POSTGRES in source:
        url = request.getfixturevalue("empty_postgres_url")
        environment |= {"DATABASE_URL": url, servers.POSTGRES: url}
    if "REDIS_URL" in source or servers.REDIS in source:
        url = request.getfixturevalue("redis_url")
        environment |= {"REDIS_URL": url, servers.REDIS: url}
    done = subprocess.run(
        [sys.executable, str(example)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert 0 == done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_is_short_and_checks_itself(example: Path) -> None:
    source = example.read_text()
    assert len(source.splitlines()) < 60
    assert "assert " in source
