"""Errors. A message says what was asked, what was found, and what to do."""

from __future__ import annotations


class RetainingSaverError(Exception):
    """The base of every error that this library raises by itself."""


class CheckpointNotFoundError(RetainingSaverError):
    """A checkpoint id was named explicitly and is not stored."""


class CheckpointReclaimedError(CheckpointNotFoundError):
    """A checkpoint id was named explicitly and was reclaimed: its state lives on in its parent."""

    def __init__(self, thread_id: str, leaf_id: str, parent_id: str) -> None:
        super().__init__(
            f"Checkpoint {leaf_id} of thread {thread_id} was metadata-only and has been "
            f"reclaimed; the same state is stored as checkpoint {parent_id}. "
            f"Use {parent_id}, or no checkpoint_id for the newest state."
        )
        self.thread_id = thread_id
        self.leaf_id = leaf_id
        self.parent_id = parent_id

    def __reduce__(self) -> tuple[type[CheckpointReclaimedError], tuple[str, str, str]]:
        return type(self), (self.thread_id, self.leaf_id, self.parent_id)


class ChannelModeMismatchError(RetainingSaverError):
    """A checkpoint written in one channel mode was read in the other."""


class CheckpointLineageError(RetainingSaverError):
    """The chain of parents cannot be followed to where it was asked to lead."""


class CheckpointParentMissingError(CheckpointLineageError):
    """No parent link was recorded, as in threads that were imported."""


class PolicyError(RetainingSaverError, ValueError):
    """A retention policy contradicts itself or holds an impossible value."""


class UnsupportedSaverError(RetainingSaverError, TypeError, NotImplementedError):
    """The wrapped saver has no backend for what was asked."""


class PlanRefused(RetainingSaverError):
    """A plan could not be applied because the thread kept changing or is broken."""


class PinsFullError(RetainingSaverError):
    """A pin registry is full of live pins and would have to break a promise to take another."""
