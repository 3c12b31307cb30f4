"""What whole-thread retention asks of an adapter, beyond ``Backend``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from retaining_saver.backends.base import Backend
from retaining_saver.entries import StoredThread
from retaining_saver.planned import RetentionPlan

TABLES = ("checkpoints", "writes", "blobs")
CHUNK = 500
"""Ids that one statement names at most."""


@dataclass(frozen=True, slots=True)
class StorageStats:
    """Rows and serialized bytes per table (``checkpoints``, ``writes``, ``blobs``).

    Bytes count what savers serialized: checkpoints with their metadata, values of writes and
    blobs. They are the same before and after for the same rows, and comparable only within one
    kind of saver. SQLite has no blobs: values stand in its checkpoints.
    """

    rows: Mapping[str, int]
    bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Applied:
    """What a thread held before a plan was applied, and after."""

    before: StorageStats
    after: StorageStats


@runtime_checkable
class RetentionBackend(Backend, Protocol):
    """Read whole threads without their values, and apply plans to them.

    - ``stored`` loads no value and needs no user's class; it reads in bounded memory: at most one
      checkpoint's serialized state at a time.
    - ``apply`` is one transaction per thread; whatever goes wrong in it leaves everything as it
      was, and killing the process does too.
    - Statements name at most ``CHUNK`` ids.
    - Every method works for threads of tens of thousands of checkpoints.
    """

    def stored(self, thread_id: str, matches: Callable[[Mapping[str, Any]], bool]) -> StoredThread:
        """Read a thread for the planner, on one snapshot.

        What cannot be read without a value's class, or without a cipher, becomes a sentence in
        ``problems``.
        """
        ...

    async def astored(
        self, thread_id: str, matches: Callable[[Mapping[str, Any]], bool]
    ) -> StoredThread: ...

    def apply(
        self, thread: StoredThread, plan: RetentionPlan, *, dry_run: bool = False
    ) -> Applied | None:
        """Do what ``plan`` says, if the thread is still ``thread``; else return ``None``.

        - The thread is still the same if the same ids with the same parents and the same numbers
          of rows in the writes table are stored; this is checked inside the transaction. A plan
          with problems is not checked: it only measures.
        - Folds, new carriers with the writes and seeds they take over, moved writes, rollbacks and
          grafts come before deletions. Deletions go by id, with their rows in the writes table.
        - Blobs go that a deleted checkpoint referenced and no surviving one does.
        - Orphan writes go that ``plan.orphans`` lists, unless their checkpoint was stored since.
        - What a run stores meanwhile is neither deleted nor overwritten.
        - With ``dry_run`` everything is done and then undone: the numbers are the real ones.
        - A transaction that the database refused to serialize is tried again, a few times.
        """
        ...

    async def aapply(
        self, thread: StoredThread, plan: RetentionPlan, *, dry_run: bool = False
    ) -> Applied | None: ...

    def threads_of_runs(self, run_ids: Sequence[str]) -> list[str]:
        """List the threads that have a checkpoint whose metadata names one of the runs."""
        ...

    async def athreads_of_runs(self, run_ids: Sequence[str]) -> list[str]: ...

    def copy_thread(self, source: str, target: str, latest: RetentionPlan | None) -> bool:
        """Copy a thread's rows, every column of them, under another thread id, in one transaction.

        With ``latest`` (a plan for the source that keeps only its heads) apply that plan to the
        copy in the same transaction; the source stays as it is. False, and nothing copied, if
        the target has any row. Raises ``PlanRefused`` if the source has lost a checkpoint since
        ``latest`` was planned.
        """
        ...

    async def acopy_thread(
        self, source: str, target: str, latest: RetentionPlan | None
    ) -> bool: ...


@runtime_checkable
class PlainCuts(Protocol):
    """Cut plain threads to their newest state without a plan. A backend may do without.

    A plain thread is one chain of two or more full checkpoints in the root namespace, each the
    parent of the next: no branch or hole, no subgraph, no delta channel, nothing that records runs
    or was written by this library, no checkpoint format before 4, no writes without a checkpoint.
    A plan that keeps its newest state drops all but the newest checkpoint, and does nothing else.
    """

    def is_plain(self, thread_id: str) -> bool:
        """Tell whether the thread is plain, or at least looks so by its newest checkpoint."""
        ...

    async def ais_plain(self, thread_id: str) -> bool: ...

    def cut_plain(self, thread_id: str) -> int | None:
        """Do what that plan says, as ``apply`` does; return how many checkpoints went.

        ``None``, and nothing changed, if the thread is not plain, or if the user's transaction
        sees what others commit meanwhile.
        """
        ...

    async def acut_plain(self, thread_id: str) -> int | None: ...
