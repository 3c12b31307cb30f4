"""Small real graphs. The same input always gives the same state, message ids included."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langchain_core.runnables.config import RunnableConfig, var_child_runnable_config
from langgraph.channels.delta import DeltaChannel
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.pregel import NodeBuilder, Pregel
from langgraph.types import interrupt
from typing_extensions import TypedDict

Mode = Literal["full", "delta"]
MODES: tuple[Mode, ...] = ("full", "delta")
SNAPSHOT_FREQUENCY = 5
TOOL_OUTPUT_BYTES = 3_000


def merge_messages(state: list[AnyMessage], writes: Sequence[Any]) -> list[AnyMessage]:
    """Fold writes into messages, one after the other, as ``add_messages`` does for one."""
    for write in writes:
        state = add_messages(state, write)  # type: ignore[assignment, arg-type]  # Typed for any Messages.
    return state


def extend(state: list[str], writes: Sequence[list[str]]) -> list[str]:
    """Append every write."""
    return [*state, *(item for write in writes for item in write)]


class FullChat(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


class DeltaChat(TypedDict):
    messages: Annotated[
        list[AnyMessage], DeltaChannel(merge_messages, snapshot_frequency=SNAPSHOT_FREQUENCY)
    ]


class FullLog(TypedDict):
    log: Annotated[list[str], operator.add]


class DeltaLog(TypedDict):
    log: Annotated[list[str], DeltaChannel(extend, snapshot_frequency=SNAPSHOT_FREQUENCY)]


class TwoDeltas(TypedDict):
    log: Annotated[list[str], DeltaChannel(extend, snapshot_frequency=SNAPSHOT_FREQUENCY)]
    notes: Annotated[list[str], DeltaChannel(extend, snapshot_frequency=3)]


_CHATS: dict[Mode, type[Any]] = {"full": FullChat, "delta": DeltaChat}
_LOGS: dict[Mode, type[Any]] = {"full": FullLog, "delta": DeltaLog}


def say(text: str, message_id: str | None = None) -> dict[str, list[AnyMessage]]:
    """Make the input of one turn of a chat graph."""
    return {"messages": [HumanMessage(text, id=message_id or f"human-{text}")]}


def chat_graph(saver: Any, mode: Mode = "full", **options: Any) -> Any:
    """Build a chat: the model plans, a tool answers with some kilobytes, the model concludes.

    One turn is an input and three supersteps, and adds four messages.
    """
    builder = StateGraph(_CHATS[mode])
    builder.add_node("plan", _plan)
    builder.add_node("search", _search)
    builder.add_node("conclude", _conclude)
    builder.add_edge(START, "plan")
    builder.add_edge("plan", "search")
    builder.add_edge("search", "conclude")
    builder.add_edge("conclude", END)
    return builder.compile(checkpointer=saver, **options)


def _plan(state: Any) -> Any:
    asked = state["messages"][-1]
    call = {"name": "search", "args": {"q": asked.content}, "id": f"call-{asked.id}"}
    return {"messages": [AIMessage("", id=f"plan-{asked.id}", tool_calls=[call])]}


def _search(state: Any) -> Any:
    planned = state["messages"][-1]
    call_id = planned.tool_calls[0]["id"]
    found = (f"result for {planned.tool_calls[0]['args']['q']}. " * TOOL_OUTPUT_BYTES)[
        :TOOL_OUTPUT_BYTES
    ]
    return {"messages": [ToolMessage(found, tool_call_id=call_id, id=f"tool-{call_id}")]}


def _conclude(state: Any) -> Any:
    found = state["messages"][-1]
    return {
        "messages": [AIMessage(f"I read {len(found.content)} characters.", id=f"end-{found.id}")]
    }


def asking_graph(
    saver: Any, mode: Mode = "full", *, ran: list[str] | None = None, **options: Any
) -> Any:
    """Build two parallel nodes over a log: one appends ``"p"``, one asks and appends the answer.

    ``ran`` collects the names of the nodes that ran, each time.
    """
    builder = StateGraph(_LOGS[mode])
    for name, append in (("works", lambda: ["p"]), ("asks", _ask)):
        builder.add_node(name, _appending(name, append, ran))
        builder.add_edge(START, name)
    return builder.compile(checkpointer=saver, **options)


def failing_graph(
    saver: Any, mode: Mode = "full", *, ran: list[str] | None = None, **options: Any
) -> Any:
    """Build two nodes in a row over a log: one appends ``"p"``; one fails once, then appends."""
    failed: list[bool] = []

    def fail_once() -> list[str]:
        if not failed:
            failed.append(True)
            raise RuntimeError("this node fails once")
        return ["q"]

    builder = StateGraph(_LOGS[mode])
    builder.add_node("works", _appending("works", lambda: ["p"], ran))
    builder.add_node("fails", _appending("fails", fail_once, ran))
    builder.add_edge(START, "works")
    builder.add_edge("works", "fails")
    return builder.compile(checkpointer=saver, **options)


def two_delta_graph(saver: Any, **options: Any) -> Any:
    """Build two parallel nodes and one after them, over two delta channels.

    Their snapshots are taken at different times. The parallel nodes write into both channels, so
    that the order of their writes shows.
    """
    builder = StateGraph(TwoDeltas)
    for name in ("left", "right", "last"):
        builder.add_node(name, _noting(name))
    builder.add_edge(START, "left")
    builder.add_edge(START, "right")
    builder.add_edge(["left", "right"], "last")
    return builder.compile(checkpointer=saver, **options)


def _noting(name: str) -> Any:
    return lambda state: {"log": [f"{name}-{len(state['log'])}"], "notes": [name]}


def _appending(name: str, append: Callable[[], list[str]], ran: list[str] | None) -> Any:
    def node(state: Any) -> Any:
        if ran is not None:
            ran.append(name)
        return {"log": append()}

    return in_context(node)


def in_context(node: Callable[[Any], Any]) -> Callable[..., Any]:
    """Let a node ask, or call a graph, in async runs too.

    Before Python 3.11 tasks take no context, so there LangGraph hands it over only as an argument.
    """
    if sys.version_info >= (3, 11):
        return node

    def with_context(state: Any, config: RunnableConfig) -> Any:
        var_child_runnable_config.set(config)
        return node(state)

    return with_context


def _ask() -> list[str]:
    return [interrupt("which?")]


def subgraph_graph(saver: Any, mode: Mode = "full", *, ask: bool = True, **options: Any) -> Any:
    """Build a parent with a persistent subgraph ``remembers`` and a per-call subgraph ``helps``.

    ``remembers`` keeps its own log across turns (``checkpointer=True``); ``helps`` starts anew
    in each call and, with ``ask``, interrupts and appends the answer.
    """
    helps: Any = _help(_log_graph(mode, _asked if ask else lambda s: ["h"]))
    builder = StateGraph(_LOGS[mode])
    builder.add_node("remembers", _log_graph(mode, lambda s: ["r"], persistent=True))
    builder.add_node("helps", helps)
    builder.add_edge(START, "remembers")
    builder.add_edge("remembers", "helps")
    builder.add_edge("helps", END)
    return builder.compile(checkpointer=saver, **options)


def _asked(state: Any) -> list[str]:
    return [interrupt("from the subgraph?")]


def _log_graph(mode: Mode, add: Callable[[Any], list[str]], *, persistent: bool = False) -> Any:
    builder = StateGraph(_LOGS[mode])
    builder.add_node("notes", lambda state: {"log": ["n"]})
    builder.add_node("adds", in_context(lambda state: {"log": add(state)}))
    builder.add_edge(START, "notes")
    builder.add_edge("notes", "adds")
    return builder.compile(checkpointer=True if persistent else None)


def _help(child: Any) -> Callable[..., Any]:
    def helps(state: Any) -> Any:
        done = child.invoke({"log": ["call"]})
        return {"log": done["log"][-1:]}

    return in_context(helps)


def raw_pregel(saver: Any) -> Any:
    """Build a graph below ``StateGraph``: its input is written straight into a delta channel."""
    appends = (
        NodeBuilder()
        .subscribe_to("log", read=True)
        .do(lambda seen: [f"seen-{len(seen['log'])}"])
        .write_to("answers")
    )
    return Pregel(
        nodes={"appends": appends},
        channels={
            "log": DeltaChannel(extend, list, snapshot_frequency=SNAPSHOT_FREQUENCY),
            "answers": DeltaChannel(extend, list, snapshot_frequency=SNAPSHOT_FREQUENCY),
        },
        input_channels="log",
        output_channels=["log", "answers"],
        checkpointer=saver,
    )
