"""One ``put`` as data: what a caller stores, where, and what the classifier takes it for."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import ChannelVersions, Checkpoint, CheckpointMetadata

from retaining_saver import folds
from retaining_saver._steps import Steps, call
from retaining_saver.parts import Parts
from retaining_saver.records import readdressed

logger = logging.getLogger("retaining_saver")


@dataclass(frozen=True, slots=True)
class Put:
    """The arguments of one ``put``."""

    config: RunnableConfig
    checkpoint: Checkpoint
    metadata: CheckpointMetadata
    new_versions: ChannelVersions
    kind: str | None = None
    """What the classifier took it for; asked before any lock is held."""

    def classified(self, parts: Parts) -> Put:
        """Ask the classifier. One that raises is logged and recognises nothing."""
        if self.new_versions or parts.backend is None:
            return self
        kind = folds.kind_of(self.checkpoint["id"], self.metadata)
        try:
            kind = kind or parts.classify(self.metadata)
            if kind is not None and not isinstance(kind, str):
                raise TypeError(f"A kind is text or None, not {kind!r}")
            return replace(self, kind=kind)
        except Exception:
            logger.exception("the classifier failed; the checkpoint is stored as it is")
            return self

    def under(self, parent_id: str) -> Put:
        """The same put with another parent."""
        return replace(self, config=readdressed(self.config, parent_id))

    def steps(self, parts: Parts) -> Steps[RunnableConfig]:
        """Store it with the wrapped saver."""
        return call(
            parts.inner.put,
            parts.inner.aput,
            self.config,
            self.checkpoint,
            self.metadata,
            self.new_versions,
        )
