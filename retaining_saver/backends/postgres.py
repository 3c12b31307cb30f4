"""The rows of ``PostgresSaver`` and ``AsyncPostgresSaver``.

One class, ``PostgresBackend``, serves both: register it for
``langgraph.checkpoint.postgres.PostgresSaver`` and
``langgraph.checkpoint.postgres.aio.AsyncPostgresSaver``.

What is done stands here, in generators of statements that both faces share; how statements are
run, in ``postgres_sessions``. Tables are found by the connection's ``search_path``.

Row locks are taken in the order of checkpoint ids, everywhere, so that two workers cannot wait for
each other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from langgraph.checkpoint.base import BaseCheckpointSaver, Checkpoint
from psycopg.types.json import Jsonb

from retaining_saver._steps import Steps
from retaining_saver.backends.base import (
    NEIGHBOURS,
    NOTHING_MOVES,
    Movable,
    ReclaimOutcome,
    Row,
    Surroundings,
)
from retaining_saver.backends.chains import along_parents
from retaining_saver.backends.moves import mismatch, planned_moves, rescued_task_id
from retaining_saver.backends.postgres_sessions import (
    Parameters,
    Rows,
    Statements,
    T,
    Undo,
    session,
)
from retaining_saver.backends.postgres_threads import PostgresThreads
from retaining_saver.folds import HISTORY_MAPS, MARK, folded_into, reclaimed_ids
from retaining_saver.records import Ref

_TASKS = "__pregel_tasks"

# A value in these channels makes a node run next. Seen on langgraph 1.2 with Postgres saver 3.2:
# - stopped by interrupt_before, interrupt_after, interrupt() or an error: `branch:to:x` is inline
#   in the checkpoint as JSON null, with a blob instead where the node is deferred;
# - input that was not consumed yet: `__start__` has a blob, or is inline if it is a scalar;
# - at rest: `__start__` and `branch:to:x` are still versioned, but no value is stored, neither
#   inline nor as a blob. (Older savers stored a blob of the type "empty" there.)
# - `__pregel_tasks` is different: once a graph has used Send, the channel has a blob at rest too,
#   of an empty list. So its value decides, not its presence.
# - written before checkpoint format 4: the sends are writes on the parent.
_DUE_CHANNEL = "__start__"
_DUE_PREFIX = "branch:to:"
_EMPTY_LISTS = {("msgpack", b"\x90"), ("json", b"[]")}

# An empty list stays far below this, also encrypted; a longer value need not be read to be known.
_EMPTY_LIST_BYTES = 256

# The state of a row: its checkpoint without `id` and `ts`, and without an inline value where the
# channel has a blob of its version, because then the savers read the blob. A copy is not inlined
# as its original was: a delta channel's snapshot, which a later checkpoint of the same version
# reads without naming it, is named in the copy by `true`; and a scalar that an older saver put
# into a blob is inline in the copy.
_STATE = """jsonb_set(
    {row}.checkpoint - '{{id,ts}}'::text[],
    '{{channel_values}}',
    COALESCE(NULLIF({row}.checkpoint -> 'channel_values', 'null'), '{{}}') - ARRAY(
        SELECT inline.channel
        FROM jsonb_object_keys(
            NULLIF({row}.checkpoint -> 'channel_values', 'null')
        ) AS inline (channel)
        CROSS JOIN LATERAL (
            SELECT b.type FROM checkpoint_blobs AS b
            WHERE b.thread_id = {row}.thread_id AND b.checkpoint_ns = {row}.checkpoint_ns
            AND b.channel = inline.channel
            AND b.version = {row}.checkpoint -> 'channel_versions' ->> inline.channel
            LIMIT 1
        ) AS stored
        WHERE stored.type <> 'empty'
    )
)"""

# Everything is looked up by its key. `LIMIT 1` says so to the planner, which otherwise may prefer
# to read a whole table into a hash for a single row (it does for EXISTS).
_ROW = f"""
SELECT c.checkpoint_id, c.parent_checkpoint_id, c.metadata::text,
    ({_STATE.format(row="c")})::text,
    COALESCE((
        SELECT true FROM jsonb_each_text(c.checkpoint -> 'channel_versions') AS v
        CROSS JOIN LATERAL (
            SELECT b.type FROM checkpoint_blobs AS b
            WHERE b.thread_id = c.thread_id AND b.checkpoint_ns = c.checkpoint_ns
            AND b.channel = v.key AND b.version = v.value
            LIMIT 1
        ) AS stored
        WHERE (v.key = '{_DUE_CHANNEL}' OR starts_with(v.key, '{_DUE_PREFIX}'))
        AND stored.type <> 'empty'
        LIMIT 1
    ), (
        SELECT true FROM checkpoint_writes AS w
        WHERE (c.checkpoint ->> 'v')::int < 4 AND w.thread_id = c.thread_id
        AND w.checkpoint_ns = c.checkpoint_ns AND w.checkpoint_id = c.parent_checkpoint_id
        AND w.channel = '{_TASKS}'
        LIMIT 1
    ), false),
    tasks.type, tasks.blob
FROM checkpoints AS c
LEFT JOIN LATERAL (
    SELECT b.type,
        CASE WHEN octet_length(b.blob) <= {_EMPTY_LIST_BYTES} THEN b.blob END AS blob
    FROM checkpoint_blobs AS b
    WHERE b.thread_id = c.thread_id AND b.checkpoint_ns = c.checkpoint_ns
    AND b.channel = '{_TASKS}'
    AND b.version = c.checkpoint -> 'channel_versions' ->> '{_TASKS}'
    LIMIT 1
) AS tasks ON true
WHERE c.thread_id = %(thread)s AND c.checkpoint_ns = %(ns)s
"""
_ROW_BY_ID = f"{_ROW} AND c.checkpoint_id = %(id)s"
_ROW_OF_HEAD = f"{_ROW} ORDER BY c.checkpoint_id DESC LIMIT 1"

_IN_NAMESPACE = "thread_id = %(thread)s AND checkpoint_ns = %(ns)s"

_METADATA = f"SELECT checkpoint_id, metadata::text FROM checkpoints WHERE {_IN_NAMESPACE}"
_METADATA_BY_ID = f"{_METADATA} AND checkpoint_id = %(id)s"
_METADATA_OF_HEAD = f"{_METADATA} ORDER BY checkpoint_id DESC LIMIT 1"

# UNION without ALL ends a cycle. Rows come in no order.
_LINEAGE = f"""
WITH RECURSIVE line (id, parent) AS (
    SELECT checkpoint_id, parent_checkpoint_id FROM checkpoints
    WHERE {_IN_NAMESPACE} AND checkpoint_id = %(id)s
    UNION
    SELECT up.checkpoint_id, up.parent_checkpoint_id
    FROM line CROSS JOIN LATERAL (
        SELECT checkpoint_id, parent_checkpoint_id FROM checkpoints
        WHERE {_IN_NAMESPACE} AND checkpoint_id = line.parent
        LIMIT 1
    ) AS up
)
SELECT line.id, line.parent, described.metadata
FROM line CROSS JOIN LATERAL (
    SELECT CASE WHEN metadata ?| %(maps)s THEN metadata::text END AS metadata FROM checkpoints
    WHERE {_IN_NAMESPACE} AND checkpoint_id = line.id
    LIMIT 1
) AS described
"""

_EXISTS = f"""
SELECT EXISTS (
    SELECT 1 FROM checkpoints WHERE {_IN_NAMESPACE} AND checkpoint_id = %(id)s
)
"""
_HAS_WRITES = f"""
SELECT EXISTS (
    SELECT 1 FROM checkpoint_writes WHERE {_IN_NAMESPACE} AND checkpoint_id = %(id)s
)
"""
_SURROUNDINGS = f"""
SELECT EXISTS (
    SELECT 1 FROM checkpoint_writes WHERE {_IN_NAMESPACE} AND checkpoint_id = %(id)s
), EXISTS (
    SELECT 1 FROM checkpoints WHERE {_IN_NAMESPACE} AND checkpoint_id > %(id)s
    AND checkpoint_id IS DISTINCT FROM %(but)s::text
)
"""

# The few rows next to an id, found by two short walks of the primary key.
_NEIGHBOURS = f"""(
    (SELECT * FROM checkpoints WHERE {_IN_NAMESPACE} AND checkpoint_id > %(id)s
    ORDER BY checkpoint_id LIMIT {NEIGHBOURS})
    UNION ALL
    (SELECT * FROM checkpoints WHERE {_IN_NAMESPACE} AND checkpoint_id < %(id)s
    ORDER BY checkpoint_id DESC LIMIT {NEIGHBOURS})
)"""

_RECLAIMED_INTO = f"""
SELECT checkpoint_id, jsonb_build_object(%(mark)s::text, metadata -> %(mark)s)::text
FROM {_NEIGHBOURS} AS near
WHERE metadata -> %(mark)s -> 'reclaimed' ? %(id)s
"""

# The order is that of the whole module: see there.
_LOCK = f"""
SELECT checkpoint_id, metadata::text FROM checkpoints
WHERE {_IN_NAMESPACE} AND checkpoint_id = ANY(%(ids)s)
ORDER BY checkpoint_id
FOR UPDATE
"""
_SET_METADATA = f"""
UPDATE checkpoints SET metadata = %(metadata)s
WHERE {_IN_NAMESPACE} AND checkpoint_id = %(id)s
RETURNING 1
"""

# The proof. Each part is what must not hold, and stands in the deleting statement as well as
# in the one that finds out which of them did. `l` is the leaf's row, `p` the parent's. The two are
# compared as text: as jsonb, 1 and 1.0 would be equal, and they are different states.
_SUPERSEDED = f"""(
    (%(only_head)s AND EXISTS (
        SELECT 1 FROM checkpoints WHERE {_IN_NAMESPACE} AND checkpoint_id > %(id)s
    )) OR EXISTS (
        SELECT 1 FROM {_NEIGHBOURS} AS near WHERE near.parent_checkpoint_id = %(id)s
    )
)"""
_HELD_BY_WRITES = f"""(
    EXISTS (
        SELECT 1 FROM checkpoint_writes WHERE {_IN_NAMESPACE} AND checkpoint_id = %(id)s
        AND task_id <> ALL(%(movable)s::text[])
    ) OR (cardinality(%(movable)s::text[]) > 0 AND EXISTS (
        SELECT 1 FROM checkpoint_writes WHERE {_IN_NAMESPACE} AND checkpoint_id = %(parent)s
    ))
)"""
_DIFFERENT = f"""(
    ({_STATE.format(row="l")})::text <> ({_STATE.format(row="p")})::text
    OR {_STATE.format(row="l")} <> %(body)s
)"""
_LEAF_AND_PARENT = """
l.thread_id = %(thread)s AND l.checkpoint_ns = %(ns)s AND l.checkpoint_id = %(id)s
AND p.thread_id = %(thread)s AND p.checkpoint_ns = %(ns)s AND p.checkpoint_id = %(parent)s
"""
_DELETE_LEAF = f"""
DELETE FROM checkpoints AS l USING checkpoints AS p
WHERE {_LEAF_AND_PARENT} AND l.parent_checkpoint_id = p.checkpoint_id
AND NOT {_SUPERSEDED} AND NOT {_HELD_BY_WRITES} AND NOT {_DIFFERENT}
RETURNING 1
"""
_WHY_NOT = f"""
SELECT l.parent_checkpoint_id IS DISTINCT FROM p.checkpoint_id OR {_DIFFERENT},
    {_SUPERSEDED}, {_HELD_BY_WRITES}
FROM checkpoints AS l CROSS JOIN checkpoints AS p WHERE {_LEAF_AND_PARENT}
"""

_TASK_IDS = f"""
SELECT DISTINCT task_id FROM checkpoint_writes
WHERE {_IN_NAMESPACE} AND checkpoint_id = %(id)s
"""

# One statement takes the rows away and puts them down, so that a write that arrives meanwhile is
# either moved or left where it is. Where the parent has the row already, the rule is that of
# `put_writes`: special writes, whose idx is negative, replace, and others do not.
_MOVE_WRITES = """
WITH moves AS (
    SELECT * FROM unnest(%(from)s::text[], %(to)s::text[]) AS m (was, becomes)
), gone AS (
    DELETE FROM checkpoint_writes AS w USING moves
    WHERE w.thread_id = %(thread)s AND w.checkpoint_ns = %(ns)s AND w.checkpoint_id = %(id)s
    AND w.task_id = moves.was
    RETURNING moves.becomes, w.task_path, w.idx, w.channel, w.type, w.blob
), kept AS (
    INSERT INTO checkpoint_writes
        (thread_id, checkpoint_ns, checkpoint_id, task_id, task_path, idx, channel, type, blob)
    SELECT %(thread)s, %(ns)s, %(parent)s, becomes, task_path, idx, channel, type, blob
    FROM gone
    ON CONFLICT (thread_id, checkpoint_ns, checkpoint_id, task_id, idx) DO UPDATE
    SET channel = EXCLUDED.channel, type = EXCLUDED.type, blob = EXCLUDED.blob
    WHERE EXCLUDED.idx < 0
    RETURNING 1
)
SELECT count(*) FROM kept
"""

_LEFT_BEHIND = f"""
SELECT (EXISTS (
    SELECT 1 FROM checkpoint_writes WHERE {_IN_NAMESPACE} AND checkpoint_id = %(id)s
) OR EXISTS (
    SELECT 1 FROM checkpoints WHERE {_IN_NAMESPACE} AND checkpoint_id > %(id)s
    AND parent_checkpoint_id = %(id)s
)) AND NOT EXISTS (
    SELECT 1 FROM checkpoints WHERE {_IN_NAMESPACE} AND checkpoint_id = %(id)s
)
"""
_MOVE_CHILDREN = f"""
WITH children AS (
    UPDATE checkpoints SET parent_checkpoint_id = %(parent)s
    WHERE {_IN_NAMESPACE} AND checkpoint_id > %(id)s AND parent_checkpoint_id = %(id)s
    RETURNING 1
)
SELECT count(*) FROM children
"""


class PostgresBackend(PostgresThreads):
    """Reach the rows of a Postgres saver; see ``Backend`` for what each method promises.

    A refused ``reclaim`` rolls back its own savepoint or transaction. Under REPEATABLE READ and
    SERIALIZABLE the server may refuse instead of wait: that ``SerializationFailure`` passes
    through, and nothing was changed.
    """

    locks_listings: ClassVar[bool] = True

    def __init__(self, saver: BaseCheckpointSaver[Any]) -> None:
        self._saver = saver
        self._session = session(saver)

    def on_snapshot(self, operation: Callable[[BaseCheckpointSaver[Any]], Steps[T]]) -> T:
        return self._session.on_snapshot(operation)

    async def aon_snapshot(self, operation: Callable[[BaseCheckpointSaver[Any]], Steps[T]]) -> T:
        return await self._session.aon_snapshot(operation)

    def row(self, ref: Ref) -> Row | None:
        return self._session.read(_row(ref, self._holds_tasks))

    async def arow(self, ref: Ref) -> Row | None:
        return await self._session.aread(_row(ref, self._holds_tasks))

    def metadata(self, ref: Ref) -> tuple[str, dict[str, Any]] | None:
        return self._session.read(_metadata(ref))

    async def ametadata(self, ref: Ref) -> tuple[str, dict[str, Any]] | None:
        return await self._session.aread(_metadata(ref))

    def lineage(self, ref: Ref) -> list[tuple[str, dict[str, Any]]]:
        return self._session.read(_lineage(ref))

    async def alineage(self, ref: Ref) -> list[tuple[str, dict[str, Any]]]:
        return await self._session.aread(_lineage(ref))

    def has_writes(self, ref: Ref) -> bool:
        return self._session.read(_answer(_HAS_WRITES, _named(ref)))

    async def ahas_writes(self, ref: Ref) -> bool:
        return await self._session.aread(_answer(_HAS_WRITES, _named(ref)))

    def surroundings(self, ref: Ref, *, but: str | None = None) -> Surroundings:
        return self._session.read(_surroundings(ref, but))

    async def asurroundings(self, ref: Ref, *, but: str | None = None) -> Surroundings:
        return await self._session.aread(_surroundings(ref, but))

    def exists(self, ref: Ref) -> bool:
        return self._session.read(_answer(_EXISTS, _named(ref)))

    async def aexists(self, ref: Ref) -> bool:
        return await self._session.aread(_answer(_EXISTS, _named(ref)))

    def reclaimed_into(self, ref: Ref) -> str | None:
        return self._session.read(_reclaimed_into(ref))

    async def areclaimed_into(self, ref: Ref) -> str | None:
        return await self._session.aread(_reclaimed_into(ref))

    def same_values(self, row: Row, checkpoint: Checkpoint) -> bool:
        # Blobs are shared by version, and inline values are part of the body.
        return True

    def fold(self, target: Ref, leaf_id: str | None, metadata: Mapping[str, Any]) -> bool:
        return self._session.write(_fold(target, leaf_id, metadata))

    async def afold(self, target: Ref, leaf_id: str | None, metadata: Mapping[str, Any]) -> bool:
        return await self._session.awrite(_fold(target, leaf_id, metadata))

    def reclaim(
        self,
        thread_id: str,
        checkpoint_ns: str,
        leaf: Row,
        parent: Row,
        *,
        only_head: bool = True,
        movable: Movable = NOTHING_MOVES,
    ) -> ReclaimOutcome:
        ref = Ref(thread_id, checkpoint_ns, leaf.checkpoint_id)
        return self._session.write(_reclaim(ref, leaf, parent, only_head, movable))

    async def areclaim(
        self,
        thread_id: str,
        checkpoint_ns: str,
        leaf: Row,
        parent: Row,
        *,
        only_head: bool = True,
        movable: Movable = NOTHING_MOVES,
    ) -> ReclaimOutcome:
        ref = Ref(thread_id, checkpoint_ns, leaf.checkpoint_id)
        return await self._session.awrite(_reclaim(ref, leaf, parent, only_head, movable))

    def rescue(self, leaf: Ref, parent_id: str) -> int:
        # Looked at without a transaction first: there is seldom anything, and nothing is locked.
        leaf_id = self._session.read(_left_behind(leaf))
        return self._session.write(_rescue(leaf, leaf_id, parent_id)) if leaf_id else 0

    async def arescue(self, leaf: Ref, parent_id: str) -> int:
        leaf_id = await self._session.aread(_left_behind(leaf))
        return await self._session.awrite(_rescue(leaf, leaf_id, parent_id)) if leaf_id else 0

    def _holds_tasks(self, type_: str | None, blob: bytes | None) -> bool:
        """Tell whether a value of the channel of sends is anything but an empty list.

        A cipher of the saver's is used, a class never: a value that stays opaque counts as sends.
        """
        if type_ is None or type_ == "empty":
            return False
        if blob is None:
            return True
        type_, _, cipher_name = type_.partition("+")
        if cipher_name:
            cipher = getattr(self._saver.serde, "cipher", None)
            if cipher is None:
                return True
            blob = cipher.decrypt(cipher_name, blob)
        return (type_, blob) not in _EMPTY_LISTS


def _named(ref: Ref) -> dict[str, Any]:
    return {"thread": ref.thread_id, "ns": ref.checkpoint_ns, "id": ref.checkpoint_id}


def _answer(sql: str, parameters: Parameters) -> Statements[bool]:
    rows = yield sql, parameters
    return bool(rows[0][0])


def _row(
    ref: Ref, holds_tasks: Callable[[str | None, bytes | None], bool]
) -> Statements[Row | None]:
    rows = yield _ROW_OF_HEAD if ref.checkpoint_id is None else _ROW_BY_ID, _named(ref)
    if not rows:
        return None
    checkpoint_id, parent_id, metadata, text, due, tasks_type, tasks = rows[0]
    body = json.loads(text)
    return Row(
        checkpoint_id,
        # The savers read an empty parent id as none.
        parent_id or None,
        json.loads(metadata),
        body,
        due or any(map(_is_due, body["channel_values"])) or holds_tasks(tasks_type, tasks),
    )


def _is_due(channel: str) -> bool:
    return channel == _DUE_CHANNEL or channel.startswith(_DUE_PREFIX)


def _metadata(ref: Ref) -> Statements[tuple[str, dict[str, Any]] | None]:
    rows = yield _METADATA_OF_HEAD if ref.checkpoint_id is None else _METADATA_BY_ID, _named(ref)
    return (rows[0][0], json.loads(rows[0][1])) if rows else None


def _lineage(ref: Ref) -> Statements[list[tuple[str, dict[str, Any]]]]:
    rows = yield _LINEAGE, {**_named(ref), "maps": list(HISTORY_MAPS)}
    links = {checkpoint_id: (parent_id, metadata) for checkpoint_id, parent_id, metadata in rows}
    line = along_parents(ref.checkpoint_id, links)
    return [(i, json.loads(metadata)) for i, metadata in line if metadata is not None]


def _surroundings(ref: Ref, but: str | None) -> Statements[Surroundings]:
    rows = yield _SURROUNDINGS, {**_named(ref), "but": but}
    return Surroundings(*rows[0])


def _reclaimed_into(ref: Ref) -> Statements[str | None]:
    rows = yield _RECLAIMED_INTO, {**_named(ref), "mark": MARK}
    for checkpoint_id, mark in rows:
        if ref.checkpoint_id in reclaimed_ids(checkpoint_id, json.loads(mark)):
            return str(checkpoint_id)
    return None


def _locked(ref: Ref, *ids: str | None) -> Statements[dict[str, dict[str, Any]]]:
    """Lock checkpoints and return the metadata of those that are stored, by id."""
    rows = yield _LOCK, {**_named(ref), "ids": list(ids)}
    return {checkpoint_id: json.loads(metadata) for checkpoint_id, metadata in rows}


def _fold(target: Ref, leaf_id: str | None, metadata: Mapping[str, Any]) -> Statements[bool]:
    for target_id, stored in (yield from _locked(target, target.checkpoint_id)).items():
        yield from _set_metadata(target, folded_into(stored, target_id, metadata, leaf_id))
        return True
    return False


def _set_metadata(ref: Ref, metadata: Mapping[str, Any]) -> Statements[None]:
    # Our own dumps: the user may have given the connection others.
    yield _SET_METADATA, {**_named(ref), "metadata": Jsonb(metadata, dumps=json.dumps)}


def _reclaim(
    ref: Ref, leaf: Row, parent: Row, only_head: bool, movable: Movable
) -> Statements[ReclaimOutcome]:
    """Lock, delete if the proof holds, move writes, fold.

    The locks have a statement of their own: the deleting one then has no row to wait for, and so
    sees all that was committed up to the moment in which it deletes.
    """
    if read := mismatch(leaf, parent):
        raise Undo(read)
    leaf_id, parent_id = leaf.checkpoint_id, parent.checkpoint_id
    stored = yield from _locked(ref, leaf_id, parent_id)
    if len(stored) < 2:
        raise Undo("parent_missing" if leaf_id in stored else "superseded")
    moves = yield from _moves(ref, leaf_id, parent_id, movable)
    proof = {
        **_named(ref),
        "parent": parent_id,
        "only_head": only_head,
        "movable": list(moves),
        "body": Jsonb(dict(leaf.body), dumps=json.dumps),
    }
    deleted = yield _DELETE_LEAF, proof
    if not deleted:
        raise Undo(_refusal((yield _WHY_NOT, proof)))
    yield from _move_writes(ref, parent_id, moves)
    folded = folded_into(stored[parent_id], parent_id, stored[leaf_id], leaf_id)
    yield from _set_metadata(ref.at(parent_id), folded)
    return "reclaimed"


def _refusal(flags: Rows) -> ReclaimOutcome:
    different, superseded, held_by_writes = flags[0]
    if different:
        return "versions_differ"
    # Superseded, too, if by now nothing is in the way any more: something was.
    return "has_writes" if held_by_writes and not superseded else "superseded"


def _moves(ref: Ref, leaf_id: str, parent_id: str, movable: Movable) -> Statements[dict[str, str]]:
    """Say under which task id each write on the leaf may move; empty if one may not."""
    if movable == NOTHING_MOVES:
        return {}
    rows = yield _TASK_IDS, _named(ref)
    return planned_moves((row[0] for row in rows), leaf_id, parent_id, movable)


def _move_writes(ref: Ref, parent_id: str, moves: Mapping[str, str]) -> Statements[int]:
    if not moves:
        return 0
    rows = yield (
        _MOVE_WRITES,
        {**_named(ref), "parent": parent_id, "from": list(moves), "to": list(moves.values())},
    )
    return int(rows[0][0])


def _left_behind(leaf: Ref) -> Statements[str | None]:
    """Return the id of a leaf that is gone if it has children or writes."""
    is_left = yield from _answer(_LEFT_BEHIND, _named(leaf))
    return leaf.checkpoint_id if is_left else None


def _rescue(leaf: Ref, leaf_id: str, parent_id: str) -> Statements[int]:
    stored = yield from _locked(leaf, leaf_id, parent_id)
    if list(stored) != [parent_id]:
        raise Undo(0)
    children = yield _MOVE_CHILDREN, {**_named(leaf), "parent": parent_id}
    rows = yield _TASK_IDS, _named(leaf)
    moves = {row[0]: rescued_task_id(row[0], leaf_id, parent_id) for row in rows}
    writes = yield from _move_writes(leaf, parent_id, moves)
    return int(children[0][0]) + writes
