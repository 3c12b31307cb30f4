"""The adapter to a saver's rows is found by the saver's class."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any, cast

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.checkpoint.postgres.shallow import AsyncShallowPostgresSaver, ShallowPostgresSaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

from retaining_saver import backends
from retaining_saver.backends import Backend, find_backend, refusal, register_backend
from retaining_saver.backends.memory import MemoryBackend
from retaining_saver.backends.postgres import PostgresBackend
from retaining_saver.backends.sqlite import AsyncSqliteBackend, SqliteBackend

SHIPPED: list[tuple[type[Any], type[Backend]]] = [
    (InMemorySaver, MemoryBackend),
    (SqliteSaver, SqliteBackend),
    (AsyncSqliteSaver, AsyncSqliteBackend),
    (PostgresSaver, PostgresBackend),
    (AsyncPostgresSaver, PostgresBackend),
]


class OwnBackend(MemoryBackend):
    """An adapter of a user's."""


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give each test a registry of its own."""
    monkeypatch.setattr(backends, "_registered", {})
    backends._load_entry_points.cache_clear()
    yield
    backends._load_entry_points.cache_clear()


def made(saver_class: type[Any]) -> Any:
    """Make a saver without a connection: only its class is looked at."""
    return object.__new__(saver_class)


@pytest.mark.parametrize(("saver_class", "backend_class"), SHIPPED)
def test_every_shipped_saver_has_its_adapter(
    saver_class: type[Any], backend_class: type[Backend]
) -> None:
    assert backend_class is find_backend(made(saver_class))
    assert refusal(made(saver_class)) is None


@pytest.mark.parametrize(("saver_class", "backend_class"), SHIPPED)
def test_a_subclass_has_its_parent_s_adapter(
    saver_class: type[Any], backend_class: type[Backend]
) -> None:
    assert backend_class is find_backend(made(type("Sub", (saver_class,), {})))


@pytest.mark.parametrize("saver_class", [ShallowPostgresSaver, AsyncShallowPostgresSaver])
def test_a_saver_of_single_checkpoints_is_refused_with_a_sentence(saver_class: type[Any]) -> None:
    saver = made(type("Sub", (saver_class,), {}))
    assert find_backend(saver) is None
    said = refusal(saver)
    assert said is not None
    assert said.startswith(f"{saver_class.__name__} keeps one checkpoint per thread")


def test_an_unknown_saver_has_no_adapter_yet() -> None:
    from langgraph.checkpoint.base import BaseCheckpointSaver

    saver = made(type("Unknown", (BaseCheckpointSaver,), {}))
    assert find_backend(saver) is None
    assert refusal(saver) is None


def test_a_registered_adapter_wins_and_the_nearest_class_decides() -> None:
    sub: Any = type("Sub", (InMemorySaver,), {})
    register_backend(sub, OwnBackend)
    assert OwnBackend is find_backend(made(sub))
    assert OwnBackend is find_backend(made(type("SubSub", (sub,), {})))
    assert MemoryBackend is find_backend(InMemorySaver())
    register_backend(InMemorySaver, OwnBackend)
    assert OwnBackend is find_backend(InMemorySaver())


def test_a_later_registration_replaces_an_earlier_one() -> None:
    register_backend(InMemorySaver, OwnBackend)
    register_backend(InMemorySaver, MemoryBackend)
    assert MemoryBackend is find_backend(InMemorySaver())


def test_an_adapter_for_a_refused_saver_lifts_the_refusal() -> None:
    register_backend(ShallowPostgresSaver, OwnBackend)
    assert OwnBackend is find_backend(made(ShallowPostgresSaver))
    assert refusal(made(ShallowPostgresSaver)) is None


def test_only_savers_have_adapters() -> None:
    with pytest.raises(TypeError, match="belongs to a saver class"):
        register_backend(cast(Any, dict), OwnBackend)


def announce(register: Any) -> None:
    """What another package's entry point names."""
    register(InMemorySaver, OwnBackend)


def announced(monkeypatch: pytest.MonkeyPatch, *functions: str) -> None:
    found = [EntryPoint(f, f"{__name__}:{f}", backends.ENTRY_POINTS) for f in functions]
    monkeypatch.setattr(
        backends, "entry_points", lambda *, group: found if group == backends.ENTRY_POINTS else []
    )
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or _this_module())


def _this_module() -> Any:
    from types import ModuleType

    module = ModuleType(__name__)
    vars(module).update(globals())
    return module


def test_a_package_adds_its_adapter_by_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    announced(monkeypatch, "announce")
    assert OwnBackend is find_backend(InMemorySaver())


def test_a_broken_entry_point_is_logged_and_stops_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    announced(monkeypatch, "missing", "announce")
    assert OwnBackend is find_backend(InMemorySaver())
    assert ["the backend entry point 'missing' failed to load"] == caplog.messages


def test_no_driver_is_imported_for_a_saver_that_nobody_uses() -> None:
    code = """
import sys
from langgraph.checkpoint.memory import InMemorySaver
from retaining_saver.backends import find_backend
find_backend(InMemorySaver())
print(sorted({"psycopg", "aiosqlite", "langgraph.checkpoint.sqlite"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert "[]\n" == done.stdout
