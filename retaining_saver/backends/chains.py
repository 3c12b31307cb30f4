"""Put rows that came in no order along the chain of parents. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

T = TypeVar("T")


def along_parents(
    checkpoint_id: str | None, links: Mapping[str, tuple[str | None, T]]
) -> Iterator[tuple[str, T]]:
    """Yield a checkpoint and its ancestors, newest first; a missing parent or a cycle ends it.

    ``links`` holds each checkpoint's parent id and what is to be yielded for it.
    """
    seen: set[str] = set()
    while checkpoint_id is not None and checkpoint_id in links and checkpoint_id not in seen:
        seen.add(checkpoint_id)
        parent_id, value = links[checkpoint_id]
        yield checkpoint_id, value
        checkpoint_id = parent_id
