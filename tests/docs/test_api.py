"""The API page names everything that users may rely on."""

from __future__ import annotations

import re
from dataclasses import fields
from inspect import Parameter, signature
from pathlib import Path
from typing import get_args

import pytest

import retaining_saver
from retaining_saver import (
    CacheStats,
    RetainingSaver,
    RetentionPlan,
    RetentionPolicy,
    RetentionReport,
    StorageStats,
)
from retaining_saver.admission import Outcome

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
_SPAN = re.compile(r"`([^`\n]+)`")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
NAMED = {name for span in _SPAN.findall(PAGE) for name in _NAME.findall(span)}


def _public(kind: type) -> list[str]:
    return [name for name in vars(kind) if not name.startswith("_")]


def _twin_of(name: str) -> str | None:
    """Return the blocking spelling of an awaitable method, which stands for both on the page."""
    blocking = name[1:]
    return blocking if name.startswith("a") and hasattr(RetainingSaver, blocking) else None


def _options(function: object) -> list[str]:
    parameters = signature(function).parameters.values()  # type: ignore[arg-type]  # A class's own.
    return [p.name for p in parameters if p.kind is Parameter.KEYWORD_ONLY]


def test_every_public_name_is_on_the_page() -> None:
    assert [] == sorted(set(retaining_saver.__all__) - NAMED)


def test_every_public_method_of_the_saver_is_on_the_page() -> None:
    wanted = {_twin_of(name) or name for name in _public(RetainingSaver)}
    assert "enforce_thread_retention" in wanted
    assert [] == sorted(wanted - NAMED)


def test_every_option_of_the_saver_is_on_the_page() -> None:
    wanted = set(_options(RetainingSaver.__init__))
    assert "policy" in wanted
    assert [] == sorted(wanted - NAMED)


@pytest.mark.parametrize(
    "kind", [RetentionPolicy, RetentionReport, RetentionPlan, StorageStats, CacheStats]
)
def test_every_field_of_a_record_is_on_the_page(kind: type) -> None:
    assert [] == sorted({field.name for field in fields(kind)} - NAMED)


def test_every_outcome_of_an_admission_is_on_the_page() -> None:
    assert [] == sorted(set(get_args(Outcome)) - NAMED)
