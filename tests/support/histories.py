"""Threads with real histories of every kind, made on a bare saver by running real graphs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from langgraph.types import Command

from tests.support import graphs
from tests.support.faces import faces_of
from tests.support.leaves import aput_leaf, put_leaf
from tests.support.savers import Saver
from tests.support.threads import named


@dataclass(frozen=True, slots=True)
class Talk:
    """A graph on one thread of a bare saver, used through a face that the saver has."""

    kind: str
    saver: Saver
    graph: Any
    thread_id: str

    async def call(self, of: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        face = faces_of(self.kind)[-1]
        return await face(getattr(of, name), getattr(of, f"a{name}"), *args, **kwargs)

    async def say(
        self, given: Any, at: str | None = None, run_id: str | None = None, **options: Any
    ) -> Any:
        """Run the graph on the thread, or from one of its checkpoints."""
        config: Any = named(self.thread_id, at)
        if run_id is not None:
            config["metadata"] = {"run_id": run_id}
        return await self.call(self.graph, "invoke", given, config, **options)

    async def state(self, at: str | None = None) -> Any:
        return await self.call(self.graph, "get_state", named(self.thread_id, at))

    async def update(self, values: Any, at: str | None = None, as_node: str | None = None) -> Any:
        config = named(self.thread_id, at)
        return await self.call(self.graph, "update_state", config, values, as_node)

    async def leaf(self, run_id: str) -> str:
        """Record a run as an application does."""
        face = faces_of(self.kind)[-1]
        args = (self.saver, self.thread_id)
        _, leaf_id = await face(put_leaf, aput_leaf, *args, run_id=run_id)
        return leaf_id

    async def ids(self) -> list[str]:
        """List the ids of the root namespace, oldest first."""
        config = named(self.thread_id, checkpoint_ns="")
        if faces_of(self.kind)[-1].name == "async":
            found = [each async for each in self.saver.alist(config)]
        else:
            found = await asyncio.to_thread(lambda: list(self.saver.list(config)))
        return sorted(each.checkpoint["id"] for each in found)

    async def at_rest(self) -> str:
        """Return the id of the newest checkpoint, which is no leaf."""
        found = await self.call(self.saver, "get_tuple", named(self.thread_id, checkpoint_ns=""))
        return str(found.checkpoint["id"])


@dataclass(frozen=True, slots=True)
class History:
    """A graph, how a thread came to be, and what it is given next."""

    name: str
    graph: Callable[[Saver], Any]
    live: Callable[[Talk], Awaitable[None]]
    later: tuple[Any, ...]

    def __str__(self) -> str:
        return self.name


async def _turns(talk: Talk, **options: Any) -> None:
    for n in range(6):
        await talk.say(graphs.say(f"turn-{n}"), **options)


async def _exit_turns(talk: Talk) -> None:
    await _turns(talk, durability="exit")


async def _logged(talk: Talk) -> None:
    for n in range(4):
        await talk.say({"log": [f"u{n}"], "notes": [f"n{n}"]})


async def _with_leaves(talk: Talk) -> None:
    for n in range(4):
        await talk.say(graphs.say(f"turn-{n}"))
        await talk.leaf(f"run-{n}")


async def _exit_with_leaves(talk: Talk) -> None:
    for n in range(4):
        await talk.say(graphs.say(f"turn-{n}"), durability="exit")
        await talk.leaf(f"run-{n}")


async def _forked(talk: Talk) -> None:
    await talk.say(graphs.say("one"))
    first = await talk.at_rest()
    await talk.say(graphs.say("two"))
    await talk.say(graphs.say("three"))
    await talk.say(graphs.say("another two"), at=first)
    second = await talk.at_rest()
    await talk.update(graphs.say("put in"), at=first)
    await talk.say(graphs.say("three again"), at=second)
    await talk.say(graphs.say("four again"))


async def _answered(talk: Talk) -> None:
    for n in range(3):
        await talk.say({"log": [f"u{n}"]}, run_id=f"asks-{n}")
        await talk.say(Command(resume=f"a{n}"), run_id=f"answers-{n}")
    await talk.say({"log": ["last"]}, run_id="asks-last")


async def _updated(talk: Talk) -> None:
    for n in range(3):
        await talk.say({"log": [f"u{n}"]})
        await talk.update({"log": [f"put in {n}"]}, as_node="helps")


_SAID = (graphs.say("and now"), graphs.say("and then"))
_ANSWERED: tuple[Any, ...] = (Command(resume="later"), {"log": ["more"]})
_LOGGED = ({"log": ["v"], "notes": ["m"]}, {"log": ["w"]})


def _chat(mode: graphs.Mode) -> Callable[[Saver], Any]:
    return lambda saver: graphs.chat_graph(saver, mode)


def _asking(mode: graphs.Mode) -> Callable[[Saver], Any]:
    return lambda saver: graphs.asking_graph(saver, mode)


def _quiet_subgraphs(mode: graphs.Mode) -> Callable[[Saver], Any]:
    return lambda saver: graphs.subgraph_graph(saver, mode, ask=False)


def _asking_subgraphs(mode: graphs.Mode) -> Callable[[Saver], Any]:
    return lambda saver: graphs.subgraph_graph(saver, mode)


HISTORIES = [
    *(History(f"turns-{m}", _chat(m), _turns, _SAID) for m in graphs.MODES),
    *(History(f"exit-{m}", _chat(m), _exit_turns, _SAID) for m in graphs.MODES),
    *(History(f"leaves-{m}", _chat(m), _with_leaves, _SAID) for m in graphs.MODES),
    History("exit-leaves-delta", _chat("delta"), _exit_with_leaves, _SAID),
    *(History(f"forks-{m}", _chat(m), _forked, _SAID) for m in graphs.MODES),
    *(History(f"questions-{m}", _asking(m), _answered, _ANSWERED) for m in graphs.MODES),
    *(History(f"subgraphs-{m}", _quiet_subgraphs(m), _updated, _LOGGED[1:]) for m in graphs.MODES),
    *(History(f"calls-{m}", _asking_subgraphs(m), _answered, _ANSWERED) for m in graphs.MODES),
    History("two-deltas", graphs.two_delta_graph, _logged, _LOGGED),
]
"""One of each kind: more turns than a snapshot takes, leaves, forks, questions, subgraphs."""
BY_NAME = {history.name: history for history in HISTORIES}
