"""An application that records a duration after each turn, on a SQLite file.

The application is unchanged: it puts a copy of the head with other metadata. Only the line that
wraps the saver is new.
"""

import sqlite3
import uuid
from datetime import datetime, timezone
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, MessagesState, StateGraph

from retaining_saver import RetainingSaver


def reply(state: MessagesState) -> dict[str, Any]:
    return {"messages": [AIMessage(f"You said: {state['messages'][-1].content}")]}


def record(saver: RetainingSaver, config: RunnableConfig, run_id: str, seconds: int) -> None:
    head = saver.get_tuple(config)
    assert head is not None
    now = datetime.now(timezone.utc).isoformat()
    leaf: Any = {**head.checkpoint, "id": str(uuid6()), "ts": now}
    metadata: Any = {
        **head.metadata,
        "source": "update",
        "writes": {"runtime_run_duration": {"run_id": run_id, "duration": seconds}},
    }
    saver.put(head.config, leaf, metadata, {})


connection = sqlite3.connect("chat.sqlite", check_same_thread=False)
saver = RetainingSaver(SqliteSaver(connection))

builder = StateGraph(MessagesState)
builder.add_node("reply", reply)
builder.add_edge(START, "reply")
graph = builder.compile(checkpointer=saver)

config: RunnableConfig = {"configurable": {"thread_id": str(uuid.uuid4())}}
for turn in range(5):
    graph.invoke({"messages": [HumanMessage(f"turn {turn}")]}, config)
    record(saver, config, f"run-{turn}", seconds=turn + 1)

rows = len(list(saver.list(config)))
durations = saver.run_history(config).durations
print(f"{rows} checkpoints for 5 turns; the bare saver would hold 20")
print(f"durations: {durations}")
assert rows == 16  # Three for each turn, and the newest leaf.
assert durations == {f"run-{turn}": turn + 1 for turn in range(5)}
assert len(graph.get_state(config).values["messages"]) == 10
connection.close()
