"""Two workers read a long delta-channel conversation through one Redis cache.

Needs a Redis: REDIS_URL, by default the one on this machine.
"""

import os
from collections.abc import Sequence
from typing import Annotated, Any, TypedDict

from langchain_core.runnables import RunnableConfig
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, StateGraph

from retaining_saver import RedisHistoryCache, RetainingSaver

URL = os.environ.get("REDIS_URL", "redis://localhost:6379/0")


def append(value: list[str], writes: Sequence[list[str]]) -> list[str]:
    return value + [line for lines in writes for line in lines]


class Log(TypedDict):
    lines: Annotated[list[str], DeltaChannel(append, snapshot_frequency=1000)]


def work(state: Log) -> dict[str, Any]:
    return {"lines": [f"done {len(state['lines'])}"]}


builder = StateGraph(Log)
builder.add_node("work", work)
builder.add_edge(START, "work")
thread: RunnableConfig = {"configurable": {"thread_id": "1"}}

with (
    SqliteSaver.from_conn_string("shared.sqlite") as one,
    SqliteSaver.from_conn_string("shared.sqlite") as other,
):
    # SQLite files have no name that several machines agree on, so give one.
    caches = [RedisHistoryCache(URL, database="shared.sqlite") for _ in range(2)]
    writer = RetainingSaver(one, history_cache=caches[0])
    graph = builder.compile(checkpointer=writer)
    for turn in range(20):
        graph.invoke({"lines": [f"line {turn}"]}, thread)
    written = graph.get_state(thread).values["lines"]

    reader = builder.compile(checkpointer=RetainingSaver(other, history_cache=caches[1]))
    assert reader.get_state(thread).values["lines"] == written
    print(f"{len(written)} lines; the second worker's cache: {caches[1].stats()}")
    assert caches[1].stats().hits > 0
    writer.delete_thread("1")
    for cache in caches:
        cache.close()
