"""A gateway with an admission step of its own: it cleans up before it starts the run.

``admission="manual"``: nothing else reclaims. The outcome says what was done, or why not; none
is an error for the run.
"""

import asyncio
import uuid
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import START, MessagesState, StateGraph

from retaining_saver import RetainingSaver


async def reply(state: MessagesState) -> dict[str, Any]:
    return {"messages": [AIMessage(f"You said: {state['messages'][-1].content}")]}


class Gateway:
    def __init__(self, saver: RetainingSaver) -> None:
        self.saver = saver
        self.admitted: list[str] = []
        builder = StateGraph(MessagesState)
        builder.add_node("reply", reply)
        builder.add_edge(START, "reply")
        self.graph = builder.compile(checkpointer=saver)

    async def run(self, config: RunnableConfig, text: str, run_id: str) -> str:
        admission = await self.saver.aadmit(config)  # Before the run reads its first checkpoint.
        self.admitted.append(admission.outcome)
        result = await self.graph.ainvoke({"messages": [HumanMessage(text)]}, config)
        await self.saver.arecord_run(config, run_id, duration=1)
        return str(result["messages"][-1].content)


async def main() -> None:
    async with AsyncSqliteSaver.from_conn_string("gateway.sqlite") as inner:
        gateway = Gateway(RetainingSaver(inner, admission="manual"))
        thread: RunnableConfig = {"configurable": {"thread_id": str(uuid.uuid4())}}
        await gateway.run(thread, "hello", "run-1")
        await gateway.run(thread, "and again", "run-2")
        # A client that names its checkpoint pins it: the leaf stays, and becomes a link.
        head = await inner.aget_tuple(thread)
        assert head is not None
        await gateway.run(head.config, "from where I was", "run-3")
        durations = (await gateway.saver.arun_history(thread)).durations

    print(f"outcomes: {gateway.admitted}; durations: {durations}")
    assert gateway.admitted == ["no_leaf", "reclaimed", "pinned"]
    assert sorted(durations) == ["run-1", "run-2", "run-3"]


asyncio.run(main())
