"""Cut a plain thread of a Postgres saver to its head, without a plan.

A plain thread is one chain of full checkpoints: nothing about it is to be decided, and its rows
need not be looked at one by one outside the server.
"""

from __future__ import annotations

from typing import Any

from retaining_saver.backends import postgres_rewriting as rewriting
from retaining_saver.backends.postgres_sessions import Command, Rows, Statements, Undo, streamed
from retaining_saver.folds import HISTORY_MAPS, MARK
from retaining_saver.records import ROOT_NS

# What delta channels, annotations and carriers leave in metadata.
_TELLTALES = (
    "counters_since_delta_snapshot",
    "delta_writes_versioned",
    "writes",
    MARK,
    *HISTORY_MAPS,
)

# An inline `true` may be the mark of a delta channel's snapshot. An update by LangGraph before
# 1.2.15 left no mark of a delta channel. Before checkpoint format 4 a
# checkpoint needs its parent.
_CHAIN = """
SELECT count(*), max(checkpoint_id), COALESCE(bool_and(follows AND full_state), false)
FROM (
    SELECT checkpoint_id, NULLIF(parent_checkpoint_id, '') IS NOT DISTINCT FROM
            lag(checkpoint_id) OVER (ORDER BY checkpoint_id) AS follows,
        checkpoint_ns = %(ns)s AND (checkpoint ->> 'v')::int >= 4
            AND NOT metadata ?| %(telltales)s::text[]
            AND metadata ->> 'source' IS DISTINCT FROM 'update'
            AND NOT checkpoint @? '$.channel_values.* ? (@ == true)' AS full_state
    FROM checkpoints WHERE thread_id = %(thread)s
) AS line
"""
_HAS_ORPHANS = """
SELECT EXISTS (
    SELECT checkpoint_ns, checkpoint_id FROM checkpoint_writes WHERE thread_id = %(thread)s
    EXCEPT
    SELECT checkpoint_ns, checkpoint_id FROM checkpoints WHERE thread_id = %(thread)s
)
"""
_IS_SNAPSHOT = """
SELECT current_setting('transaction_isolation') IN ('repeatable read', 'serializable')
"""
_ALL_BUT = """
SELECT checkpoint_id FROM checkpoints
WHERE thread_id = %(thread)s AND checkpoint_ns = %(ns)s AND checkpoint_id <> %(id)s
"""
_UPROOT = """
UPDATE checkpoints SET parent_checkpoint_id = NULL
WHERE thread_id = %(thread)s AND checkpoint_ns = %(ns)s AND checkpoint_id = %(id)s
"""


def head_of_plain(thread_id: str) -> Statements[str | None]:
    """Return the head of a plain thread with more than one checkpoint; ``None`` of others."""
    place = {"thread": thread_id, "ns": ROOT_NS, "telltales": list(_TELLTALES)}
    ((count, head, is_chain),) = yield _CHAIN, place
    if not is_chain or count < 2:
        return None
    ((has_orphans,),) = yield _HAS_ORPHANS, place
    return None if has_orphans else str(head)


def cut(thread_id: str) -> Statements[int | None]:
    """Delete everything above the head, if the thread is still plain; return how many went."""
    ((is_snapshot,),) = yield _IS_SNAPSHOT, {}
    head = (yield from head_of_plain(thread_id)) if is_snapshot else None
    if head is None:
        raise Undo(None)
    place: dict[str, Any] = {"thread": thread_id, "ns": ROOT_NS, "id": head}
    ids: list[str] = []

    def collect(rows: Rows) -> None:
        ids.extend(row[0] for row in rows)

    yield from streamed(_ALL_BUT, place, collect)
    yield Command(_UPROOT), place
    yield from rewriting.thin(
        thread_id, ROOT_NS, ids, (yield from rewriting.channels_of(thread_id))
    )
    return len(ids)
