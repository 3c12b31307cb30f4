"""Clones of savers whose classes are users' own."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from langgraph.checkpoint.sqlite import SqliteSaver

from retaining_saver.backends.clones import clone
from tests.support.threads import named


class _Slotted(SqliteSaver):
    __slots__ = ("__mine", "tenant", "unset")

    def __init__(self, connection: sqlite3.Connection, tenant: str = "t") -> None:
        super().__init__(connection)
        self.tenant = tenant
        self.__mine = tenant

    def get_tuple(self, config: Any) -> Any:
        assert self.tenant == self.__mine
        return super().get_tuple(config)


class _LockInASlot(SqliteSaver):
    __slots__ = ("lock",)


class _MadeItsOwnWay(SqliteSaver):
    def __new__(cls, _: sqlite3.Connection) -> _MadeItsOwnWay:
        return super().__new__(cls)


class _KeepsAMethod(SqliteSaver):
    def __init__(self, connection: sqlite3.Connection) -> None:
        super().__init__(connection)
        self._plain: Callable[[Any], Any] = super().get_tuple

    def get_tuple(self, config: Any) -> Any:
        return self._plain(config)


class _KeepsItself(SqliteSaver):
    def __init__(self, connection: sqlite3.Connection) -> None:
        super().__init__(connection)
        self._reader = self

    def get_tuple(self, config: Any) -> Any:
        return SqliteSaver.get_tuple(self._reader, config)


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:", check_same_thread=False)) as opened:
        yield opened


@pytest.mark.parametrize(
    "kind", [_Slotted, _LockInASlot, _MadeItsOwnWay, _KeepsAMethod, _KeepsItself]
)
def test_a_saver_of_any_class_reads_while_its_lock_is_held(
    kind: type[SqliteSaver], connection: sqlite3.Connection
) -> None:
    saver = kind(connection)
    saver.setup()
    read: list[Any] = []

    def reading() -> None:
        with saver.lock:
            read.append(clone(saver, lock=threading.Lock()).get_tuple(named("t")))

    thread = threading.Thread(target=reading, daemon=True)
    thread.start()
    thread.join(10)
    assert [None] == read
    assert not saver.lock.locked()
