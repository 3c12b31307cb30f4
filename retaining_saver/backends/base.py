"""What the library asks of an adapter to one saver's rows.

A backend knows its saver's tables and nothing above them: no cache, no policy, no admission.
Every method that reaches storage has an awaitable twin with the prefix ``a``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeVar, runtime_checkable

from langgraph.checkpoint.base import BaseCheckpointSaver, Checkpoint

from retaining_saver._steps import Steps
from retaining_saver.records import Ref

T = TypeVar("T")

NEIGHBOURS = 32
"""How many ids on each side of a leaf are searched for children: clocks disagree a little."""

ReclaimOutcome = Literal[
    "reclaimed", "parent_missing", "superseded", "has_writes", "versions_differ"
]


@dataclass(frozen=True, slots=True)
class Row:
    """One stored checkpoint, read without its values.

    ``body`` is the checkpoint dict without ``id`` and ``ts``; two rows hold the same state if their
    bodies are equal. Where the saver stores values inside the checkpoint they are in ``body`` as
    opaque objects that compare by their bytes. ``due`` tells that the checkpoint stores a value in
    ``__start__``, ``__pregel_tasks`` or ``branch:to:*``: something is about to run from it.
    ``token`` belongs to the backend: what it needs to see that the row is still the one read.
    """

    checkpoint_id: str
    parent_id: str | None
    metadata: dict[str, Any]
    body: Mapping[str, Any]
    due: bool
    token: Any = None

    @property
    def versions(self) -> Mapping[str, Any]:
        """The channel versions."""
        return self.body.get("channel_versions") or {}


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is stored around a checkpoint: rows in the writes table, and ids newer than it."""

    has_writes: bool
    has_newer: bool


@dataclass(frozen=True, slots=True)
class Movable:
    """Which writes on a leaf may move to its parent: those that no task made.

    ``inputs``: a raw graph's delta input, stored under ``uuid5(UUID(leaf id), "__input__")``.
    ``exits``: the delta writes that a ``durability="exit"`` run stores at its end, under task ids
    of the shapes ``NNNNNNNN-...`` and ``ffffffff-...``.
    """

    inputs: bool = False
    exits: bool = False


NOTHING_MOVES = Movable()


@runtime_checkable
class Backend(Protocol):
    """Reach one saver's rows.

    - Constructed with the saver alone; keeps no state that a second instance on the same saver
      would have to know.
    - Each method is one complete effect: no transaction, cursor or lock outlives the call.
    - Never commits or rolls back a transaction that the user opened on a shared connection.
    - Never deserialises a value with its class, and never needs one.
    - Sync methods work on async savers from any thread but their own loop's, and async methods
      work on sync savers, as far as the saver itself allows.
    - The saver's and the driver's exceptions pass through.
    """

    locks_listings: ClassVar[bool]
    """Whether the saver holds a lock, or a connection, while a listing of its is paused."""

    def __init__(self, saver: BaseCheckpointSaver[Any]) -> None: ...

    def row(self, ref: Ref) -> Row | None:
        """Read one checkpoint, or with no id the head of the namespace; ``None`` if not stored."""
        ...

    async def arow(self, ref: Ref) -> Row | None: ...

    def metadata(self, ref: Ref) -> tuple[str, dict[str, Any]] | None:
        """Read the id and the metadata of a checkpoint (without an id: the head), and no more."""
        ...

    async def ametadata(self, ref: Ref) -> tuple[str, dict[str, Any]] | None: ...

    def lineage(self, ref: Ref) -> list[tuple[str, dict[str, Any]]]:
        """Read ids and metadata from ``ref``, which has an id, along its parents, newest first.

        One query, in which only ids and metadata are read. Only rows that record runs need be
        among the answer; a missing parent or a cycle ends it.
        """
        ...

    async def alineage(self, ref: Ref) -> list[tuple[str, dict[str, Any]]]: ...

    def has_writes(self, ref: Ref) -> bool:
        """Tell whether the writes table holds any row for the checkpoint."""
        ...

    async def ahas_writes(self, ref: Ref) -> bool: ...

    def surroundings(self, ref: Ref, *, but: str | None = None) -> Surroundings:
        """Look for writes on ``ref`` and for newer ids in its namespace other than ``but``."""
        ...

    async def asurroundings(self, ref: Ref, *, but: str | None = None) -> Surroundings: ...

    def exists(self, ref: Ref) -> bool:
        """Tell whether the checkpoint is stored."""
        ...

    async def aexists(self, ref: Ref) -> bool: ...

    def reclaimed_into(self, ref: Ref) -> str | None:
        """Find the checkpoint that remembers ``ref`` as reclaimed, among ``NEIGHBOURS`` a side."""
        ...

    async def areclaimed_into(self, ref: Ref) -> str | None: ...

    def same_values(self, row: Row, checkpoint: Checkpoint) -> bool:
        """Tell whether storing ``checkpoint`` would store the values that ``row`` has. Does no I/O.

        Always true where values are stored apart from checkpoints and shared by version.
        """
        ...

    def fold(self, target: Ref, leaf_id: str | None, metadata: Mapping[str, Any]) -> bool:
        """Merge what ``leaf_id`` recorded in ``metadata`` into the stored metadata of ``target``.

        Without a ``leaf_id`` the entries never were a checkpoint's.

        One transaction, with the target's metadata read (and locked) inside it, so that two
        workers that fold into one checkpoint lose nothing. False if the target is not stored.
        """
        ...

    async def afold(
        self, target: Ref, leaf_id: str | None, metadata: Mapping[str, Any]
    ) -> bool: ...

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
        """Fold ``leaf`` into ``parent`` and delete it in one transaction, if the proof still holds.

        - Both rows are stored, hold the same state as when they were read, and the leaf's parent
          is ``parent``.
        - With ``only_head`` no id of the namespace is newer than the leaf's.
        - The leaf has no child among the ``NEIGHBOURS`` ids on each side.
        - The leaf has no writes, but for ``movable`` ones if the parent has none; those move to
          the parent, a raw graph's input under the parent's own input task id.
        - The fold is taken from both metadata as stored now, not from the rows given.
        - The conditions stand in the deleting statement itself, which deletes by id.
        - Blobs are never touched: the parent references every version that the leaf does.
        - Anything but ``"reclaimed"`` means that nothing changed.
        """
        ...

    async def areclaim(
        self,
        thread_id: str,
        checkpoint_ns: str,
        leaf: Row,
        parent: Row,
        *,
        only_head: bool = True,
        movable: Movable = NOTHING_MOVES,
    ) -> ReclaimOutcome: ...

    def rescue(self, leaf: Ref, parent_id: str) -> int:
        """Move children and writes of a deleted leaf to ``parent_id``; return how many rows moved.

        Nothing happens while the leaf is stored, or if the parent is not. Children are looked for
        among newer ids only.
        """
        ...

    async def arescue(self, leaf: Ref, parent_id: str) -> int: ...


@runtime_checkable
class SnapshotReads(Protocol):
    """Read by the saver's own methods what is stored at one moment. A backend may do without.

    LangGraph's savers walk a delta history in several statements. What retention replaces in
    between would be missing from it, or be there twice.
    """

    def on_snapshot(self, operation: Callable[[BaseCheckpointSaver[Any]], Steps[T]]) -> T:
        """Run ``operation`` with a saver whose reads all see the rows of one moment.

        - That saver is for reading, and for the operation only.
        - The wrapped saver's lock, or a connection, is held meanwhile: the operation asks for
          nothing but that saver's reads.
        - In a transaction that the user opened, the user's isolation level counts.
        """
        ...

    async def aon_snapshot(
        self, operation: Callable[[BaseCheckpointSaver[Any]], Steps[T]]
    ) -> T: ...
