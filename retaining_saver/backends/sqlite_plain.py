"""Cut a plain thread of a SQLite saver to its head, without a plan.

A plain thread is one chain of full checkpoints: nothing about it is to be decided, so only the
newest blob is looked into. Beforehand only the head is asked; the transaction that cuts the
thread asks the rest.
"""

from __future__ import annotations

from langgraph.checkpoint.serde.base import SerializerProtocol

from retaining_saver.backends.opaque import UnreadableCheckpoint, read_checkpoint
from retaining_saver.backends.sqlite_statements import Statements
from retaining_saver.entries import BRANCH, SENDS, START
from retaining_saver.folds import HISTORY_MAPS, LEGACY_MARKER, MARK
from retaining_saver.records import ROOT_NS

FORMAT = 4
"""The first checkpoint format whose checkpoints do not need their parents' writes."""

# What delta channels, annotations and carriers leave in metadata.
_TELLTALES = (
    "counters_since_delta_snapshot",
    "delta_writes_versioned",
    MARK,
    *HISTORY_MAPS,
    LEGACY_MARKER,
)
_TELLS = " OR ".join(f"""instr(CAST(c.metadata AS TEXT), '"{word}"')""" for word in _TELLTALES)

_NAMED = "thread_id = :thread_id AND checkpoint_ns = :ns AND checkpoint_id = :id"
_OLDER = "thread_id = :thread_id AND checkpoint_ns = :ns AND checkpoint_id < :id"
_HEAD = f"""
SELECT checkpoint_id, type, checkpoint, {_TELLS}, parent_checkpoint_id,
    EXISTS (SELECT 1 FROM checkpoints WHERE thread_id = :thread_id AND checkpoint_ns <> :ns)
FROM checkpoints AS c WHERE thread_id = :thread_id AND checkpoint_ns = :ns
ORDER BY checkpoint_id DESC LIMIT 1
"""
# Each row's parent is the next older one; among the rows is no mark. Blobs of another type than
# the head's may be unreadable, and then the thread is left alone.
_IS_CHAIN = f"""
SELECT NOT EXISTS (
    SELECT 1 FROM checkpoints AS c WHERE thread_id = :thread_id AND checkpoint_ns = :ns AND (
        type IS NOT :type OR {_TELLS}
        OR NULLIF(parent_checkpoint_id, '') IS NOT (
            SELECT MAX(p.checkpoint_id) FROM checkpoints AS p
            WHERE p.thread_id = c.thread_id AND p.checkpoint_ns = c.checkpoint_ns
            AND p.checkpoint_id < c.checkpoint_id
        )
    )
)
"""
_NO_ORPHANS = """
SELECT NOT EXISTS (
    SELECT 1 FROM writes AS w WHERE thread_id = :thread_id AND NOT EXISTS (
        SELECT 1 FROM checkpoints AS c WHERE c.thread_id = w.thread_id
        AND c.checkpoint_ns = w.checkpoint_ns AND c.checkpoint_id = w.checkpoint_id
    )
)
"""
Head = tuple[str, str]  # checkpoint_id, type


def head_of_plain(thread_id: str, serde: SerializerProtocol) -> Statements[Head | None]:
    """Return the head of a thread that looks plain by its head; ``None`` for others."""
    place = {"thread_id": thread_id, "ns": ROOT_NS}
    found = yield _HEAD, place
    if not found.rows:
        return None
    checkpoint_id, kind, checkpoint, is_marked, parent_id, has_others = found.rows[0]
    if is_marked or has_others or not parent_id:
        return None
    return (checkpoint_id, kind) if _stands_alone((kind, checkpoint), serde) else None


def _stands_alone(stored: tuple[str, bytes], serde: SerializerProtocol) -> bool:
    """Tell whether a checkpoint stores every channel that it has, or has consumed it."""
    try:
        body = read_checkpoint(stored, serde)
    except UnreadableCheckpoint:
        return False
    unstored = set(body.get("channel_versions") or {}) - set(body.get("channel_values") or {})
    consumed = all(c in (START, SENDS) or c.startswith(BRANCH) for c in unstored)
    return consumed and int(body.get("v") or 1) >= FORMAT


def cut(thread_id: str, serde: SerializerProtocol) -> Statements[int | None]:
    """Delete everything above the head, if the thread is still plain; return how many went."""
    head = yield from head_of_plain(thread_id, serde)
    if head is None:
        return None
    place = {"thread_id": thread_id, "ns": ROOT_NS, "id": head[0]}
    for condition in (_IS_CHAIN, _NO_ORPHANS):
        holds = yield condition, {**place, "type": head[1]}
        if not holds.rows[0][0]:
            return None
    yield f"DELETE FROM writes WHERE {_OLDER}", place
    gone = yield f"DELETE FROM checkpoints WHERE {_OLDER}", place
    yield f"UPDATE checkpoints SET parent_checkpoint_id = NULL WHERE {_NAMED}", place
    return gone.changed
