"""Which checkpoints of the root namespace stay: turns, branches, heads, pins. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from retaining_saver.lineage import Namespace, Turns, newest, time_of, turns
from retaining_saver.policy import RetentionPolicy


@dataclass(slots=True)
class Choice:
    """What stays and what goes of one namespace, by id, each with its reason.

    Carriers are in neither: they stay or go with what is around them. ``moving`` are the dropped
    links whose rows in the writes table move to their parents.
    """

    keep: dict[str, str] = field(default_factory=dict)
    drop: dict[str, str] = field(default_factory=dict)
    moving: set[str] = field(default_factory=set)

    def want(self, checkpoint_id: str | None, reason: str) -> None:
        """Keep a checkpoint, for this reason unless it stays for another."""
        if checkpoint_id is not None and checkpoint_id not in self.keep:
            self.protect(checkpoint_id, reason)

    def protect(self, checkpoint_id: str, reason: str) -> None:
        """Keep a checkpoint, and for this reason."""
        self.keep[checkpoint_id] = reason
        self.drop.pop(checkpoint_id, None)


def chosen(
    ns: Namespace, policy: RetentionPolicy, pinned: set[str], now: datetime
) -> tuple[Choice, tuple[str, ...]]:
    """Choose by a policy; also return sentences on rules that could not be applied."""
    siblings = _old_siblings(ns, ns.children, pinned, policy.drop_siblings_after, now)
    while True:
        facts = _facts(ns, policy, siblings, now)
        choice = _chosen_turns(facts, pinned)
        protect(ns, choice, pinned)
        # Where the newest turns of a branch have expired, what is left of it may be old enough.
        more = _old_siblings(ns, choice.keep, pinned, policy.drop_siblings_after, now)
        if not more:
            return choice, _notes(facts)
        siblings |= more


def protect(ns: Namespace, choice: Choice, pinned: Iterable[str]) -> None:
    """Keep what is pinned, and the head."""
    for i in pinned:
        choice.protect(i, "pinned")
    if ns.head is not None:
        choice.protect(ns.head, "head")


@dataclass(frozen=True, slots=True)
class _Facts:
    """What turn rules look at.

    ``live`` are the checkpoints that no dropped branch takes along; ``rank`` counts for each the
    turns that began after it on its way to the nearest live tip.
    """

    ns: Namespace
    policy: RetentionPolicy
    turns: Turns
    siblings: set[str]
    live: list[str]
    rank: dict[str, int]
    young: set[str]
    matching: set[str]


def _facts(ns: Namespace, policy: RetentionPolicy, siblings: set[str], now: datetime) -> _Facts:
    divided = turns(ns)
    live = [i for i in ns.real if i not in siblings]
    matching = {divided.of[i] for i in live if policy.keep_where is not None and ns.rows[i].matches}
    return _Facts(
        ns,
        policy,
        divided,
        siblings,
        live,
        _ranks(ns, live, divided),
        _young(ns, live, divided, policy.keep_within, now),
        matching,
    )


def _is_young(time: datetime | None, limit: timedelta, now: datetime) -> bool:
    return time is None or now - time < limit


def _old_siblings(
    ns: Namespace,
    alive: Collection[str],
    pinned: set[str],
    after: timedelta | None,
    now: datetime,
) -> set[str]:
    """Find the branches of what is alive that are off the main line, old, and held by nothing.

    A tip stays while it is young, in flight, pinned or below a pin; whatever leads to one that
    stays, stays. With a branch goes what was dropped below it.
    """
    if after is None:
        return set()
    main = set(ns.line(ns.head))
    held = _below_pins(ns, main, pinned)
    old: set[str] = set()
    stays: set[str | None] = set()
    leads: set[str | None] = set()
    for i in reversed(ns.real):
        if i in alive and i not in main and i not in stays:
            young = _is_young(time_of(ns.rows[i]), after, now)
            holds = i not in leads and (young or i in held or ns.begun(i))
            if holds:
                stays.add(i)
            else:
                old.add(i)
        if i in stays:
            stays.add(ns.base[i])
        if i in alive or i in leads:
            leads.add(ns.base[i])
    for i in ns.real:
        if ns.base[i] in old:
            old.add(i)
    return old


def _below_pins(ns: Namespace, main: set[str], pinned: set[str]) -> set[str]:
    below: set[str] = set()
    for i in ns.real:
        if i not in main and (i in pinned or ns.base[i] in below):
            below.add(i)
    return below


def _ranks(ns: Namespace, live: list[str], divided: Turns) -> dict[str, int]:
    rank: dict[str, int] = {}
    for i in reversed(live):
        below = [rank[c] + (c in divided.starts) for c in ns.children[i] if c in rank]
        rank[i] = min(below, default=0)
    return rank


def _young(
    ns: Namespace, live: list[str], divided: Turns, limit: timedelta | None, now: datetime
) -> set[str]:
    if limit is None:
        return set()
    continued = {ns.base[i] for i in live if i not in divided.starts}
    # A turn is as old as the checkpoints that end it: those also stay when it is compacted, so
    # that it never ages by being compacted.
    ends: dict[str, list[datetime | None]] = {}
    for i in live:
        if i not in continued:
            ends.setdefault(divided.of[i], []).append(time_of(ns.rows[i]))
    return {turn for turn, times in ends.items() if _is_young(newest(times), limit, now)}


def _is_last(facts: _Facts, i: str) -> bool:
    limit = facts.policy.keep_last_turns
    return limit is not None and facts.rank[i] < limit


TURN_RULES: tuple[tuple[str, Callable[[_Facts, str], bool]], ...] = (
    ("every_turn", lambda facts, _: facts.policy.keeps_every_turn),
    ("unknown_turns", lambda facts, _: not facts.turns.told_apart),
    ("last_turns", _is_last),
    ("young_turn", lambda facts, i: facts.turns.of[i] in facts.young),
    ("matching_turn", lambda facts, i: facts.turns.of[i] in facts.matching),
)
"""Why a checkpoint's turn stays; the first rule that holds is the reason."""


def _ends_turn(facts: _Facts, i: str) -> bool:
    return any(child in facts.turns.starts for child in facts.ns.children[i] if child in facts.rank)


def _hides_its_turn(facts: _Facts, i: str) -> bool:
    # What follows an input row counts as its turn, so a turn that follows a turn which was never
    # more than its input keeps its own first checkpoint.
    base = facts.ns.base[i]
    return i in facts.turns.starts and base is not None and facts.ns.rows[base].source == "input"


REST_RULES: tuple[tuple[str, Callable[[_Facts, str], bool]], ...] = (
    ("rest", _ends_turn),
    ("match", lambda facts, i: bool(facts.matching) and facts.ns.rows[i].matches),
    ("turn_start", _hides_its_turn),
)
"""Why a checkpoint of a compacted turn stays."""

Rules = tuple[tuple[str, Callable[[_Facts, str], bool]], ...]


def _first(rules: Rules, facts: _Facts, i: str) -> str | None:
    return next((name for name, holds in rules if holds(facts, i)), None)


def _chosen_turns(facts: _Facts, pinned: set[str]) -> Choice:
    choice = Choice(drop=dict.fromkeys(facts.siblings, "sibling"))
    wanted = {i: _first(TURN_RULES, facts, i) for i in facts.live}
    compacts = facts.policy.compact_supersteps and facts.turns.marked
    lasting = _lasting(facts, wanted, pinned) if compacts else facts
    for i, reason in wanted.items():
        if reason is None:
            choice.drop[i] = "expired"
        elif compacts and lasting.rank[i] > 0:
            rest = _first(REST_RULES, lasting, i)
            if rest is None:
                choice.drop[i] = "superstep"
            else:
                choice.keep[i] = rest
        else:
            choice.keep[i] = reason
    for turn in {facts.turns.of[i]: None for i in facts.live if wanted[i]}:
        choice.want(facts.ns.base[turn], "base")
    return choice


def _lasting(facts: _Facts, wanted: dict[str, str | None], pinned: set[str]) -> _Facts:
    """Look at what leads to something that stays: a branch that has expired ends no turn."""
    lasting: set[str | None] = {facts.ns.head, *pinned}
    for i in reversed(facts.live):
        if i in lasting or wanted[i]:
            lasting |= {i, facts.ns.base[i]}
    live = [i for i in facts.live if i in lasting]
    return replace(facts, live=live, rank=_ranks(facts.ns, live, facts.turns))


def _notes(facts: _Facts) -> tuple[str, ...]:
    notes = []
    if not facts.turns.told_apart and not facts.policy.keeps_every_turn:
        notes.append("Its turns cannot be told apart, so every turn is kept.")
    if facts.policy.compact_supersteps and not facts.turns.marked:
        notes.append("Where its turns were at rest cannot be told, so no superstep is dropped.")
    return tuple(notes)
