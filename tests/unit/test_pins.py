"""Registries of pins, where one kind promises more than the contract."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langgraph.store.base import Op, SearchItem
from langgraph.store.memory import InMemoryStore

from retaining_saver.errors import PinsFullError
from retaining_saver.pins import (
    SEARCH_LIMIT,
    TIDIED_PER_READ,
    MemoryPins,
    Pin,
    StorePins,
    _digest,
    _namespace,
)
from retaining_saver.records import Ref

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
MINUTE = timedelta(minutes=1)


def key(number: int, thread_id: str = "t") -> Ref:
    return Ref(thread_id, "", f"{number:04}")


def stored(store: InMemoryStore) -> list[SearchItem]:
    return store.search(("retaining_saver",), limit=100_000)


# Options


@pytest.mark.parametrize("ttl", [timedelta(0), timedelta(seconds=-1)])
def test_a_time_to_live_that_is_not_positive_is_refused(ttl: timedelta) -> None:
    with pytest.raises(ValueError, match="ttl"):
        MemoryPins(ttl=ttl)
    with pytest.raises(ValueError, match="ttl"):
        StorePins(InMemoryStore(), ttl=ttl)


@pytest.mark.parametrize("ttl", [900, True, "15m", 1.5])
def test_a_time_to_live_of_another_type_is_refused(ttl: Any) -> None:
    with pytest.raises(TypeError, match="ttl"):
        MemoryPins(ttl=ttl)
    with pytest.raises(TypeError, match="ttl"):
        StorePins(InMemoryStore(), ttl=ttl)


@pytest.mark.parametrize(
    ("wrong", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), ("5", TypeError)]
)
def test_the_room_for_pins_is_a_positive_count(wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="max_pins"):
        MemoryPins(max_pins=wrong)


# Memory


def test_a_full_registry_refuses_a_pin_and_keeps_every_promise() -> None:
    pins = MemoryPins(max_pins=2)
    pins.pin(key(1), NOW + MINUTE)
    pins.pin(key(2, "u"), None)
    with pytest.raises(PinsFullError, match="2 pins"):
        pins.pin(key(3), NOW + 9 * MINUTE)
    assert [Pin("t", "", "0001", NOW + MINUTE)] == pins.pinned("t", NOW)
    assert [Pin("u", "", "0002", None)] == pins.pinned("u", NOW)


def test_a_full_registry_still_extends_what_it_has() -> None:
    pins = MemoryPins(max_pins=1)
    pins.pin(key(1), NOW + MINUTE)
    pins.pin(key(1), NOW + 2 * MINUTE)
    assert [Pin("t", "", "0001", NOW + 2 * MINUTE)] == pins.pinned("t", NOW)


def test_expired_pins_of_other_threads_make_room() -> None:
    pins = MemoryPins(max_pins=2)
    pins.pin(key(1), NOW + MINUTE)
    pins.pin(key(2), NOW + 3 * MINUTE)
    pins.pinned("another thread", NOW + 2 * MINUTE)
    pins.pin(key(3, "u"), NOW + 5 * MINUTE)
    assert 2 == len(pins)
    assert [Pin("t", "", "0002", NOW + 3 * MINUTE)] == pins.pinned("t", NOW + 2 * MINUTE)
    with pytest.raises(PinsFullError):
        pins.pin(key(4), NOW + 9 * MINUTE)


def test_a_pin_that_was_made_after_a_search_for_room_makes_room_when_it_expires() -> None:
    pins = MemoryPins(max_pins=2)
    pins.pin(key(1), NOW + MINUTE)
    pins.pin(key(2), None)
    pins.pinned("another thread", NOW + 2 * MINUTE)
    pins.pin(key(3), NOW + 4 * MINUTE)
    with pytest.raises(PinsFullError):
        pins.pin(key(4), None)
    pins.pinned("another thread", NOW + 5 * MINUTE)
    pins.pin(key(4), None)
    assert {"0002", "0004"} == {pin.checkpoint_id for pin in pins.pinned("t", NOW + 5 * MINUTE)}


def test_taken_back_pins_make_room() -> None:
    pins = MemoryPins(max_pins=2)
    pins.pin(key(1), None)
    pins.pin(key(2, "u"), None)
    pins.unpin(key(1))
    pins.delete_thread("u")
    assert 0 == len(pins)
    pins.pin(key(3), None)
    pins.pin(key(4), None)
    assert 2 == len(pins)


def test_threads_without_pins_take_no_room() -> None:
    pins = MemoryPins()
    pins.pin(key(1), NOW + MINUTE)
    pins.unpin(key(1))
    pins.pin(key(2, "u"), NOW + MINUTE)
    pins.pinned("u", NOW + 2 * MINUTE)
    assert {} == pins._threads


# Store


def test_pinning_is_one_put_and_no_read() -> None:
    store = CountingStore()
    StorePins(store).pin(key(1), NOW)
    assert ["PutOp"] == store.operations


def test_pins_do_not_take_the_stores_default_time_to_live() -> None:
    store = CountingStore()
    store.ttl_config = {"default_ttl": 1.0}
    StorePins(store).pin(key(1), None)
    assert [None] == store.times_to_live


def test_every_pin_of_a_thread_is_read_however_many_there_are() -> None:
    store = InMemoryStore()
    pins = StorePins(store)
    expected = set()
    for number in range(4 * SEARCH_LIMIT + 1):
        pins.pin(key(number), None)
        expected.add(f"{number:04}")
    assert expected == {pin.checkpoint_id for pin in pins.pinned("t", NOW)}
    pins.delete_thread("t")
    assert [] == stored(store)


def test_items_below_a_threads_namespace_are_not_its_pins() -> None:
    # A store's search takes a prefix; what somebody keeps below ours is not ours to read or delete.
    store = InMemoryStore()
    store.put((*_namespace("t"), "deeper"), "key", {"anything": 1})
    pins = StorePins(store)
    assert [] == pins.pinned("t", NOW)
    pins.delete_thread("t")
    assert 1 == len(stored(store))


def test_every_search_starts_at_the_beginning() -> None:
    # A pin removed between two pages would hide the one after it.
    store = CountingStore()
    pins = StorePins(store)
    for number in range(SEARCH_LIMIT):
        pins.pin(key(number), None)
    store.operations.clear()
    pins.pinned("t", NOW)
    assert [f"SearchOp 0..{SEARCH_LIMIT}", f"SearchOp 0..{4 * SEARCH_LIMIT}"] == store.operations


def test_expired_and_outdone_items_are_removed_by_a_read() -> None:
    store = InMemoryStore()
    pins = StorePins(store)
    pins.pin(key(1), NOW + MINUTE)
    pins.pin(key(1), NOW + 3 * MINUTE)
    pins.pin(key(2), NOW + MINUTE)
    pins.pin(key(3), NOW + MINUTE)
    pins.pin(key(3), None)
    assert 5 == len(stored(store))
    pins.pinned("t", NOW + 2 * MINUTE)
    assert {("0001", (NOW + 3 * MINUTE).isoformat()), ("0003", None)} == {
        (item.value["checkpoint_id"], item.value["expires_at"]) for item in stored(store)
    }


def test_one_read_removes_a_bounded_number_of_items() -> None:
    store = InMemoryStore()
    pins = StorePins(store)
    for number in range(2 * TIDIED_PER_READ + 1):
        pins.pin(key(number), NOW)
    left = []
    for _ in range(3):
        assert [] == pins.pinned("t", NOW)
        left.append(len(stored(store)))
    assert [TIDIED_PER_READ + 1, 1, 0] == left


def test_failing_to_remove_an_expired_item_does_not_fail_the_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = CountingStore()
    pins = StorePins(store)
    pins.pin(key(1), NOW)
    pins.pin(key(2), None)
    store.read_only = True
    assert [Pin("t", "", "0002", None)] == pins.pinned("t", NOW)
    assert ["outdated pins of thread t were not removed"] == caplog.messages


def test_an_error_of_the_store_passes_through() -> None:
    store = CountingStore()
    pins = StorePins(store)
    pins.pin(key(1), None)
    store.read_only = True
    with pytest.raises(PermissionError):
        pins.pin(key(2), None)
    with pytest.raises(PermissionError):
        pins.unpin(key(1))


class CountingStore(InMemoryStore):
    """A real store that notes what it is asked, and can refuse to write."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []
        self.times_to_live: list[float | None] = []
        self.read_only = False

    def batch(self, ops: Any) -> list[Any]:
        for op in ops:
            self._note(op)
        return super().batch(ops)

    def _note(self, op: Op) -> None:
        name = type(op).__name__
        if name == "SearchOp":
            name += f" {op.offset}..{op.limit}"  # type: ignore[union-attr]  # told by its name
        elif self.read_only:
            raise PermissionError("read only")
        else:
            self.times_to_live.append(op.ttl)  # type: ignore[union-attr]  # told by its name
        self.operations.append(name)


# Names in the store


# A busy machine is no defect.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

thread_ids = st.text(st.sampled_from("a.%_~:/2E \0é猫\ud800"), max_size=100)


@unhurried
@given(thread_id=thread_ids)
def test_a_store_takes_the_label_of_any_thread(thread_id: str) -> None:
    store = InMemoryStore()
    store.put(_namespace(thread_id), "key", {"a": 1})
    label = _namespace(thread_id)[-1]
    assert label.isascii()
    assert 0 < len(label) <= 200


@unhurried
@given(
    one=thread_ids,
    other=thread_ids,
)
def test_two_threads_have_two_labels(one: str, other: str) -> None:
    assert (one == other) == (_namespace(one) == _namespace(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("", "%"),
        ("a.b", "a%2Eb"),
        ("x" * 300, "x" * 301),
        ("x" * 300, f"sha256:{_digest('x' * 300)}"),
    ],
)
def test_two_threads_that_look_alike_have_two_labels(one: str, other: str) -> None:
    assert _namespace(one) != _namespace(other)


def test_the_label_of_an_ordinary_thread_can_be_read() -> None:
    assert ("retaining_saver", "pins", "user-7_a") == _namespace("user-7_a")


@pytest.mark.parametrize(
    ("one", "other"), [(("ab", "c"), ("a", "bc")), (("", "1:"), ("1:", "")), (("a",), ("a", ""))]
)
def test_texts_are_digested_apart(one: Sequence[str], other: Sequence[str]) -> None:
    assert _digest(*one) != _digest(*other)
