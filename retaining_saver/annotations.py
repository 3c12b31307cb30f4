"""Recording metadata about runs without changing state, and reading it back."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base.id import uuid6

from retaining_saver import folds, leaves
from retaining_saver._steps import Steps, call
from retaining_saver.backends.base import Backend
from retaining_saver.errors import CheckpointNotFoundError
from retaining_saver.events import Folded
from retaining_saver.interception import missing
from retaining_saver.parts import Journal, Parts
from retaining_saver.puts import Put
from retaining_saver.recording import put_annotation, tell_head
from retaining_saver.records import ROOT_NS, Ref

ANNOTATION = "annotation"
MAX_NESTING = 100
ATTEMPTS = 5
"""How often a head that vanishes is looked for again."""


@dataclass(frozen=True, slots=True)
class RunHistory:
    """What the main line of a thread records about its runs.

    ``durations``: whole seconds by run id. ``message_runs``: the run that wrote each message, or
    ``None`` where that was looked for and not found.
    """

    durations: dict[str, int] = field(default_factory=dict)
    message_runs: dict[str, str | None] = field(default_factory=dict)

    def entries(self) -> dict[str, Any]:
        """Spell this as checkpoint metadata."""
        maps: dict[str, Mapping[str, Any]] = {
            "run_durations": self.durations,
            "run_message_ids": self.message_runs,
        }
        return {key: dict(value) for key, value in maps.items() if value}


def run_entries(run_id: str, duration: int | None, message_ids: Iterable[str]) -> dict[str, Any]:
    """Check what is to be recorded about a run, and spell it as metadata.

    Raises ``TypeError`` for a wrong type, ``ValueError`` for a negative duration, for text that a
    backend cannot store (NUL, lone surrogates, an empty id), and where there is nothing to record.
    """
    if isinstance(message_ids, str):
        raise TypeError("message_ids must be a collection of message ids, not a str")
    messages = list(message_ids)
    for text in (run_id, *messages):
        if not isinstance(text, str):
            raise TypeError(f"Run and message ids must be text, not {text!r}")
        if not text:
            raise ValueError("Run and message ids must not be empty")
    if duration is not None and (isinstance(duration, bool) or not isinstance(duration, int)):
        raise TypeError(f"duration must be whole seconds or None, not {duration!r}")
    if duration is not None and duration < 0:
        raise ValueError(f"duration must not be negative, not {duration}")
    if duration is None and not messages:
        raise ValueError(f"Nothing to record about run {run_id!r}: no duration and no messages")
    entries: dict[str, Any] = {}
    if duration is not None:
        entries["run_durations"] = {run_id: duration}
    if messages:
        entries["run_message_ids"] = dict.fromkeys(messages, run_id)
    return storable(entries)


def storable(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plain JSON copy of ``metadata``; raise for what some backend could not store.

    ``TypeError`` for what JSON has no form for, ``ValueError`` for NUL, lone surrogates, NaN and
    infinities, integers of more than 64 bits, deep nesting, for keys that are LangGraph's or this
    library's own, and for nothing at all.
    """
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be a mapping, not {metadata!r}")
    if not metadata:
        raise ValueError("There is nothing to record: the metadata is empty")
    if reserved := sorted(folds.RESERVED_KEYS & metadata.keys()):
        raise ValueError(f"These metadata keys are not free to use: {', '.join(reserved)}")
    _refuse_extremes(metadata)
    text = json.dumps(metadata, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("The metadata contains a lone surrogate, which cannot be stored") from None
    if "\\u0000" in text.replace("\\\\", ""):
        raise ValueError("The metadata contains a NUL character, which Postgres cannot store")
    plain: dict[str, Any] = json.loads(text)
    return plain


def _refuse_extremes(value: Any, depth: int = 0) -> None:
    """Raise for what is JSON and still too large or too deep for the memory saver's msgpack."""
    if depth > MAX_NESTING:
        raise ValueError(f"The metadata is nested more than {MAX_NESTING} levels deep")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("The metadata contains an integer of more than 64 bits")
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, (list, tuple)):
        for item in value:
            _refuse_extremes(item, depth + 1)


def annotate(
    parts: Parts, journal: Journal, config: RunnableConfig, entries: Mapping[str, Any]
) -> Steps[RunnableConfig]:
    """Record ``entries`` about the head of a namespace, or about the checkpoint that is named.

    Idempotent. Never hides a newer checkpoint: a named checkpoint, and one that a leaf would do
    harm to, is folded into. A leaf carries the thread's whole run history, so that the head
    answers for it.
    """
    ref = Ref.of(config)
    for _ in range(ATTEMPTS):
        found = yield from _described(parts.storage, ref)
        if found is None:
            break
        if not folds.added_names(entries, {**found.metadata, **found.history.entries()}):
            return found.ref.config()
        named = ref.checkpoint_id is not None
        if named or ref.checkpoint_ns != ROOT_NS or parts.annotations == "fold":
            done = yield from _fold_entries(parts, journal, found.ref, entries)
        else:
            done = yield from _leaf(parts, journal, found, entries)
        if done is not None:
            return done
        # The head was a leaf that another worker has reclaimed meanwhile; look for the new head.
    return (yield from _not_found(parts, ref))


def run_history(parts: Parts, config: RunnableConfig) -> Steps[RunHistory]:
    """Read the run history of the thread's main line, from its head or the named checkpoint.

    One metadata lookup where the head carries the whole history; one metadata query more where
    not. No state is deserialised. Empty for a thread without checkpoints.
    """
    ref = Ref.of(config)
    found = yield from _described(parts.storage, ref)
    if found is not None:
        return found.history
    if ref.checkpoint_id is None:
        return RunHistory()
    return (yield from _not_found(parts, ref))


@dataclass(frozen=True, slots=True)
class _Described:
    """A checkpoint, what it records by itself, and the run history up to it."""

    ref: Ref
    metadata: Mapping[str, Any]
    history: RunHistory


def _described(backend: Backend, ref: Ref) -> Steps[_Described | None]:
    """Read a checkpoint (without an id: the head) and its history; ``None`` if it is not stored."""
    while True:
        found = yield from call(backend.metadata, backend.ametadata, ref)
        if found is None:
            return None
        target, metadata = ref.at(found[0]), found[1]
        if folds.is_whole(target.id, metadata):
            return _Described(target, metadata, merged([metadata]))
        line = yield from call(backend.lineage, backend.alineage, target)
        history = merged([metadata, *(recorded for _, recorded in line)])
        if leaves.claim(target.id, metadata) is None or any(i == target.id for i, _ in line):
            return _Described(target, metadata, history)
        if (yield from call(backend.exists, backend.aexists, target)):
            return _Described(target, metadata, history)
        # A leaf that was reclaimed between the two reads: the line of what is gone is empty.


def merged(newest_first: Iterable[Mapping[str, Any]]) -> RunHistory:
    """Merge what checkpoints of one line record; the newest word about a run or message stands."""
    return RunHistory(*folds.merged_history(newest_first))


def _not_found(parts: Parts, ref: Ref) -> Steps[NoReturn]:
    if ref.checkpoint_id is None:
        raise CheckpointNotFoundError(f"Thread {ref.thread_id} has no checkpoint to record on")
    yield from missing(parts, ref, by_run=False)
    raise CheckpointNotFoundError(
        f"Checkpoint {ref.checkpoint_id} of thread {ref.thread_id} is not stored"
    )


def _fold_entries(
    parts: Parts, journal: Journal, target: Ref, entries: Mapping[str, Any]
) -> Steps[RunnableConfig | None]:
    backend = parts.storage
    if not (yield from call(backend.fold, backend.afold, target, None, entries)):
        return None
    journal.note(Folded, target, parent_id=target.id)
    yield from tell_head(backend, journal, target, entries)
    return target.config()


def _leaf(
    parts: Parts, journal: Journal, target: _Described, entries: Mapping[str, Any]
) -> Steps[RunnableConfig | None]:
    inner = parts.inner
    head = yield from call(inner.get_tuple, inner.aget_tuple, target.ref.config())
    if head is None:
        return None
    checkpoint = copy.copy(head.checkpoint)
    checkpoint["id"] = str(uuid6())
    checkpoint["ts"] = parts.clock().isoformat()
    kind = leaves.DURATION if entries.keys() & set(folds.HISTORY_MAPS) else ANNOTATION
    history = target.history.entries()
    metadata: Any = folds.leaf_metadata(head.metadata, checkpoint["id"], kind, entries, history)
    put = Put(target.ref.config(), checkpoint, metadata, {}, kind=kind)
    return (yield from put_annotation(parts, journal, put))
