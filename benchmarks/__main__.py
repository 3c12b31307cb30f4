"""Run every benchmark with its defaults, write what it measured, draw it.

    python -m benchmarks [NAME ...] [--large] [--draw-only]

A benchmark is a module of this package with ``measure() -> Iterator[record]`` and, for a picture,
``draw(records, path)``. ``measure`` may name the options of a longer run in ``LARGE``. Results are
JSON lines, each with the versions and the machine, under ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import benchmarks

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    "langgraph",
    "langgraph-checkpoint",
    "langgraph-checkpoint-sqlite",
    "langgraph-checkpoint-postgres",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the benchmarks.")
    parser.add_argument("names", nargs="*", help="which; all of them without a name")
    parser.add_argument("--large", action="store_true", help="the long run, for a quiet machine")
    parser.add_argument("--draw-only", action="store_true", help="draw what was measured before")
    options = parser.parse_args()
    found = dict(_benchmarks())
    if unknown := set(options.names) - set(found):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(found)}")
    RESULTS.mkdir(exist_ok=True)
    for name in options.names or found:
        module = found[name]
        path = RESULTS / f"{name}.jsonl"
        if not options.draw_only:
            arguments = getattr(module, "LARGE", {}) if options.large else {}
            _write(name, module.measure(**arguments), path)
        records = [json.loads(line) for line in path.read_text().splitlines()]
        if hasattr(module, "draw"):
            module.draw(records, path.with_suffix(".png"))


def _benchmarks() -> Iterator[tuple[str, Any]]:
    for found in iter_modules(benchmarks.__path__):
        if found.name != "__main__":
            module = importlib.import_module(f"benchmarks.{found.name}")
            if hasattr(module, "measure"):
                yield found.name, module


def _write(name: str, records: Iterator[dict[str, Any]], path: Path) -> None:
    started = time.monotonic()
    lines = []
    for record in records:
        print(name, *(f"{key}={value}" for key, value in record.items()), flush=True)
        lines.append(json.dumps({"benchmark": name, **record, **_environment()}))
    path.write_text("\n".join(lines) + "\n")
    print(f"{name}: {len(lines)} records in {time.monotonic() - started:.0f} s -> {path}")


def _environment() -> dict[str, Any]:
    return {
        "versions": {package: version(package) for package in PACKAGES},
        "python": platform.python_version(),
        "machine": {
            "system": platform.system(),
            "processor": platform.machine(),
            "cpus": os.cpu_count(),
            # What else the machine did: above the number of cpus, times are noise.
            "load": round(os.getloadavg()[0], 1),
        },
    }


if __name__ == "__main__":
    main()
