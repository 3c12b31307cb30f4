"""See what a policy would remove before it removes anything; the numbers are the real ones."""

from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, MessagesState, StateGraph

from retaining_saver import RetainingSaver, RetentionPolicy


def reply(state: MessagesState) -> dict[str, Any]:
    return {"messages": [AIMessage(f"You said: {state['messages'][-1].content}")]}


builder = StateGraph(MessagesState)
builder.add_node("reply", reply)
builder.add_edge(START, "reply")
thread: RunnableConfig = {"configurable": {"thread_id": "1"}}
policy = RetentionPolicy(keep_last_turns=2)

with SqliteSaver.from_conn_string("dry_run.sqlite") as inner:
    saver = RetainingSaver(inner, policy=policy)
    graph = builder.compile(checkpointer=saver)
    for turn in range(6):
        graph.invoke({"messages": [HumanMessage(f"message {turn}")]}, thread)
        saver.record_run(thread, f"run-{turn}", duration=turn)
    state = graph.get_state(thread).values

    print(policy)
    print(saver.plan_thread_retention("1").describe())
    expected = saver.enforce_thread_retention("1", dry_run=True)
    done = saver.enforce_thread_retention("1")
    before, after = done.before.rows["checkpoints"], done.after.rows["checkpoints"]
    print(f"{before} checkpoints before, {after} after")

    assert expected.after == done.after
    assert expected.dropped == done.dropped
    assert graph.get_state(thread).values == state  # The conversation is whole.
    assert len(saver.run_history(thread).durations) == 6  # And so is its history.
    assert saver.enforce_thread_retention("1").dropped == ()  # Nothing is left to do.
