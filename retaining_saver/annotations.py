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
from retaining_saver.interception import Put, missing, put_annotation
from retaining_saver.parts import Journal, Parts
from retaining_saver.records import ROOT_NS, Ref

ANNOTATION = "annotation"


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
    infinities, for keys that are LangGraph's or this library's own, and for nothing at all.
    """
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be a mapping, not {metadata!r}")
    if not metadata:
        raise ValueError("There is nothing to record: the metadata is empty")
    if reserved := sorted(folds.RESERVED_KEYS & metadata.keys()):
        raise ValueError(f"These metadata keys are not free to use: {', '.join(reserved)}")
    text = json.dumps(metadata, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("The metadata contains a lone surrogate, which cannot be stored") from None
    if "\\u0000" in text.replace("\\\\", ""):
        raise ValueError("The metadata contains a NUL character, which Postgres cannot store")
    plain: dict[str, Any] = json.loads(text)
    return plain


def annotate(
    parts: Parts, journal: Journal, config: RunnableConfig, entries: Mapping[str, Any]
) -> Steps[RunnableConfig]:
    """Record ``entries`` about the head of a namespace, or about the checkpoint that is named.

    Idempotent. Never hides a newer checkpoint: a named checkpoint, and one that a leaf would do
    harm to, is folded into. A leaf carries the thread's whole run history, so that the head
    answers for it.
    """
    backend = parts.storage
    ref = Ref.of(config)
    found = yield from call(backend.metadata, backend.ametadata, ref)
    if found is None:
        return (yield from _not_found(parts, ref))
    target, recorded = ref.at(found[0]), found[1]
    history = yield from _history(backend, target, recorded)
    if not folds.added_names(entries, {**recorded, **history.entries()}):
        return target.config()
    named = ref.checkpoint_id is not None
    if named or ref.checkpoint_ns != ROOT_NS or parts.annotations == "fold":
        return (yield from _fold_entries(parts, backend, journal, target, entries))
    return (yield from _leaf(parts, journal, target, entries, history))


def run_history(parts: Parts, config: RunnableConfig) -> Steps[RunHistory]:
    """Read the run history of the thread's main line, from its head or the named checkpoint.

    One metadata lookup where the head carries the whole history; one metadata query more where
    not. No state is deserialised. Empty for a thread without checkpoints.
    """
    backend = parts.storage
    ref = Ref.of(config)
    found = yield from call(backend.metadata, backend.ametadata, ref)
    if found is None and ref.checkpoint_id is None:
        return RunHistory()
    if found is None:
        return (yield from _not_found(parts, ref))
    return (yield from _history(backend, ref.at(found[0]), found[1]))


def _history(backend: Backend, ref: Ref, metadata: Mapping[str, Any]) -> Steps[RunHistory]:
    if folds.is_whole(ref.id, metadata):
        return merged([metadata])
    lineage = yield from call(backend.lineage, backend.alineage, ref)
    return merged([metadata, *(recorded for _, recorded in lineage)])


def merged(newest_first: Iterable[Mapping[str, Any]]) -> RunHistory:
    """Merge what checkpoints of one line record; the newest word about a run or message stands."""
    history = RunHistory()
    for metadata in newest_first:
        durations, messages = folds.history_of(metadata)
        for run_id, duration in durations.items():
            history.durations.setdefault(run_id, duration)
        for message_id, writer in messages.items():
            history.message_runs.setdefault(message_id, writer)
    return history


def _not_found(parts: Parts, ref: Ref) -> Steps[NoReturn]:
    if ref.checkpoint_id is None:
        raise CheckpointNotFoundError(f"Thread {ref.thread_id} has no checkpoint to record on")
    yield from missing(parts, ref, by_run=False)
    raise CheckpointNotFoundError(
        f"Checkpoint {ref.checkpoint_id} of thread {ref.thread_id} is not stored"
    )


def _fold_entries(
    parts: Parts, backend: Backend, journal: Journal, target: Ref, entries: Mapping[str, Any]
) -> Steps[RunnableConfig]:
    if not (yield from call(backend.fold, backend.afold, target, None, entries)):
        yield from _not_found(parts, target)
    journal.note(Folded, target, parent_id=target.id)
    return target.config()


def _leaf(
    parts: Parts, journal: Journal, target: Ref, entries: Mapping[str, Any], history: RunHistory
) -> Steps[RunnableConfig]:
    inner = parts.inner
    head = yield from call(inner.get_tuple, inner.aget_tuple, target.config())
    if head is None:
        return (yield from _not_found(parts, target))
    checkpoint = copy.copy(head.checkpoint)
    checkpoint["id"] = str(uuid6())
    checkpoint["ts"] = parts.clock().isoformat()
    kind = leaves.DURATION if entries.keys() & set(folds.HISTORY_MAPS) else ANNOTATION
    metadata: Any = folds.leaf_metadata(
        head.metadata, checkpoint["id"], kind, entries, history.entries()
    )
    put = Put(target.config(), checkpoint, metadata, {}, kind=kind)
    return (yield from put_annotation(parts, journal, put))
