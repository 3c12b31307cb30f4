"""A small real agent, and an application that records after each turn how long the run took.

The agent answers questions about modules of Python's standard library. It calls two tools, one
after the other, whose outputs are what the library's files contain: some kilobytes per turn. No
model is asked: the same question always gives the same messages.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple
from langgraph.checkpoint.base.id import uuid6
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

# fmt: off
MODULES = [
    "argparse", "ast", "base64", "bisect", "calendar", "cmd", "codecs", "configparser",
    "contextlib", "copy", "csv", "dataclasses", "difflib", "dis", "enum", "fileinput",
    "fnmatch", "fractions", "functools", "gettext", "glob", "graphlib", "heapq", "inspect",
    "ipaddress", "locale", "mimetypes", "numbers", "pickle", "platform", "pprint", "queue",
    "random", "sched", "shelve", "shlex", "smtplib", "statistics", "string", "tarfile",
    "textwrap", "timeit", "tokenize", "traceback", "typing", "uuid", "weakref",
]
# fmt: on
TOOL_OUTPUT = 4_000
"""How many characters of a file a tool returns at most."""


def read_module(name: str) -> str:
    """Return the beginning of a module's source."""
    return _source(name)[:TOOL_OUTPUT]


def outline(name: str) -> str:
    """List a module's classes and functions, one a line."""
    defined = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(_source(name))) if isinstance(node, defined)]
    kinds = {ast.ClassDef: "class", ast.FunctionDef: "def", ast.AsyncFunctionDef: "async def"}
    lines = [f"{node.lineno}: {kinds[type(node)]} {node.name}" for node in nodes]
    return "\n".join(lines)[:TOOL_OUTPUT]


def _source(name: str) -> str:
    return inspect.getsource(importlib.import_module(name))


def agent(state: MessagesState) -> dict[str, list[AnyMessage]]:
    """Do what a model would: read the module, then its outline, then answer."""
    *_, asked = (i for i, m in enumerate(state["messages"]) if isinstance(m, HumanMessage))
    question, *since = state["messages"][asked:]
    module = str(question.content).rpartition(" ")[2].rstrip("?")
    found = [str(message.content) for message in since if isinstance(message, ToolMessage)]
    number = len(state["messages"])
    if len(found) < 2:
        tool = (read_module, outline)[len(found)].__name__
        call = {"name": tool, "args": {"name": module}, "id": f"call-{number}"}
        return {"messages": [AIMessage("", id=f"message-{number}", tool_calls=[call])]}
    text, definitions = found
    about = re.search(r'"""\s*(\S[^\n"]*)', text)
    title = about.group(1).strip() if about else "no description"
    answer = f'{module}: "{title}" and {len(definitions.splitlines())} definitions'
    return {"messages": [AIMessage(answer, id=f"message-{number}")]}


def build(saver: BaseCheckpointSaver[Any]) -> Any:
    """Compile agent -> tools -> agent -> tools -> agent on a saver."""
    builder = StateGraph(MessagesState)
    builder.add_node("agent", agent)
    builder.add_node("tools", ToolNode([read_module, outline]))
    builder.add_edge(START, "agent")
    builder.add_conditional_edges("agent", tools_condition)
    builder.add_edge("tools", "agent")
    return builder.compile(checkpointer=saver)


def question(turn: int) -> dict[str, list[AnyMessage]]:
    """Make the input of a turn: each turn asks about another module."""
    module = MODULES[turn % len(MODULES)]
    return {"messages": [HumanMessage(f"What is in {module}?", id=f"question-{turn}")]}


def duration_leaf(
    head: CheckpointTuple, run_id: str, seconds: int
) -> tuple[RunnableConfig, Any, Any, Mapping[str, Any]]:
    """Return what an application puts to record a run: its head once more, with other metadata.

    These are the arguments of ``put`` or ``aput``. Only ``id`` and ``ts`` of the checkpoint
    change; the metadata is copied and extended.
    """
    at = datetime.now(timezone.utc).isoformat()
    checkpoint: Any = {**head.checkpoint, "id": str(uuid6()), "ts": at}
    recorded: dict[str, Any] = dict(head.metadata)
    metadata = {
        **recorded,
        "source": "update",
        "writes": {"runtime_run_duration": {"run_id": run_id, "duration": seconds}},
        "run_durations": {**recorded.get("run_durations", {}), run_id: seconds},
    }
    named = ("thread_id", "checkpoint_ns", "checkpoint_id")
    parent = {key: head.config["configurable"][key] for key in named}
    return {"configurable": parent}, checkpoint, metadata, {}
