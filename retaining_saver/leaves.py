"""What a metadata-only checkpoint is, and whether removing one is provably safe. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from langgraph.checkpoint.base import Checkpoint, CheckpointMetadata

from retaining_saver import folds
from retaining_saver.backends.base import Row, Surroundings
from retaining_saver.known import KnownLeaf

DURATION = folds.DURATION

Claim = Literal["marked", "structure"]
Refusal = Literal["no_leaf", "parent_missing", "versions_differ"]


def classify_duration(metadata: CheckpointMetadata) -> str | None:
    """Recognise the metadata of a checkpoint that only records how long runs took."""
    if folds.has_legacy_marker(metadata):
        return DURATION
    if metadata.get("source") == "update" and any(metadata.get(m) for m in folds.HISTORY_MAPS):
        return DURATION
    return None


def claim(checkpoint_id: str, metadata: Mapping[str, Any]) -> Claim | None:
    """Tell how a stored checkpoint claims to be metadata-only: by a mark, by its structure, or not.

    A fork never does: its id was given to a caller who means to run from it.
    """
    if metadata.get("source") == "fork":
        return None
    if folds.kind_of(checkpoint_id, metadata) == "carrier":
        return None
    if folds.kind_of(checkpoint_id, metadata) or folds.has_legacy_marker(metadata):
        return "marked"
    if metadata.get("source") == "update" and folds.adds_history(checkpoint_id, metadata):
        return "structure"
    return None


def refusal(leaf: Row, parent: Row | None) -> Refusal | None:
    """Return why ``leaf`` may not be folded into ``parent``; ``None`` if both hold one state.

    ``channel_versions`` alone prove nothing: a checkpoint that differs from its parent only in
    what its nodes have seen withdraws or asks a question.
    """
    claimed = claim(leaf.checkpoint_id, leaf.metadata)
    if claimed is None:
        return "no_leaf"
    if parent is None:
        return "parent_missing" if claimed == "marked" else "no_leaf"
    if claimed == "structure" and not folds.adds_history(
        leaf.checkpoint_id, leaf.metadata, parent.metadata
    ):
        return "no_leaf"
    if leaf.body == parent.body:
        return None
    return "versions_differ" if claimed == "marked" else "no_leaf"


def copies_state(checkpoint: Checkpoint, parent: Row) -> bool:
    """Tell whether ``checkpoint`` repeats the versions of ``parent`` and what its nodes saw."""
    return checkpoint["channel_versions"] == parent.versions and checkpoint["versions_seen"] == (
        parent.body.get("versions_seen") or {}
    )


def is_duration(
    metadata: CheckpointMetadata, checkpoint_id: str, parent: Row, by_default: bool
) -> bool:
    """Tell whether a recognised put is one that adds run history to ``parent``.

    With the default classifier a put without the legacy marker is recognised by its history maps
    alone; a writer that copied its parent's maps and adds nothing did not mean an annotation.
    """
    if not by_default or folds.has_legacy_marker(metadata):
        return metadata.get("source") != "fork"
    return folds.adds_history(checkpoint_id, metadata, parent.metadata)


def would_harm(parent: Row, around: Surroundings) -> bool:
    """Tell whether a leaf on ``parent`` would hide something from the next reader.

    It would hide a question or a failed step (writes, or something about to run), or a newer
    checkpoint; and a leaf on a leaf piles up.
    """
    return (
        parent.due
        or around.has_writes
        or around.has_newer
        or claim(parent.checkpoint_id, parent.metadata) == "marked"
    )


def started_from_input(
    checkpoint: Checkpoint, metadata: CheckpointMetadata, leaf: KnownLeaf
) -> bool:
    """Tell whether no task ran from the leaf that is about to become this checkpoint's parent.

    Task ids and subgraph namespaces derive from the checkpoint that a task runs from. A run with
    an input stores the input first; with ``durability="exit"`` the only trace of the input is the
    new version of ``__start__``.
    """
    if metadata.get("source") == "input":
        return True
    if metadata.get("source") != "loop":
        return False
    version = checkpoint["channel_versions"].get("__start__")
    return version is not None and version != leaf.input_version
