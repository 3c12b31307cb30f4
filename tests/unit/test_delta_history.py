"""Frozen histories, and the order of effects of a read."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import uuid
from collections import deque
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.base import DeltaChannelHistory
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from langgraph.types import Overwrite, Send
from pydantic import BaseModel, ConfigDict, PrivateAttr

from retaining_saver._steps import Effect
from retaining_saver.caches import MemoryHistoryCache, StoredHistory
from retaining_saver.caches.moulds import freeze
from retaining_saver.delta_history import Readers, delta_history
from retaining_saver.records import Ref

SERDE = JsonPlusSerializer(allowed_msgpack_modules=True)


class Colour(enum.Enum):
    RED = "red"


class Point(NamedTuple):
    x: int
    tags: list[str]


class Loose(BaseModel):
    model_config = ConfigDict(extra="allow")
    items: list[Any]
    _memo: dict[str, int] = PrivateAttr(default_factory=dict)


class OwnCopy(BaseModel):
    text: str

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> OwnCopy:
        raise AssertionError("only its author knows how it is copied")


@dataclasses.dataclass
class Card:
    labels: list[str]


VALUES: list[Any] = [
    *(None, True, 0, 1.5, "text", b"bytes", bytearray(b"more")),
    *(uuid.UUID(int=1), decimal.Decimal("1.10"), Colour.RED),
    *(dt.datetime(2024, 1, 2, tzinfo=dt.timezone.utc), dt.date(2024, 1, 2), dt.timedelta(1)),
    *([], {}, (), set(), [1, [2, {"a": (3, [4])}]], {"a": [1], "b": {"c": {2, 3}}}, {1: "x"}),
    *((1, [2]), frozenset({1}), deque([1, [2]]), deque([1], maxlen=3)),
    *(Point(1, ["a"]), _DeltaSnapshot(["a", ["b"]]), Card(["a"]), OwnCopy(text="a")),
    Loose.model_validate({"items": [1, {"a": []}], "extra": {"b": [2]}}),
    Document("text", metadata={"a": [1]}),
    [
        HumanMessage("hi", id="1", additional_kwargs={"a": {"b": []}}),
        AIMessage(
            [{"type": "text", "text": "x"}], tool_calls=[{"name": "t", "args": {}, "id": "c"}]
        ),
        ToolMessage("found", tool_call_id="c", artifact={"rows": [1]}),
    ],
    *(Overwrite(["a"]), Send("node", {"a": [1]})),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_frozen_value_thaws_to_what_the_serializer_would_read(value: Any) -> None:
    read = SERDE.loads_typed(SERDE.dumps_typed(value))
    thawed = freeze(read, SERDE).thaw()
    assert (type(read), read) == (type(thawed), thawed)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_two_thawed_copies_share_nothing_mutable(value: Any) -> None:
    read = SERDE.loads_typed(SERDE.dumps_typed(value))
    frozen = freeze(read, SERDE)
    copies = [read, frozen.thaw(), frozen.thaw()]
    mutable = [_mutable_parts(copy) for copy in copies]
    assert len(mutable[0]) == len(mutable[1]) == len(mutable[2])
    ids = [id(part) for parts in mutable for part in parts]
    assert len(set(ids)) == len(ids)


def _mutable_parts(value: Any) -> list[Any]:
    """List the objects in ``value`` that can be changed; keep them alive."""
    if isinstance(value, dict):
        return [value, *(part for item in value.values() for part in _mutable_parts(item))]
    if isinstance(value, (list, deque)):
        return [value, *(part for item in value for part in _mutable_parts(item))]
    if isinstance(value, tuple):
        return [part for item in value for part in _mutable_parts(item)]
    if isinstance(value, (set, bytearray)):
        return [value]
    if isinstance(value, BaseModel):
        hidden = (value.__pydantic_extra__, value.__pydantic_private__)
        inner = (value.__dict__, value.__pydantic_fields_set__, *hidden)
        return [value, *(part for item in inner for part in _mutable_parts(item))]
    if dataclasses.is_dataclass(value) or isinstance(value, Send):
        fields = [
            getattr(value, name) for name in ("labels", "value", "arg") if hasattr(value, name)
        ]
        return [value, *(part for item in fields for part in _mutable_parts(item))]
    return []


def test_hidden_fields_of_models_are_kept() -> None:
    model: Any = Loose.model_validate({"items": [1], "more": [2]})
    model._memo["seen"] = 3
    thawed = freeze(model, SERDE).thaw()
    thawed._memo["seen"] = 4
    thawed.more.append(5)
    again = freeze(model, SERDE).thaw()
    assert ({"seen": 3}, [2], {"items", "more"}) == (
        again._memo,
        again.more,
        again.model_fields_set,
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4)
        | st.builds(
            lambda text, extra: HumanMessage(text, additional_kwargs=extra),
            st.text(max_size=8),
            st.dictionaries(st.text(max_size=4), inner, max_size=2),
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_state_thaws_equal_and_unshared(value: Any) -> None:
    frozen = freeze(value, SERDE)
    first, second = frozen.thaw(), frozen.thaw()
    assert value == first == second
    ids = [id(part) for copy in (value, first, second) for part in _mutable_parts(copy)]
    assert len(set(ids)) == len(ids)


def test_a_history_equals_itself_after_every_way_through() -> None:
    history: DeltaChannelHistory = {
        "seed": _DeltaSnapshot(["s"]),
        "writes": [("task", "log", [value]) for value in VALUES],
    }
    typed = SERDE.loads_typed(SERDE.dumps_typed([v for _, _, v in history["writes"]]))
    history["writes"] = [("task", "log", value) for value in typed]
    kept = StoredHistory.of(history, SERDE)
    assert history == kept.thaw(SERDE, "log")
    assert history == StoredHistory.packed(*kept.pack()).thaw(SERDE, "log")


def test_a_seed_of_none_is_a_seed() -> None:
    history: DeltaChannelHistory = {"seed": None, "writes": []}
    kept = StoredHistory.of(history, SERDE)
    assert history == kept.thaw(SERDE, "log")
    assert history == StoredHistory.packed(*kept.pack()).thaw(SERDE, "log")


@pytest.mark.parametrize("packed", [False, True])
def test_a_continued_history_leaves_the_one_before_alone(packed: bool) -> None:
    before: DeltaChannelHistory = {"seed": ["s"], "writes": [("1", "log", ["a"])]}
    kept = StoredHistory.of(before, SERDE)
    if packed:
        kept = StoredHistory.packed(*kept.pack())
    longer = kept.followed_by([("2", "log", ["b"])], SERDE)
    assert before == kept.thaw(SERDE, "log")
    assert {**before, "writes": [*before["writes"], ("2", "log", ["b"])]} == longer.thaw(
        SERDE, "log"
    )
    assert longer.size > kept.size


def test_a_longer_history_costs_what_it_adds() -> None:
    long = StoredHistory.of({"writes": [("1", "log", ["x" * 100])] * 1000}, SERDE)
    longer = long.followed_by([("2", "log", ["y"])], SERDE)
    assert longer.size - long.size < long.size / 100


class Model(BaseModel):
    text: str


STRICT = JsonPlusSerializer(allowed_msgpack_modules=None)
OPEN = JsonPlusSerializer(allowed_msgpack_modules=[(Model.__module__, "Model")])


@pytest.mark.parametrize("encrypt", [False, True])
def test_a_stricter_reader_gets_what_its_own_serializer_makes(encrypt: bool) -> None:
    history: DeltaChannelHistory = {"writes": [("1", "log", Model(text="a"))]}
    open_, strict = (_encrypted(s) if encrypt else s for s in (OPEN, STRICT))
    kept = StoredHistory.of(history, open_)
    assert history == kept.thaw(open_, "log")
    assert {"writes": [("1", "log", {"text": "a"})]} == kept.thaw(strict, "log")
    # The host makes a new serializer for every invocation; it reads alike.
    again = JsonPlusSerializer(allowed_msgpack_modules=[(Model.__module__, "Model")])
    assert history == kept.thaw(_encrypted(again) if encrypt else again, "log")


def _encrypted(serde: SerializerProtocol) -> SerializerProtocol:
    return EncryptedSerializer.from_pycryptodome_aes(serde, key=b"0123456789abcdef")


def _names(steps: Any, answers: dict[str, Any]) -> list[str]:
    """Run steps on scripted answers; return the effects in their order."""
    names: list[str] = []
    answer: Any = None
    try:
        while True:
            effect: Effect = steps.send(answer)
            name = effect.blocking.__name__
            names.append(name)
            answer = answers[name]
    except StopIteration:
        return names


def test_a_cold_read_asks_for_the_epoch_before_it_walks_and_stores_last() -> None:
    cache = MemoryHistoryCache()
    answers = {
        "get_many": {},
        "epoch": cache.epoch("t"),
        "begin": None,
        "get_delta_channel_history": {"log": {"writes": [("1", "log", "a")]}},
        "set_many": True,
    }
    config = Ref("t", "", "1").config()
    steps = delta_history(InMemorySaver(), cache, Readers(), config, ["log"])
    assert list(answers) == _names(steps, answers)


def test_a_warm_read_is_one_lookup() -> None:
    cache = MemoryHistoryCache()
    kept = StoredHistory.of({"writes": []}, SERDE)

    class Anything(dict[Any, Any]):
        def __contains__(self, key: object) -> bool:
            return True

        def __missing__(self, key: object) -> StoredHistory:
            return kept

    config = Ref("t", "", "1").config()
    steps = delta_history(InMemorySaver(), cache, Readers(), config, ["log", "log", "other"])
    assert ["get_many"] == _names(steps, {"get_many": Anything()})
