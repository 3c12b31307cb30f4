"""What this process has seen of leaves: a memory that may forget, never a source of truth."""

from __future__ import annotations

import threading
from collections import OrderedDict
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class KnownLeaf:
    """A metadata-only checkpoint of the root namespace that was stored when last seen.

    ``input_version`` is the version of ``__start__`` that it carries, if any: the turn it is in.
    """

    leaf_id: str
    parent_id: str
    input_version: Any


@dataclass(slots=True)
class _Thread:
    live: dict[str, KnownLeaf] = field(default_factory=dict)
    unmet: bool = False
    reclaimed: dict[str, str] = field(default_factory=dict)


class KnownLeaves:
    """Remember live and reclaimed leaves of root namespaces, for clones of one saver together.

    - Holds at most ``max_entries`` leaves; the least recently used is forgotten first. Whoever
      asks must be right without an answer too.
    - Thread-safe, and lock-free for a thread of which nothing is known: every ``put`` and
      ``put_writes`` asks.
    - Keeps nothing mutable of the caller's.
    """

    def __init__(self, max_entries: int = 10_000) -> None:
        if isinstance(max_entries, bool) or not isinstance(max_entries, int):
            raise TypeError(f"max_entries must be an int, not {max_entries!r}")
        if max_entries < 1:
            raise ValueError(f"max_entries must be at least 1, not {max_entries}")
        self._max_entries = max_entries
        self._lock = threading.Lock()
        # Indexed by thread, so that forgetting a thread costs as much as is known of it and
        # finding the leaves of a parent looks at the thread's live ones only.
        self._threads: dict[str, _Thread] = {}
        self._recent: OrderedDict[tuple[str, str], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._recent)

    def saw(self, thread_id: str, leaf_id: str, parent_id: str, input_version: Any = None) -> None:
        """Remember a live leaf."""
        leaf = KnownLeaf(leaf_id, parent_id, deepcopy(input_version))
        with self._lock:
            thread = self._threads.setdefault(thread_id, _Thread())
            thread.reclaimed.pop(leaf_id, None)
            thread.live[leaf_id] = leaf
            thread.unmet = True
            self._use(thread_id, leaf_id)

    def knows(self, thread_id: str) -> bool:
        """Tell whether anything is known of a thread; for most nothing is."""
        return thread_id in self._threads

    def meets(self, thread_id: str) -> bool:
        """Tell whether a leaf was seen since the last time this was asked."""
        thread = self._threads.get(thread_id)
        if thread is None or not thread.unmet:
            return False
        thread.unmet = False
        return bool(thread.live)

    def leaf(self, thread_id: str, checkpoint_id: str) -> KnownLeaf | None:
        """Return what is known of a live leaf."""
        if thread_id not in self._threads:
            return None
        with self._lock:
            thread = self._threads.get(thread_id)
            leaf = thread.live.get(checkpoint_id) if thread else None
            if leaf:
                self._use(thread_id, leaf.leaf_id)
            return leaf

    def leaf_on(self, thread_id: str, parent_id: str) -> KnownLeaf | None:
        """Return the newest live leaf known on a parent."""
        if thread_id not in self._threads:
            return None
        with self._lock:
            thread = self._threads.get(thread_id)
            live = thread.live.values() if thread else ()
            leaves = [leaf for leaf in live if leaf.parent_id == parent_id]
            newest = max(leaves, key=lambda leaf: leaf.leaf_id, default=None)
            if newest:
                self._use(thread_id, newest.leaf_id)
            return newest

    def reclaimed(self, thread_id: str, leaf_id: str, parent_id: str) -> None:
        """Remember that a leaf is gone, and which checkpoint holds its state."""
        with self._lock:
            thread = self._threads.setdefault(thread_id, _Thread())
            thread.live.pop(leaf_id, None)
            thread.reclaimed[leaf_id] = parent_id
            self._use(thread_id, leaf_id)

    def parent_of(self, thread_id: str, checkpoint_id: str) -> str | None:
        """Return the checkpoint that holds a reclaimed leaf's state, through reclaimed parents.

        ``None`` for a checkpoint not known as reclaimed, and where what is known goes in circles.
        """
        if thread_id not in self._threads:
            return None
        with self._lock:
            thread = self._threads.get(thread_id)
            reclaimed = thread.reclaimed if thread else {}
            passed: set[str] = set()
            at = checkpoint_id
            while at in reclaimed and at not in passed:
                passed.add(at)
                # In this order a chain is forgotten from its start, and never cut in the middle.
                self._use(thread_id, at)
                at = reclaimed[at]
            return at if passed and at not in passed else None

    def forget(self, thread_id: str, checkpoint_id: str) -> None:
        """Stop taking a checkpoint for a live leaf. That it was reclaimed stays known."""
        if thread_id not in self._threads:
            return
        with self._lock:
            thread = self._threads.get(thread_id)
            if thread and checkpoint_id in thread.live:
                self._drop(thread_id, checkpoint_id)

    def forget_thread(self, thread_id: str) -> None:
        """Forget everything about a thread."""
        if thread_id not in self._threads:
            return
        with self._lock:
            thread = self._threads.pop(thread_id, None)
            if thread:
                for leaf_id in (*thread.live, *thread.reclaimed):
                    del self._recent[thread_id, leaf_id]

    def _use(self, thread_id: str, leaf_id: str) -> None:
        self._recent[thread_id, leaf_id] = None
        self._recent.move_to_end((thread_id, leaf_id))
        if len(self._recent) > self._max_entries:
            self._drop(*next(iter(self._recent)))

    def _drop(self, thread_id: str, leaf_id: str) -> None:
        del self._recent[thread_id, leaf_id]
        thread = self._threads[thread_id]
        thread.live.pop(leaf_id, None)
        thread.reclaimed.pop(leaf_id, None)
        if not thread.live and not thread.reclaimed:
            del self._threads[thread_id]
