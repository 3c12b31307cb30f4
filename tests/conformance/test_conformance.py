"""LangGraph's own conformance kit says the same of a wrapped saver as of the bare one."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.conformance.capabilities import Capability
from langgraph.checkpoint.conformance.report import CapabilityReport

from retaining_saver import RetainingSaver
from tests.support.savers import Where, open_saver

BASE = {"put", "put_writes", "get_tuple", "list", "delete_thread"}


async def _report(kind: str, where: Where, options: dict[str, Any] | None) -> CapabilityReport:
    @checkpointer_test(name=kind)
    async def made() -> AsyncGenerator[BaseCheckpointSaver[Any], None]:
        async with open_saver(kind, where) as bare:
            yield bare if options is None else RetainingSaver(bare, **options)

    return await validate(made)


def _passed(report: CapabilityReport) -> set[str]:
    return {name for name, result in report.results.items() if result.passed}


def _failures(report: CapabilityReport) -> list[str]:
    return [failure for result in report.results.values() for failure in result.failures]


@pytest.mark.parametrize("annotations", ["leaf", "fold"])
@pytest.mark.parametrize("kind", ["memory", "asqlite", "apg", "apg_pool"])
async def test_every_capability_of_the_bare_saver_passes_through(
    kind: str, annotations: str, empty_where: Where
) -> None:
    bare = await _report(kind, empty_where, None)
    wrapped = await _report(kind, empty_where, {"annotations": annotations})
    assert [] == _failures(wrapped)
    assert BASE <= _passed(bare)
    assert set() == _passed(bare) - _passed(wrapped)


@pytest.mark.parametrize("kind", ["memory", "asqlite", "apg"])
async def test_all_eight_capabilities_are_there_and_pass(kind: str, empty_where: Where) -> None:
    report = await _report(kind, empty_where, {})
    assert {c.value for c in Capability} == _passed(report)
    assert 8 == len(_passed(report))
    assert [] == _failures(report)
