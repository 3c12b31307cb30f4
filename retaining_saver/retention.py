"""Whole-thread retention: plan, purge, apply, look once more. The order of effects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from retaining_saver import admission
from retaining_saver._steps import Steps, call
from retaining_saver.backends.retention import PlainCuts, RetentionBackend, StorageStats
from retaining_saver.entries import StoredThread
from retaining_saver.errors import PlanRefused, UnsupportedSaverError
from retaining_saver.events import Refused, ThreadRetained
from retaining_saver.parts import Journal, Parts
from retaining_saver.plan import plan, plan_prune, plan_without_runs
from retaining_saver.planned import Carry, Entry, Graft, RetentionPlan
from retaining_saver.policy import RetentionPolicy
from retaining_saver.records import ROOT_NS, Ref

ATTEMPTS = 3
"""How often a thread is planned that changes between planning and applying."""
STRATEGIES = ("keep_latest", "delete", "delete_all")

Planner = Callable[[StoredThread, Sequence[Any]], RetentionPlan]


@dataclass(frozen=True, slots=True)
class RetentionReport:
    """What retention did to one thread, or with ``dry_run`` would do: the same numbers.

    ``problems`` are sentences on a broken thread, which was left alone.
    """

    thread_id: str
    dry_run: bool
    before: StorageStats
    after: StorageStats
    dropped: tuple[Entry, ...] = ()
    grafted: tuple[Graft, ...] = ()
    carried: tuple[Carry, ...] = ()
    problems: tuple[str, ...] = ()


def storage(parts: Parts) -> RetentionBackend:
    """Return the backend for whole threads; raises ``UnsupportedSaverError`` without one."""
    backend = parts.storage
    if not isinstance(backend, RetentionBackend):
        raise UnsupportedSaverError(
            f"{type(backend).__qualname__} reclaims leaves only; it cannot rewrite whole threads"
        )
    return backend


def by_policy(parts: Parts, policy: RetentionPolicy) -> Planner:
    """Plan what a policy asks for."""
    return lambda thread, pins: plan(thread, policy, pins, parts.clock())


def heads_only(parts: Parts) -> Planner:
    """Plan to keep the newest state of a thread and nothing else."""
    return lambda thread, pins: plan_prune(thread, pins, parts.clock())


def without_runs(parts: Parts, run_ids: Sequence[str]) -> Planner:
    """Plan to remove what some runs stored."""
    return lambda thread, pins: plan_without_runs(thread, run_ids, pins, parts.clock())


def planned(
    parts: Parts, thread_id: str, matches: Callable[[Any], bool], planner: Planner
) -> Steps[tuple[StoredThread, RetentionPlan]]:
    """Read a thread and plan it. Pins are read after the thread: a later one protects more."""
    backend = storage(parts)
    thread = yield from call(backend.stored, backend.astored, thread_id, matches)
    pins = yield from call(parts.pins.pinned, parts.pins.apinned, thread_id, parts.clock())
    return thread, planner(thread, pins)


def retain(
    parts: Parts,
    journal: Journal,
    thread_id: str,
    matches: Callable[[Any], bool],
    planner: Planner,
    *,
    dry_run: bool = False,
) -> Steps[RetentionReport]:
    """Plan a thread and apply the plan, under the thread's lock.

    The cached histories are purged before anything goes and once more after; a purge that fails
    stops it. Raises ``PlanRefused`` for a thread that changes at every attempt, and what the
    storage raises; nothing is changed then.
    """
    backend = storage(parts)
    for _ in range(ATTEMPTS):
        thread, decided = yield from planned(parts, thread_id, matches, planner)
        if decided.changes and not dry_run:
            yield from purge(parts, thread_id)
        applied = yield from call(backend.apply, backend.aapply, thread, decided, dry_run=dry_run)
        if applied is None:
            continue
        if decided.changes and not dry_run:
            yield from _after(parts, backend, journal, decided)
        return RetentionReport(
            thread_id,
            dry_run,
            applied.before,
            applied.after,
            tuple(decided.drop),
            tuple(decided.graft),
            decided.carry,
            decided.problems,
        )
    raise PlanRefused(
        f"Thread {thread_id} changed between planning and applying {ATTEMPTS} times in a row. "
        "Nothing was changed; try again when its runs have finished."
    )


def purge(parts: Parts, thread_id: str) -> Steps[None]:
    """Purge the thread's cached histories before rows go. Raises what the cache raises."""
    if parts.cache is not None:
        yield from call(parts.cache.delete_thread, parts.cache.adelete_thread, thread_id)


def _after(
    parts: Parts, backend: RetentionBackend, journal: Journal, decided: RetentionPlan
) -> Steps[None]:
    """What was stored for a dropped leaf meanwhile moves to the checkpoint that holds its state."""
    thread_id = decided.thread_id
    parts.known.forget_thread(thread_id)
    for folded in decided.fold:
        if folded.whole and folded.checkpoint_ns == ROOT_NS:
            leaf = Ref(thread_id, folded.checkpoint_ns, folded.checkpoint_id)
            parts.known.reclaimed(thread_id, leaf.id, folded.into)
            yield from admission.rescue(backend, journal, leaf, folded.into)
    yield from admission.purge(parts, journal, thread_id)
    journal.note(ThreadRetained, Ref(thread_id), count=len(decided.drop))


def prune_thread(parts: Parts, journal: Journal, thread_id: str) -> Steps[None]:
    """Keep the newest state of a thread; leave it alone if it is broken or keeps changing."""
    if (yield from _cut_plain(parts, journal, thread_id)):
        return
    outcome = "changing"
    try:
        report = yield from retain(parts, journal, thread_id, _nothing, heads_only(parts))
        outcome = "broken" if report.problems else ""
    except PlanRefused:
        pass  # Said below: the other threads of the batch go on.
    if outcome:
        journal.note(Refused, Ref(thread_id), outcome=outcome)


def _cut_plain(parts: Parts, journal: Journal, thread_id: str) -> Steps[bool]:
    """Cut a thread of which nothing is to be decided, where the backend knows how to."""
    backend = storage(parts)
    if not isinstance(backend, PlainCuts):
        return False
    if not (yield from call(backend.is_plain, backend.ais_plain, thread_id)):
        return False
    if (yield from call(parts.pins.pinned, parts.pins.apinned, thread_id, parts.clock())):
        return False
    yield from purge(parts, thread_id)
    count = yield from call(backend.cut_plain, backend.acut_plain, thread_id)
    if count is None:
        return False
    parts.known.forget_thread(thread_id)
    yield from admission.purge(parts, journal, thread_id)
    journal.note(ThreadRetained, Ref(thread_id), count=count)
    return True


def _nothing(_metadata: object) -> bool:
    return False


def delete_runs(
    parts: Parts, journal: Journal, thread_id: str, run_ids: Sequence[str]
) -> Steps[None]:
    """Remove what some runs stored in a thread. Raises ``PlanRefused`` for a broken thread."""
    planner = without_runs(parts, run_ids)
    report = yield from retain(parts, journal, thread_id, _nothing, planner)
    if report.problems:
        raise PlanRefused(f"Thread {thread_id} is left alone: {' '.join(report.problems)}")


def raise_together(refused: Sequence[PlanRefused]) -> None:
    """Raise what was refused of a batch as one error, once the rest of it is done."""
    if refused:
        raise PlanRefused(" ".join(str(refusal) for refusal in refused)) from refused[0]


def threads_of_runs(parts: Parts, run_ids: Iterable[str]) -> Steps[list[str]]:
    """List the threads that the runs stored something in."""
    if isinstance(run_ids, str):
        raise TypeError("run_ids must be a sequence of run ids, not a str")
    backend = storage(parts)
    named = [str(run_id) for run_id in run_ids]
    return (yield from call(backend.threads_of_runs, backend.athreads_of_runs, named))


def thread_ids_of(thread_ids: Iterable[Any]) -> list[str]:
    """Check the threads that ``prune`` is to work on."""
    if isinstance(thread_ids, str):
        raise TypeError("thread_ids must be a sequence of thread ids, not a str")
    return list(dict.fromkeys(str(thread_id) for thread_id in thread_ids))


def checked_strategy(strategy: str) -> str:
    """Return ``strategy`` in LangGraph's spelling."""
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, not {strategy!r}")
    return "delete" if strategy == "delete_all" else strategy


def copy_thread(parts: Parts, source: str, target: str, *, latest_only: bool) -> Steps[None]:
    """Copy a thread's rows to another that has none. An interrupted copy leaves nothing."""
    backend = storage(parts)
    if source == target:
        raise ValueError(f"Thread {source} cannot be copied onto itself")
    latest: RetentionPlan | None = None
    if latest_only:
        _, latest = yield from planned(parts, source, _nothing, _heads_of_copy(parts))
        if latest.problems:
            raise PlanRefused(f"Thread {source} cannot be cut: {' '.join(latest.problems)}")
    yield from purge(parts, target)
    if not (yield from call(backend.copy_thread, backend.acopy_thread, source, target, latest)):
        raise PlanRefused(f"Thread {target} has checkpoints already; nothing was copied onto it")


def _heads_of_copy(parts: Parts) -> Planner:
    # Pins promise ids of the source, not of its copy.
    return lambda thread, _pins: plan_prune(thread, (), parts.clock())
