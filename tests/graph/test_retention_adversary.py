"""Shapes that once lost something to whole-thread retention, each as short as it could be made."""

from __future__ import annotations

import operator
from typing import Annotated, Any

import pytest
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt
from typing_extensions import TypedDict

from tests.support.retained import open_retained, said, timeless
from tests.support.savers import Where

KINDS = ("memory", "sqlite", "pg")


class _Log(TypedDict):
    log: Annotated[list[str], operator.add]


def _remembering(saver: Any) -> Any:
    """Build a graph whose only node is a persistent subgraph that counts, then asks."""
    child = StateGraph(_Log)
    child.add_node("counts", lambda state: {"log": [f"r{len(state['log'])}"]})
    child.add_node("asks", lambda state: {"log": [interrupt("which?")]})
    child.add_edge(START, "counts")
    child.add_edge("counts", "asks")
    builder = StateGraph(_Log)
    builder.add_node("remembers", child.compile(checkpointer=True))
    builder.add_edge(START, "remembers")
    return builder.compile(checkpointer=saver)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_replayed_fork_reads_its_subgraphs_as_before_the_parent_that_went(
    kind: str, where: Where, thread_id: str
) -> None:
    """A replay of a fork reads what was newest before the fork's parent, not before the fork."""
    async with open_retained(kind, where, thread_id, _remembering) as thread:
        await thread.on_bare.say({"log": ["one"]})
        waits = await thread.on_bare.at_rest()
        await thread.on_bare.say(Command(resume="a"))
        await thread.on_bare.update(None, at=waits, as_node="__copy__")
        fork = await thread.on_bare.at_rest()
        twin = await thread.copied("twin")
        await thread.do("prune", [thread_id])
        again = thread.dump()
        await thread.do("prune", [thread_id])
        assert again == thread.dump()
        expected = said(await twin.on_bare.say(None, at=fork))
        assert expected == said(await thread.on_ours.say(None, at=fork))
        answer: Any = Command(resume="b")
        assert said(await twin.on_bare.say(answer)) == said(await thread.on_ours.say(answer))
        assert timeless(await twin.on_bare.state()) == timeless(await thread.on_ours.state())


def _waiting_below(saver: Any, ran: list[str]) -> Any:
    """Build a persistent subgraph that waits inside a subgraph of its own."""

    def begin(state: Any) -> Any:
        ran.append("begins")
        return {"log": ["begun"]}

    asks = StateGraph(_Log)
    asks.add_node("begins", begin)
    asks.add_node("asks", lambda state: {"log": [interrupt("which?")]})
    asks.add_edge(START, "begins")
    asks.add_edge("begins", "asks")
    child = StateGraph(_Log)
    child.add_node("calls", asks.compile())
    child.add_edge(START, "calls")
    builder = StateGraph(_Log)
    builder.add_node("remembers", child.compile(checkpointer=True))
    builder.add_edge(START, "remembers")
    return builder.compile(checkpointer=saver)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_inside_a_subgraph_that_waits_outlives_the_root_checkpoint_it_ran_under(
    kind: str, where: Where, thread_id: str
) -> None:
    """A persistent subgraph's head stays, and goes on in its call when a later turn resumes it."""
    ran: list[str] = []

    def builder(saver: Any) -> Any:
        return _waiting_below(saver, ran)

    async with open_retained(kind, where, thread_id, builder) as thread:
        await thread.on_bare.say({"log": ["one"]})
        await thread.on_bare.say({"log": ["two"]}, interrupt_before=["remembers"])
        twin = await thread.copied("twin")
        await thread.do("prune", [thread_id])
        ran.clear()
        later: tuple[Any, ...] = (None, Command(resume="a"))
        for given in later:
            assert said(await twin.on_bare.say(given)) == said(await thread.on_ours.say(given))
            assert timeless(await twin.on_bare.state()) == timeless(await thread.on_ours.state())
        # What had run before the question is not run again.
        assert [] == ran
