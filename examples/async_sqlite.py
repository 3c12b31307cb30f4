"""The awaitable methods, on AsyncSqliteSaver: record a run, read the history, read the events."""

import asyncio
import uuid
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import START, MessagesState, StateGraph

from retaining_saver import Event, Reclaimed, RetainingSaver


async def reply(state: MessagesState) -> dict[str, Any]:
    return {"messages": [AIMessage(f"You said: {state['messages'][-1].content}")]}


async def main() -> None:
    events: list[Event] = []
    async with AsyncSqliteSaver.from_conn_string("chat.sqlite") as inner:
        saver = RetainingSaver(inner, hooks=[events.append])
        builder = StateGraph(MessagesState)
        builder.add_node("reply", reply)
        builder.add_edge(START, "reply")
        graph = builder.compile(checkpointer=saver)

        config: RunnableConfig = {"configurable": {"thread_id": str(uuid.uuid4())}}
        for turn in range(4):
            await graph.ainvoke({"messages": [HumanMessage(f"turn {turn}")]}, config)
            await saver.arecord_run(config, f"run-{turn}", duration=turn + 1)
        history = await saver.arun_history(config)
        stored = [found async for found in saver.alist(config)]

    reclaimed = [event.checkpoint_id for event in events if isinstance(event, Reclaimed)]
    print(f"{len(stored)} checkpoints, {len(reclaimed)} reclaimed, {history.durations}")
    assert len(reclaimed) == 3  # One at the start of each turn but the first.
    assert len(stored) == 4 * 3 + 1
    assert history.durations == {f"run-{turn}": turn + 1 for turn in range(4)}


asyncio.run(main())
