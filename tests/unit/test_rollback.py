"""Which rows of a checkpoint that is open again go."""

from __future__ import annotations

from uuid import UUID, uuid5

import pytest

from retaining_saver.backends.rewriting import is_undone
from retaining_saver.entries import ERROR, INTERRUPT, NULL_TASK_ID, RESUME
from retaining_saver.planned import Rollback

OPENED = "1ef00000-0000-6000-8000-000000000000"
ASKED = "aaaaaaaa-0000-0000-0000-000000000000"
BESIDE = "12345678-0000-0000-0000-000000000000"
EXITED = "00000003-0000-0000-0000-000000000000"
EXITED_LATER = "ffffffff-0000-0004-0000-000000000000"
INPUT = str(uuid5(UUID(OPENED), "__input__"))


def _undone(
    tasks: tuple[str, ...] | None, rows: list[tuple[str, str]], **options: bool
) -> list[bool]:
    back = Rollback("", OPENED, "reopened", tasks, **options)
    return [is_undone(back, task_id, channel) for task_id, channel in rows]


@pytest.mark.parametrize("task_id", [EXITED, EXITED_LATER, INPUT])
def test_what_a_run_stored_where_it_started_from_goes(task_id: str) -> None:
    for tasks in ((ASKED,), (), None):
        for commands in (False, True):
            assert [True] == _undone(tasks, [(task_id, "log")], commands=commands)


def test_a_question_stays_and_what_finished_beside_it() -> None:
    rows = [(ASKED, INTERRUPT), (ASKED, "log"), (BESIDE, "log"), (BESIDE, ERROR)]
    assert [False, True, False, False] == _undone((ASKED,), rows)
    assert [True] * 4 == _undone(None, rows)
    # Even under an id that looks like another's.
    assert [False] == _undone((), [(EXITED, INTERRUPT)])


def test_what_commands_gave_goes_with_them_only() -> None:
    rows = [(NULL_TASK_ID, "log"), (NULL_TASK_ID, RESUME), (ASKED, RESUME)]
    for tasks in ((ASKED,), (), None):
        assert [True] * 3 == _undone(tasks, rows)
        assert [False] * 3 == _undone(tasks, rows, commands=False)
