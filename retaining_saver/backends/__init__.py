"""Find the adapter to a saver's rows.

The four savers that LangGraph ships are known by name, so that no driver is imported for a saver
that nobody uses. Other adapters are added by ``register_backend``, or by a package that names a
function in the entry-point group ``retaining_saver.backends``; it is called with
``register_backend`` before the first lookup.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from langgraph.checkpoint.base import BaseCheckpointSaver

from retaining_saver.backends.base import Backend

__all__ = ["ENTRY_POINTS", "Backend", "find_backend", "refusal", "register_backend"]

logger = logging.getLogger("retaining_saver")

ENTRY_POINTS = "retaining_saver.backends"

Saver = BaseCheckpointSaver[Any]

_SHIPPED = {
    "langgraph.checkpoint.memory.InMemorySaver": "memory.MemoryBackend",
    "langgraph.checkpoint.sqlite.SqliteSaver": "sqlite.SqliteBackend",
    "langgraph.checkpoint.sqlite.aio.AsyncSqliteSaver": "sqlite.AsyncSqliteBackend",
    "langgraph.checkpoint.postgres.PostgresSaver": "postgres.PostgresBackend",
    "langgraph.checkpoint.postgres.aio.AsyncPostgresSaver": "postgres.PostgresBackend",
}
_SHALLOW = {
    "langgraph.checkpoint.postgres.shallow.ShallowPostgresSaver",
    "langgraph.checkpoint.postgres.shallow.AsyncShallowPostgresSaver",
}
_registered: dict[type[Any], type[Backend]] = {}


def register_backend(saver_class: type[Any], backend_class: type[Backend]) -> None:
    """Use ``backend_class`` for savers of ``saver_class`` and of its subclasses.

    The class nearest to the saver's own decides; a registration wins over what ships with this
    library, and a later one over an earlier one.
    """
    if not issubclass(saver_class, BaseCheckpointSaver):
        raise TypeError(f"A backend belongs to a saver class, but {saver_class!r} is none.")
    _registered[saver_class] = backend_class


def find_backend(saver: Saver) -> type[Backend] | None:
    """Return the backend class for a saver, or ``None`` if there is none."""
    _load_entry_points()
    for saver_class in type(saver).__mro__:
        name = _name(saver_class)
        if saver_class in _registered:
            return _registered[saver_class]
        if name in _SHALLOW:
            return None
        if name in _SHIPPED:
            return _import(_SHIPPED[name])
    return None


def refusal(saver: Saver) -> str | None:
    """Say why a saver has no backend and will have none; ``None`` where one may yet be added."""
    for saver_class in type(saver).__mro__:
        if saver_class in _registered:
            return None
        if _name(saver_class) in _SHALLOW:
            return (
                f"{saver_class.__name__} keeps one checkpoint per thread: it has nothing to "
                "reclaim and no history to protect. Use PostgresSaver or AsyncPostgresSaver."
            )
    return None


@cache
def _load_entry_points() -> None:
    for entry_point in entry_points(group=ENTRY_POINTS):
        try:
            entry_point.load()(register_backend)
        except Exception:
            # Another package's adapter must not stop a saver that does not use it.
            logger.exception("the backend entry point %r failed to load", entry_point.name)


def _name(saver_class: type[Any]) -> str:
    return f"{saver_class.__module__}.{saver_class.__qualname__}"


def _import(path: str) -> type[Backend]:
    module, _, name = path.rpartition(".")
    backend: type[Backend] = getattr(import_module(f"{__name__}.{module}"), name)
    return backend
