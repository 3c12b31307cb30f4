"""What comes out of a frozen history equals what went in, and shares nothing that can change."""

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
import decimal
import enum
import gc
import types
import uuid
from collections import deque
from functools import cached_property
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core import messages
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from langgraph.types import Overwrite, Send
from pydantic import BaseModel, ConfigDict, PrivateAttr, RootModel, field_validator

from retaining_saver.caches import StoredHistory
from retaining_saver.caches.moulds import freeze

SERDE = JsonPlusSerializer(allowed_msgpack_modules=True)
lc: Any = messages  # Some of their classes are not typed as they can be called.
ITEM = TypeVar("ITEM")


class Colour(enum.Enum):
    RED = "red"


class Size(enum.IntFlag):
    TALL = 1
    WIDE = 2


class Point(NamedTuple):
    x: int
    tags: list[str]


class Tagged(Point):
    """Keeps more than its fields, unlike its base."""

    def __new__(cls, x: int, tags: list[str]) -> Tagged:
        made = super().__new__(cls, x, tags)
        made.seen = ["something"]
        return made

    seen: list[str]


class Text(str):
    __slots__ = ()


class Counted(dict[str, Any]):
    """May keep more than its items."""


@dataclasses.dataclass
class Card:
    labels: list[str]
    inner: Any = None


class Plain(BaseModel):
    items: list[Any]
    by_name: dict[str, Any] = {}
    when: dt.datetime | None = None


class Loose(BaseModel):
    model_config = ConfigDict(extra="allow")
    items: list[Any]
    _memo: dict[str, Any] = PrivateAttr(default_factory=dict)


class Checked(BaseModel):
    model_config = ConfigDict(validate_assignment=True)
    words: list[str]

    @field_validator("words", mode="before")
    @classmethod
    def _grow(cls, words: list[str]) -> list[str]:
        return [*words, "checked"]


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)
    items: list[Any]


class Nested(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    inner: Plain
    others: dict[str, Plain]
    card: Card
    colour: Colour
    point: Point
    bag: set[int]


class Pairs(BaseModel):
    pairs: list[tuple[int, list[int]]]
    by_name: dict[str, list[tuple[int, list[int]]]]


class Of(BaseModel, Generic[ITEM]):
    item: ITEM


class Listed(RootModel[list[Any]]):
    pass


class CopiesItself(BaseModel):
    made: ClassVar[int] = 0
    items: list[Any]

    def model_post_init(self, context: Any) -> None:
        CopiesItself.made += 1

    def __copy__(self) -> CopiesItself:
        raise AssertionError("only its author knows how it is copied")

    __deepcopy__ = __copy__  # type: ignore[assignment]  # it takes no memo, and is not called


class MadeAnotherWay(BaseModel):
    items: list[Any]

    def __new__(cls, **fields: Any) -> MadeAnotherWay:
        assert fields, "only its author knows how it is made"
        return super().__new__(cls)


class KeepsElsewhere(BaseModel):
    __slots__ = ("seen",)
    items: list[Any]

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        object.__setattr__(self, "seen", ["something"])


class Remembers(BaseModel):
    items: list[Any]

    @cached_property
    def double(self) -> list[Any]:
        return self.items * 2

    def model_post_init(self, context: Any) -> None:
        assert self.double is not None


class OwnMessage(HumanMessage):
    """A message with a field, an undeclared field and something hidden."""

    votes: dict[str, list[int]]
    _memo: list[Any] = PrivateAttr(default_factory=list)


CALL = {"name": "search", "args": {"q": "x", "deep": [{"a": [1]}]}, "id": "c", "type": "tool_call"}
USAGE: Any = {
    "input_tokens": 1,
    "output_tokens": 2,
    "total_tokens": 3,
    "input_token_details": {"cache_read": 1},
}
BLOCKS: list[Any] = [
    "words",
    {"type": "text", "text": "more", "annotations": [{"at": [1, 2]}]},
    {"type": "image_url", "image_url": {"url": "data:"}},
]
ALSO: dict[str, Any] = {
    "additional_kwargs": {"refusal": None, "parts": [{"a": {}}], "empty": []},
    "response_metadata": {"token_usage": {"details": {"audio": 0}}, "logprobs": None},
}

MESSAGES: list[Any] = [
    lc.HumanMessage("hi"),
    lc.HumanMessage("hi", id="1", name="Ann", **ALSO),
    lc.HumanMessage(BLOCKS, id="2", undeclared={"a": [1]}),
    lc.AIMessage("hello", id="3"),
    lc.AIMessage(BLOCKS, id="4", tool_calls=[CALL], usage_metadata=USAGE, **ALSO),
    lc.AIMessage(
        "", invalid_tool_calls=[{"name": "t", "args": "{", "id": "d", "error": "no JSON"}]
    ),
    lc.SystemMessage("be brief", id="5", **ALSO),
    lc.ToolMessage("found", tool_call_id="c", id="6", artifact={"rows": [{"a": 1}, (1, [2])]}),
    lc.ToolMessage(BLOCKS, tool_call_id="c", status="error"),
    lc.ToolMessage("a card", tool_call_id="c", artifact=Card(["a"], {"b": [1]})),
    lc.FunctionMessage("found", name="f", id="7"),
    lc.ChatMessage("hi", role="critic", id="8", **ALSO),
    lc.RemoveMessage("1"),
    lc.AIMessageChunk("he", id="9", tool_call_chunks=[{**CALL, "args": "{", "index": 0}]),
    lc.HumanMessageChunk("h", id="10"),
    lc.SystemMessageChunk("b"),
    lc.ToolMessageChunk("f", tool_call_id="c"),
    lc.FunctionMessageChunk("f", name="f"),
    lc.ChatMessageChunk("h", role="critic"),
    OwnMessage.model_validate(
        {"content": "hi", "id": "11", "votes": {"a": [1]}, "undeclared": [1]}
    ),
]


def _deep(levels: int) -> list[Any]:
    value: list[Any] = ["bottom"]
    for _ in range(levels):
        value = [value, {"more": value[:0]}]
    return value


OTHERS: list[Any] = [
    *(None, True, 0, 1.5, float("inf"), -0.0, 2**64 - 1, "text", b"bytes", bytearray(b"more")),
    *(uuid.UUID(int=1), decimal.Decimal("1.10"), Colour.RED, Size.TALL, Text("x")),
    *(dt.datetime(2024, 1, 2, tzinfo=dt.timezone.utc), dt.date(2024, 1, 2), dt.timedelta(1)),
    *([], {}, (), set(), frozenset({1}), {2, 3}, deque([1, [2]]), deque([1], maxlen=3)),
    *([[]], [{}], {"a": {}}, {"a": []}, [1, True, 1.0, [None, "a", b"a"]], [{"é": ["ü" * 300]}]),
    [1, [2, {"a": (3, [4])}]],
    {"a": [1], "b": {"c": {2, 3}}},
    {1: ["x"], None: [1], 2.5: {"a": {3: []}}, (1, 2): [3]},
    {"a": {"b": bytearray(b"c")}, "d": [{"e": (1, [2])}], "f": {1: []}},
    [{"enum": Colour.RED, "when": [dt.date(2024, 1, 2)], "id": {"u": uuid.UUID(int=1)}}],
    [{"large": [2**70], "text": ["\ud800"]}],
    [{"long": ["x" * 5000, {"y": ["z" * 2000]}]}],
    *(_deep(30), _deep(200)),
    *((1, [2]), ((), ([],)), Point(1, ["a"]), Tagged(1, ["a"]), _DeltaSnapshot(["a", ["b"]])),
    *(Card(["a"]), Card(["a"], Card(["b"])), [Card(["a"]), "b", Card(["c"])], {"c": Card(["d"])}),
    *(Counted(a=[1]), [Counted(a=[1])], {"a": {"b": Text("c")}}),
    *(Overwrite(["a"]), Send("node", {"a": [1]})),
    *(np.arange(6).reshape(2, 3), {"rows": np.zeros(2)}),
    *(
        Plain(items=[]),
        Plain(
            items=[{"a": [1]}],
            by_name={"b": {}},
            when=dt.datetime(2024, 1, 2, tzinfo=dt.timezone.utc),
        ),
    ),
    *(Loose(items=[1, {"a": []}]), Loose.model_validate({"items": [], "more": {"b": [2]}})),
    *(Checked(words=["a"]), Frozen(items=[[1]]), Of[list[int]](item=[1]), Listed([1, [2]])),
    Nested(
        inner=Plain(items=[1]),
        others={"a": Plain(items=[[]])},
        card=Card(["a"]),
        colour=Colour.RED,
        point=Point(1, ["a"]),
        bag={1},
    ),
    *(CopiesItself(items=[1]), MadeAnotherWay(items=[1]), KeepsElsewhere(items=[1])),
    Remembers(items=[1, [2]]),
]
VALUES = [*MESSAGES, *OTHERS]


def _as_read(value: Any) -> Any:
    """Return what a saver's reader gets of ``value``; some of it cannot be stored at all."""
    try:
        return SERDE.loads_typed(SERDE.dumps_typed(value))
    except Exception:
        return copy.deepcopy(value)


def _faces(value: Any) -> Any:
    """Spell out types as well as values: ``True == 1`` and models compare only some of it."""
    if isinstance(value, BaseModel):
        hidden = value.__pydantic_extra__, value.__pydantic_private__, getattr(value, "seen", None)
        fields_set = frozenset(value.__pydantic_fields_set__)
        return type(value), _faces(value.__dict__), fields_set, _faces(hidden)
    if isinstance(value, dict):
        return type(value), [(_faces(key), _faces(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        length = value.maxlen if isinstance(value, deque) else None
        seen = _faces(getattr(value, "seen", None))
        return type(value), length, [_faces(item) for item in value], seen
    if dataclasses.is_dataclass(value) or isinstance(value, Send):
        parts = (getattr(value, name, None) for name in ("labels", "inner", "value", "arg"))
        return type(value), [_faces(part) for part in parts]
    if isinstance(value, np.ndarray):
        return type(value), value.dtype, value.tolist()
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(_faces(item) for item in value)
    return type(value), repr(value)


_NEVER_CHANGE = (
    *(str, bytes, int, float, complex, bool, type(None), enum.Enum, uuid.UUID, decimal.Decimal),
    *(dt.date, dt.time, dt.timedelta, dt.tzinfo, np.dtype),
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType),
)


def _reachable(root: Any) -> dict[int, Any]:
    """Find every object that ``root`` is made of, by id.

    The interpreter tells what an object refers to: nothing can be forgotten here.
    """
    seen: dict[int, Any] = {}
    left = [root]
    while left:
        value = left.pop()
        if id(value) not in seen and not isinstance(value, _NEVER_CHANGE):
            seen[id(value)] = value
            left += gc.get_referents(value)
    return seen


def _changeable(root: Any) -> dict[int, Any]:
    """Find what can change in ``root``, by id."""
    reachable = _reachable(root).items()
    return {key: value for key, value in reachable if not isinstance(value, (tuple, frozenset))}


def _shared(one: Any, other: Any) -> list[Any]:
    found, others = _changeable(one), _changeable(other)
    return [found[key] for key in found.keys() & others.keys()]


def _scribble(value: Any) -> None:
    """Change whatever can be changed."""
    for part in _changeable(value).values():
        if isinstance(part, dict):
            part["scribbled"] = part.pop(next(iter(part), None), None)
        elif isinstance(part, (list, deque)):
            part.append("scribbled")
        elif isinstance(part, set):
            part.add("scribbled")
        elif isinstance(part, bytearray):
            part.extend(b"scribbled")


def test_sharing_is_found_wherever_it_is() -> None:
    deep: list[Any] = []
    one, other = lc.HumanMessage("a", id="1"), lc.HumanMessage("a", id="1")
    assert [] == _shared(one, other)
    one.additional_kwargs["a"] = other.response_metadata["b"] = {"c": (1, deep)}
    assert deep in _shared(one, other)
    assert [] != _shared(one, [one])
    other.__pydantic_fields_set__ = one.__pydantic_fields_set__
    assert one.__pydantic_fields_set__ in _shared(one.__pydantic_fields_set__, other)
    assert _faces([1]) != _faces([True])
    assert _faces(one) != _faces(lc.HumanMessage("a", id="1"))


def _name(value: Any) -> str:
    return type(value).__name__


@pytest.mark.parametrize("value", VALUES, ids=_name)
def test_a_thawed_value_is_the_value(value: Any) -> None:
    read = _as_read(value)
    frozen = freeze(read, SERDE)
    for _ in range(2):
        assert _faces(read) == _faces(frozen.thaw())


@pytest.mark.parametrize("value", VALUES, ids=_name)
def test_a_thawed_value_shares_nothing_that_can_change(value: Any) -> None:
    read = _as_read(value)
    faces, frozen = _faces(read), freeze(read, SERDE)
    one, other = frozen.thaw(), frozen.thaw()
    for first, second in ((one, other), (one, read), (one, frozen), (read, frozen)):
        assert [] == _shared(first, second)
    _scribble(read)
    _scribble(one)
    assert faces == _faces(other) == _faces(frozen.thaw())


def _history(values: list[Any]) -> Any:
    """Spell values as nodes do: alone, and in lists of none, one and many."""
    writes: list[Any] = [[]]
    for value in values:
        writes += [[_as_read(value)], _as_read(value)]
    writes.append([_as_read(value) for value in values])
    seed = _DeltaSnapshot([_as_read(value) for value in values])
    return {"writes": [(str(n), "log", write) for n, write in enumerate(writes)], "seed": seed}


def test_a_thawed_history_is_the_history_and_shares_nothing_that_can_change() -> None:
    history = _history(VALUES)
    faces, kept = _faces(history), StoredHistory.of(history, SERDE)
    one, other = kept.thaw(SERDE, "log"), kept.thaw(SERDE, "log")
    assert faces == _faces(one) == _faces(other)
    reach = [part for part in _changeable(kept).values() if part is not SERDE]
    for first, second in ((one, other), (one, history)):
        assert [] == _shared(first, second)
    inside = {id(part) for part in reach} - _changeable(SERDE).keys()
    assert not inside & _changeable(one).keys()
    assert not inside & _changeable(history).keys()
    _scribble(history)
    _scribble(one)
    assert faces == _faces(other) == _faces(kept.thaw(SERDE, "log"))


def test_what_was_pickled_for_its_neighbour_keeps_its_type() -> None:
    """Msgpack has no number that large, and would write the dict as a plain one."""
    serde = JsonPlusSerializer(pickle_fallback=True)
    whole = [HumanMessage("hi"), Counted(a=1), 1 << 70]
    read = serde.loads_typed(serde.dumps_typed(whole))
    assert [HumanMessage, Counted, int] == [type(item) for item in read]
    writes: list[Any] = [("one", "log", value) for value in (Counted(b=2), read, [], [1])]
    faces, kept = _faces(writes), StoredHistory.of({"writes": writes}, serde)
    longer = StoredHistory.of({"writes": writes}, serde).followed_by(writes, serde)
    assert faces == _faces(kept.thaw(serde, "log")["writes"])
    assert _faces(writes * 2) == _faces(longer.thaw(serde, "log")["writes"])


@settings(deadline=None)
@given(st.data())
def test_a_history_that_grew_step_by_step_is_the_whole_one(data: st.DataObject) -> None:
    values = st.sampled_from(VALUES).map(_as_read)
    spelled = st.builds(lambda one: [one], values) | values | st.lists(values, max_size=3)
    steps = data.draw(st.lists(st.lists(spelled, max_size=4), max_size=12))
    writes: list[Any] = []
    kept = [StoredHistory.of({"writes": []}, SERDE)]
    lengths = [0]
    for number, step in enumerate(steps):
        added = [(f"task-{number}", "log", value) for value in step]
        kept.append(kept[-1].followed_by(added, SERDE))
        writes += added
        lengths.append(len(writes))
    for entry, length in zip(kept, lengths, strict=True):
        thawed = entry.thaw(SERDE, "log")
        assert _faces(writes[:length]) == _faces(thawed["writes"])
        _scribble(thawed)
    whole = StoredHistory.of({"writes": writes}, SERDE)
    assert whole.size <= kept[-1].size
    assert _faces(writes) == _faces(kept[-1].thaw(SERDE, "log")["writes"])


def test_entries_of_a_running_thread_share_what_they_hold() -> None:
    kept = [StoredHistory.of({"writes": []}, SERDE)]
    for number in range(256):
        write = (f"task-{number}", "log", [lc.HumanMessage(str(number), id=str(number))])
        kept.append(kept[-1].followed_by([write], SERDE))
    references = sum(len(gc.get_referents(part)) for part in _reachable(kept).values())
    # Entries that shared nothing would refer to 256 times 128 messages, in several lists.
    assert references < 256 * 128
    assert 256 == len(kept[-1].thaw(SERDE, "log")["writes"])


@pytest.mark.parametrize(
    "value",
    [
        [[(1, [2])], {"a": [()]}],
        {"a": [bytearray(b"b")], "c": {"d": {"e": (1,)}}},
        Pairs(pairs=[(1, [2])], by_name={"a": [(3, [])]}),
    ],
    ids=_name,
)
def test_what_msgpack_would_change_keeps_its_type(value: Any) -> None:
    # The serializer reads tuples as lists, but a model that declares tuples has some.
    for spelled in (value, [value], {"a": value}):
        assert _faces(spelled) == _faces(freeze(spelled, SERDE).thaw())


def test_models_that_copy_themselves_are_read_anew() -> None:
    frozen = freeze(CopiesItself(items=[1]), SERDE)
    before = CopiesItself.made
    assert CopiesItself(items=[1]) == frozen.thaw()
    assert before + 2 == CopiesItself.made


def test_validators_do_not_run_again() -> None:
    model = Checked(words=["a"])
    for spelled in (model, [model], [model, model], {"a": model}):
        thawed = freeze(spelled, SERDE).thaw()
        assert _faces(spelled) == _faces(thawed)


def test_what_a_serializer_cannot_write_is_not_kept() -> None:
    for value in (object(), [object()], {"a": object()}, Plain(items=[lambda: None])):
        with pytest.raises(TypeError):
            StoredHistory.of({"writes": [("task", "log", value)]}, SERDE)
        with pytest.raises(TypeError):
            StoredHistory.of({"seed": value, "writes": []}, SERDE)
