"""A chat application that shows how long each answer took, from the thread's head alone."""

import time
import uuid
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from retaining_saver import RetainingSaver


def reply(state: MessagesState) -> dict[str, Any]:
    text = f"You said: {state['messages'][-1].content}"
    return {"messages": [AIMessage(text, id=str(uuid.uuid4()))]}


saver = RetainingSaver(InMemorySaver())
builder = StateGraph(MessagesState)
builder.add_node("reply", reply)
builder.add_edge(START, "reply")
graph = builder.compile(checkpointer=saver)
config: RunnableConfig = {"configurable": {"thread_id": "chat"}}


def ask(text: str) -> None:
    run_id, started = str(uuid.uuid4()), time.monotonic()
    before = {m.id for m in graph.get_state(config).values.get("messages", [])}
    after = graph.invoke({"messages": [HumanMessage(text)]}, config)["messages"]
    written = [m.id for m in after if m.id not in before and m.type == "ai"]
    took = 1 + round(time.monotonic() - started)
    saver.record_run(config, run_id, duration=took, message_ids=written)


for text in ("hello", "how are you?", "goodbye"):
    ask(text)

history = saver.run_history(config)  # Deserialises no message.
shown = []
for message in graph.get_state(config).values["messages"]:
    run_id = history.message_runs.get(message.id)
    took = f"  ({history.durations[run_id]} s)" if run_id else ""
    shown.append(f"{message.type}: {message.content}{took}")
print("\n".join(shown))
assert len(shown) == 6
assert sum(line.endswith(" s)") for line in shown) == 3
assert len(history.durations) == 3
