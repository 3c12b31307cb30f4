"""Listing in pages, so that no lock of the wrapped saver is held while the caller looks at an item.

The database savers hold theirs while a listing is paused: a deletion inside ``for ... in list()``
would wait for itself. Carriers are left out: nobody can resume from one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple

from retaining_saver.folds import kind_of

PAGE = 64
"""Checkpoints that are in memory at once."""

Saver = BaseCheckpointSaver[Any]


@dataclass(slots=True)
class Listing:
    """The arguments of one ``list`` and how far it got."""

    config: RunnableConfig | None
    filter: dict[str, Any] | None
    before: RunnableConfig | None
    limit: int | None
    done: bool = False

    @property
    def pages(self) -> bool:
        """Tell whether ids alone say how to go on: within one thread, newest first."""
        return self.config is not None and (self.limit is None or self.limit > 0)

    def arguments(self) -> dict[str, Any]:
        """Ask for the next page."""
        size = PAGE if self.limit is None else min(PAGE, self.limit)
        return {"filter": self.filter, "before": self.before, "limit": size}

    def take(self, page: list[CheckpointTuple]) -> list[CheckpointTuple]:
        """Note a page, and return what of it to show."""
        size = PAGE if self.limit is None else min(PAGE, self.limit)
        shown = [found for found in page if not is_carrier(found)]
        if self.limit is not None:
            self.limit -= len(shown)
        self.done = len(page) < size or self.limit == 0
        if page:
            last = min(found.checkpoint["id"] for found in page)
            self.before = {"configurable": {"checkpoint_id": last}}
        return shown


def is_carrier(found: CheckpointTuple) -> bool:
    """Tell whether a checkpoint only carries what delta channels need across a cut."""
    return kind_of(found.checkpoint["id"], found.metadata) == "carrier"


def shown(found: Iterator[CheckpointTuple], limit: int | None) -> Iterator[CheckpointTuple]:
    """Leave out carriers, and stop after ``limit`` others."""
    return islice((item for item in found if not is_carrier(item)), limit)


async def ashown(
    found: AsyncIterator[CheckpointTuple], limit: int | None
) -> AsyncIterator[CheckpointTuple]:
    """Leave out carriers, and stop after ``limit`` others."""
    left = limit
    async for item in found:
        if not is_carrier(item):
            yield item
            left = None if left is None else left - 1
            if left == 0:
                return


def paged(inner: Saver, listing: Listing) -> Iterator[CheckpointTuple]:
    """List with ``inner``, a page at a time."""
    while not listing.done:
        page = [*inner.list(listing.config, **listing.arguments())]
        yield from listing.take(page)


async def apaged(inner: Saver, listing: Listing) -> AsyncIterator[CheckpointTuple]:
    """List with ``inner``, a page at a time."""
    while not listing.done:
        page = [found async for found in inner.alist(listing.config, **listing.arguments())]
        for found in listing.take(page):
            yield found
