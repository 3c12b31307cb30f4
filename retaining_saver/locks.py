"""One lock per conversation thread, shared by OS threads and event loops alike."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from weakref import WeakValueDictionary

from aiologic import BinarySemaphore


class LockWouldDeadlock(RuntimeError):
    """Waiting for a lock would never end."""


class ThreadLocks:
    """Exclude each other's work on one ``thread_id`` within this process.

    - Works across any number of OS threads and event loops at once, first come, first served.
    - Waiting in ``async with`` never blocks the loop; cancelling it leaves nothing acquired.
    - Different thread ids never wait for each other.
    - A thread id that nobody holds or waits for has no lock object.
    - Not re-entrant. A thread that would wait for itself gets ``LockWouldDeadlock``: one that holds
      the lock already, or that would block the very event loop whose task holds the lock or is
      before it in the queue. A *task* that asks for what it holds waits for ever.
    - Hold one at a time: two that are taken in opposite orders wait for each other.
    """

    def __init__(self) -> None:
        self._entries: WeakValueDictionary[str, _Entry] = WeakValueDictionary()
        # Held for a lookup and an insertion, never while waiting. Re-entrant, because a garbage
        # collection in between may finish an abandoned operation that uses these locks.
        self._registry = threading.RLock()

    def hold(self, thread_id: str) -> Hold:
        """Return what holds the lock of ``thread_id`` in one ``with`` or ``async with``."""
        return Hold(self, thread_id)

    @contextmanager
    def hold_if_possible(self, thread_id: str) -> Iterator[None]:
        """Hold the lock, or go on without it where waiting would never end.

        For work that the database's own conditions keep safe, too: the lock saves it from refusals.
        """
        with ExitStack() as stack:
            with suppress(LockWouldDeadlock):
                stack.enter_context(self.hold(thread_id))
            yield

    def __len__(self) -> int:
        """Count the thread ids that somebody holds or waits for."""
        return len(self._entries)

    def _entry(self, thread_id: str) -> _Entry:
        with self._registry:
            entry = self._entries.get(thread_id)
            if entry is None:
                entry = self._entries[thread_id] = _Entry()
            return entry


class Hold:
    """Hold one lock once: good for a single ``with`` or ``async with``."""

    __slots__ = ("_entry", "_locks", "_os_thread", "_thread_id")

    def __init__(self, locks: ThreadLocks, thread_id: str) -> None:
        self._locks = locks
        self._thread_id = thread_id
        self._entry: _Entry | None = None
        self._os_thread = 0

    def __enter__(self) -> None:
        self._join(blocks=True)
        try:
            self._semaphore.green_acquire()
        except BaseException:
            self._leave()
            raise

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._release()

    async def __aenter__(self) -> None:
        self._join(blocks=False)
        try:
            await self._semaphore.async_acquire()
        except BaseException:
            self._leave()
            raise

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # No await in here: a cancellation cannot arrive before the lock is free again.
        self._release()

    @property
    def _semaphore(self) -> BinarySemaphore:
        if self._entry is None:
            raise RuntimeError(f"The lock of thread {self._thread_id!r} is not held")
        return self._entry.semaphore

    def _join(self, *, blocks: bool) -> None:
        if self._entry is not None:
            raise RuntimeError(
                f"This hold on thread {self._thread_id!r} is in use; ask for another one"
            )
        # The strong reference keeps the entry alive, so that everyone who comes meets at it.
        # No local variable: a traceback would keep the entry alive for as long as itself.
        self._entry = self._locks._entry(self._thread_id)
        self._os_thread = threading.get_ident()
        # Nobody else adds this OS thread's number, so a "no" stays true while it waits.
        if blocks and self._os_thread in self._entry.os_threads:
            self._entry = None
            raise LockWouldDeadlock(
                f"Waiting for the lock of thread {self._thread_id!r} would never end: this OS "
                f"thread holds it, or runs the event loop whose task holds or awaits it. "
                f"Use the async methods on an event loop."
            )
        self._entry.os_threads.append(self._os_thread)

    def _leave(self) -> None:
        if self._entry is not None:
            self._entry.os_threads.remove(self._os_thread)
            self._entry = None

    def _release(self) -> None:
        semaphore = self._semaphore
        self._leave()
        semaphore.release()


class _Entry:
    """The lock of one thread id, and who holds it or waits for it."""

    __slots__ = ("__weakref__", "os_threads", "semaphore")

    def __init__(self) -> None:
        # A semaphore has no owner: the operation may be finished by another OS thread or task.
        self.semaphore = BinarySemaphore()
        # One number per holder and waiter; list.append and list.remove are atomic.
        self.os_threads: list[int] = []
