"""Checkpoints are read without their values: structure in, no class touched."""

from __future__ import annotations

import copyreg
import json
import pickle
import sys
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any

import ormsgpack
import pytest
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from langgraph.types import Send

from retaining_saver.backends.opaque import (
    DELTA_SNAPSHOT,
    Opaque,
    UnreadableCheckpoint,
    body_of,
    fingerprint_of,
    holds_value,
    is_due,
    read_checkpoint,
    stored_channels,
)
from retaining_saver.errors import RetainingSaverError

PLAIN = JsonPlusSerializer()


@dataclass
class Order:
    number: int
    loaded = False

    def __setstate__(self, state: Any) -> None:
        type(self).loaded = True


def stored_as(kind: str, value: Any) -> tuple[str, bytes]:
    checkpoint = {"id": "i", "ts": "t", "channel_values": {"c": value}}
    if kind == "msgpack":
        return PLAIN.dumps_typed(checkpoint)
    if kind == "json":
        return kind, json.dumps(checkpoint).encode()
    return kind, pickle.dumps(checkpoint)


def read(kind: str, value: Any) -> Opaque:
    opaque = read_checkpoint(stored_as(kind, value), PLAIN)["channel_values"]["c"]
    assert isinstance(opaque, Opaque)
    return opaque


KINDS = ("msgpack", "json", "pickle")


@pytest.mark.parametrize("kind", KINDS)
def test_everything_but_the_values_is_plain(kind: str) -> None:
    checkpoint = {
        "v": 4,
        "id": "i",
        "ts": "t",
        "channel_values": {"c": [1, None]},
        "channel_versions": {"c": "1"},
        "versions_seen": {"n": {"c": "1"}},
        "updated_channels": ["c"],
    }
    dumps = {
        "msgpack": ormsgpack.packb,
        "json": lambda value: json.dumps(value).encode(),
        "pickle": pickle.dumps,
    }
    read_back = read_checkpoint((kind, dumps[kind](checkpoint)), PLAIN)
    assert isinstance(read_back["channel_values"].pop("c"), Opaque)
    assert {**checkpoint, "channel_values": {}} == read_back


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [None, 0, 1.5, "text", [1, {"a": [None]}], float("nan")])
def test_equal_values_are_equal(kind: str, value: Any) -> None:
    assert read(kind, value) == read(kind, value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("one", "other"), [(1, 1.0), (1, True), ("1", 1), (0.0, -0.0), ([], {}), (None, "")]
)
def test_values_that_python_or_users_may_confuse_differ(kind: str, one: Any, other: Any) -> None:
    assert read(kind, one) != read(kind, other)
    assert read(kind, {"in": [one]}) != read(kind, {"in": [other]})


@pytest.mark.parametrize("kind", ["msgpack", "pickle"])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Order(1), Order(2)),
        (Order(1), {"number": 1}),
        (deque([1]), deque([2])),
        ({1, 2}, {1, 3}),
        (Send("n", 1), Send("n", 2)),
        (_DeltaSnapshot([1]), [1]),
        (_DeltaSnapshot([1]), _DeltaSnapshot([2])),
    ],
)
def test_objects_compare_by_what_is_stored_of_them(kind: str, one: Any, other: Any) -> None:
    assert read(kind, one) == read(kind, one)
    assert read(kind, [one]) == read(kind, [one])
    assert read(kind, one) != read(kind, other)
    assert read(kind, [one]) != read(kind, [other])


@pytest.mark.parametrize("kind", ["msgpack", "pickle"])
def test_a_delta_snapshot_is_told_by_its_code(kind: str) -> None:
    assert DELTA_SNAPSHOT == read(kind, _DeltaSnapshot([1])).code
    assert read(kind, [1]).code is None


def test_the_host_still_stores_a_snapshot_under_this_code() -> None:
    data = PLAIN.dumps_typed(_DeltaSnapshot([1]))[1]
    assert Opaque(DELTA_SNAPSHOT, PLAIN.dumps_typed([1])[1]) == ormsgpack.unpackb(
        data, ext_hook=Opaque
    )


@pytest.mark.parametrize("kind", ["msgpack", "pickle"])
def test_no_class_is_touched(kind: str) -> None:
    Order.loaded = False
    read(kind, [Order(1)])
    assert Order.loaded is False


def test_no_module_is_imported_by_a_pickle() -> None:
    sys.modules.pop("antigravity", None)
    data = pickle.dumps({"channel_values": {"c": Order}}, 0)
    data = data.replace(f"c{__name__}\nOrder\n".encode(), b"cantigravity\nfly\n")
    assert b"antigravity" in data
    assert isinstance(read_checkpoint(("pickle", data), PLAIN)["channel_values"]["c"], Opaque)
    assert "antigravity" not in sys.modules


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise AssertionError('the pickle was run')",)


def test_what_a_pickle_wants_to_call_is_not_called() -> None:
    assert read("pickle", Hostile()) == read("pickle", Hostile())


def test_a_pickle_s_memo_makes_no_difference() -> None:
    text, same_text = (b"shared".decode() for _ in range(2))
    shared, apart = [text, text], [text, same_text]
    assert pickle.dumps(shared) != pickle.dumps(apart)
    assert read("pickle", shared) == read("pickle", apart)


def test_an_object_in_a_cycle_can_be_compared() -> None:
    def cycle(number: int) -> Any:
        items: list[Any] = [number]
        items.append(items)
        return items

    assert read("pickle", cycle(1)) == read("pickle", cycle(1))
    assert read("pickle", cycle(1)) != read("pickle", cycle(2))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_pickle_protocol_is_read(protocol: int) -> None:
    values = [Order(1), {"k": (1, {2})}, deque([3]), complex(1, 2), Ellipsis, Order]

    def read_one() -> Any:
        data = pickle.dumps({"channel_values": {"c": values}}, protocol)
        return read_checkpoint(("pickle", data), PLAIN)

    assert read_one() == read_one()


def test_a_class_that_a_pickle_names_by_number_is_refused() -> None:
    copyreg.add_extension(__name__, "Order", 240)
    try:
        data = pickle.dumps({"channel_values": {"c": Order(1)}}, 2)
        pickle.loads(data)  # From here on the interpreter knows the class by its number.
        Order.loaded = False
        with pytest.raises(UnreadableCheckpoint):
            read_checkpoint(("pickle", data), PLAIN)
        assert Order.loaded is False
    finally:
        copyreg.remove_extension(__name__, "Order", 240)


def test_versions_in_a_dict_of_another_class_stay_comparable() -> None:
    seen: defaultdict[str, dict[str, str]] = defaultdict(dict)
    seen["n"]["c"] = "1"
    data = pickle.dumps({"versions_seen": seen, "channel_versions": OrderedDict(c="1")})
    read_back = read_checkpoint(("pickle", data), PLAIN)
    assert {"n": {"c": "1"}} == read_back["versions_seen"]
    assert {"c": "1"} == read_back["channel_versions"]


def test_pending_sends_of_an_old_checkpoint_are_opaque() -> None:
    data = PLAIN.dumps_typed({"channel_values": {}, "pending_sends": [Send("n", Order(1))]})
    (send,) = read_checkpoint(data, PLAIN)["pending_sends"]
    assert isinstance(send, Opaque)


@pytest.mark.parametrize("inner", [PLAIN, JsonPlusSerializer(pickle_fallback=True)])
def test_an_encrypted_checkpoint_is_read_with_the_saver_s_cipher(inner: Any) -> None:
    serde = EncryptedSerializer.from_pycryptodome_aes(inner, key=b"0" * 16)
    value = 1 if inner is PLAIN else complex(1, 2)
    one, other = (serde.dumps_typed({"channel_values": {"c": value}}) for _ in range(2))
    assert one != other
    assert read_checkpoint(one, serde) == read_checkpoint(other, serde)


def test_an_encrypted_saver_s_older_plain_checkpoints_are_read() -> None:
    serde = EncryptedSerializer.from_pycryptodome_aes(key=b"0" * 16)
    stored = stored_as("msgpack", 1)
    assert read_checkpoint(stored, PLAIN) == read_checkpoint(stored, serde)


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        (("msgpack+aes", b"?"), "cipher"),
        (("orjson", b"{}"), "'orjson'"),
        (("msgpack", b"\xc1"), "ValueError"),
        (("json", b"{"), "JSONDecodeError"),
        (("pickle", b"?"), "could not be read"),
        (("msgpack", ormsgpack.packb([1])), "list"),
    ],
)
def test_what_cannot_be_read_says_why_and_shows_no_payload(
    stored: tuple[str, bytes], said: str
) -> None:
    with pytest.raises(UnreadableCheckpoint, match=said) as caught:
        read_checkpoint(stored, PLAIN)
    assert isinstance(caught.value, RetainingSaverError)


def test_a_body_leaves_out_id_and_time_only() -> None:
    assert {"v": 4, "channel_values": {}} == body_of(
        {"v": 4, "id": "i", "ts": "t", "channel_values": {}}
    )


def test_the_empty_list_of_sends_is_not_a_stored_channel() -> None:
    def channels(sends: list[Any]) -> set[str]:
        values = {"c": None, "__pregel_tasks": sends}
        return stored_channels(
            read_checkpoint(PLAIN.dumps_typed({"channel_values": values}), PLAIN)
        )

    assert {"c"} == channels([])
    assert {"c", "__pregel_tasks"} == channels([Send("n", 1)])
    assert set() == stored_channels({})


def test_a_value_with_a_row_of_its_own_counts_alike() -> None:
    encrypted = EncryptedSerializer.from_pycryptodome_aes(key=b"0" * 16)
    for serde in (PLAIN, encrypted):
        assert holds_value("c", serde.dumps_typed([]), serde) is True
        assert holds_value("__pregel_tasks", serde.dumps_typed([]), serde) is False
        assert holds_value("__pregel_tasks", serde.dumps_typed([Send("n", 1)]), serde) is True
        assert holds_value("c", ("empty", b""), serde) is False
    assert holds_value("__pregel_tasks", encrypted.dumps_typed([]), PLAIN) is True


@pytest.mark.parametrize(
    ("channel", "due"),
    [
        ("__start__", True),
        ("__pregel_tasks", True),
        ("branch:to:node", True),
        ("branch:from:node", False),
        ("messages", False),
    ],
)
def test_due_channels_are_those_that_nodes_wait_for(channel: str, due: bool) -> None:
    assert due is is_due(["other", channel])


def _body(**others: Any) -> dict[str, Any]:
    values = {"a": Opaque(None, b"1"), "b": Opaque(7, b"2")}
    return {"id": "1", "ts": "now", "v": 4, "channel_values": values, **others}


@pytest.mark.parametrize("extra", ["text", 2**80, "\ud800", {1: "one"}], ids=repr)
def test_equal_states_have_one_fingerprint(extra: Any) -> None:
    one = _body(extra=extra)
    other = {**dict(reversed(one.items())), "id": "2", "ts": "later"}
    assert fingerprint_of(one) == fingerprint_of(other)


@pytest.mark.parametrize(
    "changed",
    [
        {"v": 4.0},
        {"v": True},
        {"more": None},
        {"channel_values": {"a": Opaque(7, b"1"), "b": Opaque(7, b"2")}},
        {"channel_values": {"a": Opaque(None, b"1")}},
        {"versions_seen": {"n": {1: "1"}}},
        {"versions_seen": {"n": {"1": "1"}}},
        {"big": 2**80},
    ],
    ids=repr,
)
def test_different_states_have_different_fingerprints(changed: dict[str, Any]) -> None:
    assert fingerprint_of(_body()) != fingerprint_of(_body(**changed))


def test_a_state_with_objects_has_no_fingerprint() -> None:
    with pytest.raises(UnreadableCheckpoint, match="object"):
        fingerprint_of(_body(odd=object()))
