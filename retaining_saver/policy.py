"""What retention may remove: a frozen, validated value that says itself in a sentence. Pure."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from retaining_saver.errors import PolicyError
from retaining_saver.folds import Metadata

COUNTS = ("keep_last_turns",)
DURATIONS = ("keep_within", "drop_siblings_after", "delete_idle_after")
SWITCHES = ("drop_annotations", "compact_supersteps", "delete_waiting")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """Say what of a thread stays. Without arguments only annotations go.

    A turn stays if any of the three keep rules keeps it; without a keep rule every turn stays.
    The newest checkpoint of every namespace stays under every policy that does not delete the
    thread. ``None`` means unlimited.

    - ``drop_annotations``: remove metadata-only checkpoints; what they recorded is folded.
    - ``keep_last_turns``: keep the newest N turns of the main line and of every kept branch;
      0 means nothing but the heads, and needs ``delete_idle_after``.
    - ``keep_within``: keep turns younger than this.
    - ``keep_where``: keep turns with a checkpoint whose metadata contains this mapping.
    - ``drop_siblings_after``: drop branches off the main line whose newest checkpoint is older.
    - ``compact_supersteps``: of turns older than the newest keep only the checkpoint at rest.
    - ``delete_idle_after``: delete the whole thread after this much inactivity.
    - ``delete_waiting``: also one that waits for an answer. A run that was killed cannot be told
      from one that stopped at a breakpoint, and counts as waiting.

    Raises ``PolicyError`` (a ``ValueError``) for impossible values and contradictions, and
    ``TypeError`` for values of another type.
    """

    drop_annotations: bool = True
    keep_last_turns: int | None = None
    keep_within: timedelta | None = None
    keep_where: Mapping[str, Any] | None = field(default=None, hash=False)
    drop_siblings_after: timedelta | None = None
    compact_supersteps: bool = False
    delete_idle_after: timedelta | None = None
    delete_waiting: bool = False

    def __post_init__(self) -> None:
        for name in SWITCHES:
            _check_switch(name, getattr(self, name))
        for name in COUNTS:
            _check_count(name, getattr(self, name))
        for name in DURATIONS:
            _check_duration(name, getattr(self, name))
        _check_mapping("keep_where", self.keep_where)
        _check_sense(self)
        # The caller's mapping may change later; a policy does not.
        object.__setattr__(self, "keep_where", copy.deepcopy(self.keep_where))

    @property
    def keeps_every_turn(self) -> bool:
        """Tell whether no keep rule is set."""
        return self.keep_last_turns is None and self.keep_within is None and self.keep_where is None

    def matches(self, metadata: Metadata) -> bool:
        """Tell whether a checkpoint's metadata contains ``keep_where``, also in nested mappings."""
        return self.keep_where is not None and _contains(metadata, self.keep_where)

    def __str__(self) -> str:
        parts = [_annotations(self), _turns(self), _siblings(self), _supersteps(self), _idle(self)]
        sentence = "; ".join(part for part in parts if part)
        return sentence[0].upper() + sentence[1:] + "."


def _check_switch(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is either True or False, not {value!r}.")


def _check_count(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a whole number or None, not {value!r}.")
    if value < 0:
        raise PolicyError(f"{name} cannot be negative ({value}); use None for no limit.")


def _check_duration(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, timedelta):
        raise TypeError(f"{name} is a timedelta or None, not {value!r}.")
    if value <= timedelta(0):
        raise PolicyError(f"{name} has to be longer than nothing; use None for no limit.")


def _check_mapping(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(f"{name} is a mapping from metadata keys to values, not {value!r}.")
    if not value:
        raise PolicyError(f"{name} is empty and would match every checkpoint; use None instead.")


def _check_sense(policy: RetentionPolicy) -> None:
    if policy.keep_last_turns == 0 and policy.delete_idle_after is None:
        raise PolicyError(
            "keep_last_turns=0 leaves nothing but the newest checkpoints, which is meant for "
            "threads that are about to go: set delete_idle_after as well, or keep at least 1 turn."
        )
    idle, within = policy.delete_idle_after, policy.keep_within
    if idle is not None and within is not None and idle < within:
        raise PolicyError(
            f"delete_idle_after ({_spelled(idle)}) would delete turns that keep_within "
            f"({_spelled(within)}) promises to keep: make it at least as long."
        )


def _contains(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, Mapping):
        return isinstance(value, Mapping) and all(
            key in value and _contains(value[key], wanted[key]) for key in wanted
        )
    # 1 and True are equal in Python and different in JSON.
    return bool(value == wanted) and isinstance(value, bool) == isinstance(wanted, bool)


def _annotations(policy: RetentionPolicy) -> str:
    verb = "remove" if policy.drop_annotations else "leave"
    return f"{verb} metadata-only checkpoints"


def _turns(policy: RetentionPolicy) -> str:
    kept = []
    if policy.keep_last_turns is not None:
        kept.append(_newest(policy.keep_last_turns))
    if policy.keep_within is not None:
        kept.append(f"turns younger than {_spelled(policy.keep_within)}")
    if policy.keep_where is not None:
        kept.append(f"turns whose metadata contains {policy.keep_where!r}")
    if not kept:
        return "keep every turn"
    return "keep " + (", ".join(kept[:-1]) + " and " if kept[1:] else "") + kept[-1]


def _newest(count: int) -> str:
    if count == 0:
        return "nothing but the newest checkpoints"
    return "the newest turn" if count == 1 else f"the newest {count} turns"


def _siblings(policy: RetentionPolicy) -> str:
    if policy.drop_siblings_after is None:
        return ""
    return f"drop branches off the main line after {_spelled(policy.drop_siblings_after)}"


def _supersteps(policy: RetentionPolicy) -> str:
    if not policy.compact_supersteps:
        return ""
    return "of turns older than the newest keep only the checkpoint at rest"


def _idle(policy: RetentionPolicy) -> str:
    if policy.delete_idle_after is None:
        return ""
    tail = "even if it waits" if policy.delete_waiting else "unless it waits"
    spelled = _spelled(policy.delete_idle_after)
    return f"delete the whole thread after {spelled} without activity, {tail} for an answer"


def _spelled(duration: timedelta) -> str:
    minutes, seconds = divmod(duration.seconds, 60)
    hours, minutes = divmod(minutes, 60)
    counted = {
        "day": duration.days,
        "hour": hours,
        "minute": minutes,
        "second": seconds,
        "microsecond": duration.microseconds,
    }
    return " ".join(f"{n} {unit}{'' if n == 1 else 's'}" for unit, n in counted.items() if n)
