"""Configs are read in one place, the way savers read them."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.runnables import RunnableConfig

from retaining_saver.records import (
    Ref,
    is_exit_run,
    is_root_run,
    named_refs,
    readdressed,
)


def config(**configurable: Any) -> RunnableConfig:
    return {"configurable": {"thread_id": "t", **configurable}}


@pytest.mark.parametrize(
    ("configurable", "expected"),
    [
        ({}, Ref("t")),
        ({"checkpoint_ns": "a:1", "checkpoint_id": "c"}, Ref("t", "a:1", "c")),
        ({"checkpoint_ns": None, "checkpoint_id": None}, Ref("t")),
        ({"checkpoint_id": ""}, Ref("t")),
        ({"thread_id": 7}, Ref("7")),
    ],
)
def test_a_ref_says_what_a_config_names(configurable: dict[str, Any], expected: Ref) -> None:
    assert expected == Ref.of(config(**configurable))


def test_a_config_without_a_thread_is_an_error() -> None:
    with pytest.raises(KeyError, match="thread_id"):
        Ref.of({"configurable": {}})


@pytest.mark.parametrize("ref", [Ref("t"), Ref("t", "a:1"), Ref("t", "", "c")])
def test_a_ref_reads_its_own_config(ref: Ref) -> None:
    assert ref == Ref.of(ref.config())


def test_a_head_is_spelled_without_an_id() -> None:
    assert {"thread_id": "t", "checkpoint_ns": ""} == Ref("t").config()["configurable"]


def test_at_names_another_checkpoint_of_the_same_namespace() -> None:
    assert Ref("t", "a", "2") == Ref("t", "a", "1").at("2")
    assert Ref("t", "a") == Ref("t", "a", "1").at(None)


@pytest.mark.parametrize(
    ("configurable", "expected"),
    [
        ({"__pregel_runtime": object()}, True),
        ({"__pregel_runtime": object(), "checkpoint_ns": ""}, True),
        ({"__pregel_runtime": object(), "checkpoint_ns": "sub:1"}, False),
        ({"__pregel_runtime": object(), "__pregel_task_id": "x"}, False),
        ({}, False),
    ],
)
def test_only_the_root_loop_of_a_run_counts_as_one(
    configurable: dict[str, Any], expected: bool
) -> None:
    assert expected == is_root_run(config(**configurable))


@pytest.mark.parametrize(("durability", "expected"), [("exit", True), ("sync", False)])
def test_exit_runs_are_told_by_their_durability(durability: str, expected: bool) -> None:
    assert expected == is_exit_run(config(__pregel_durability=durability))


def test_a_config_without_durability_is_no_exit_run() -> None:
    assert is_exit_run(config()) is False


def test_every_checkpoint_that_a_config_names_is_listed_once() -> None:
    named = named_refs(
        config(
            checkpoint_ns="sub:1",
            checkpoint_id="c2",
            checkpoint_map={"": "c1", "sub:1": "c2", "sub:2": None},
        )
    )
    assert (Ref("t", "", "c1"), Ref("t", "sub:1", "c2")) == named


@pytest.mark.parametrize("configurable", [{}, {"checkpoint_map": None}, {"checkpoint_map": {}}])
def test_an_unpinned_config_names_nothing(configurable: dict[str, Any]) -> None:
    assert () == named_refs(config(**configurable))


def test_readdressing_changes_the_id_of_a_copy_only() -> None:
    before = config(checkpoint_id="c", checkpoint_ns="", other=[1])
    before["tags"] = ["x"]
    after = readdressed(before, "p")
    assert {
        "configurable": {"thread_id": "t", "checkpoint_id": "p", "checkpoint_ns": "", "other": [1]},
        "tags": ["x"],
    } == after
    assert "c" == before["configurable"]["checkpoint_id"]
