"""Events reach every hook, and no hook can fail the work that it watches."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import replace
from datetime import datetime, timezone

import pytest

from retaining_saver.events import (
    CacheFailed,
    DeleteFailed,
    Event,
    PinFailed,
    Reclaimed,
    Refused,
    emit,
    log_hook,
)

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
RECLAIMED = Reclaimed(thread_id="t", checkpoint_ns="", checkpoint_id="c", at=AT, parent_id="p")
REFUSED = Refused(thread_id="t", checkpoint_ns="", checkpoint_id="c", at=AT, outcome="pinned")


def failed(kind: type[CacheFailed | DeleteFailed | PinFailed]) -> Event:
    return kind(
        thread_id="t", checkpoint_ns="", checkpoint_id=None, at=AT, error_type="TimeoutError"
    )


def test_every_hook_sees_every_event_in_order() -> None:
    one: list[Event] = []
    other: list[Event] = []
    emit([one.append, other.append], [RECLAIMED, REFUSED])
    assert [RECLAIMED, REFUSED] == one == other


def test_a_hook_that_raises_is_logged_and_the_others_still_hear(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(event: Event) -> None:
        raise RuntimeError("the hook's own trouble")

    seen: list[Event] = []
    with caplog.at_level(logging.DEBUG, logger="retaining_saver"):
        emit([broken, seen.append], [RECLAIMED, REFUSED])
    assert [RECLAIMED, REFUSED] == seen
    assert [logging.ERROR, logging.ERROR] == [record.levelno for record in caplog.records]
    assert "Reclaimed" in caplog.records[0].getMessage()
    assert "the hook's own trouble" in str(caplog.records[0].exc_info)


def test_a_hook_that_interrupts_the_process_is_not_ignored() -> None:
    def interrupted(event: Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        emit([interrupted], [RECLAIMED])


@pytest.mark.parametrize("kind", [CacheFailed, DeleteFailed, PinFailed])
def test_the_log_hook_warns_of_failures(
    caplog: pytest.LogCaptureFixture, kind: type[CacheFailed | DeleteFailed | PinFailed]
) -> None:
    with caplog.at_level(logging.DEBUG, logger="retaining_saver"):
        log_hook(failed(kind))
    assert [logging.WARNING] == [record.levelno for record in caplog.records]
    assert "error_type='TimeoutError'" in caplog.text


def test_the_log_hook_writes_everything_else_as_debug(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="retaining_saver"):
        log_hook(REFUSED)
    assert [logging.DEBUG] == [record.levelno for record in caplog.records]
    assert (
        f"Refused thread_id='t' checkpoint_ns='' checkpoint_id='c' at={AT} outcome='pinned'"
        == caplog.records[0].getMessage()
    )


def test_no_id_breaks_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    hostile = replace(REFUSED, thread_id="t\nERROR forged \ud800")
    with caplog.at_level(logging.DEBUG, logger="retaining_saver"):
        log_hook(hostile)
    message = caplog.records[0].getMessage()
    assert 1 == len(message.splitlines())
    assert message == message.encode().decode()


def test_the_log_hook_is_silent_where_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="retaining_saver"):
        log_hook(RECLAIMED)
    assert [] == caplog.records


def test_events_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RECLAIMED.parent_id = "other"  # type: ignore[misc]  # what the test is about
