"""Which checkpoints of the root namespace stay: turns, branches, heads, pins. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from retaining_saver.lineage import time_of
from retaining_saver.policy import RetentionPolicy
from retaining_saver.tree import Tree, Turns, turns


@dataclass(slots=True)
class Choice:
    """What stays and what goes of a thread: reasons by place, ``None`` where nothing is chosen.

    Carriers are in neither: they stay or go with what is around them. ``moving`` are the dropped
    links whose rows in the writes table move to their parents.
    """

    keep: list[str | None]
    drop: list[str | None]
    moving: set[int] = field(default_factory=set)

    @classmethod
    def among(cls, checkpoints: Collection[object]) -> Choice:
        """Choose nothing yet."""
        return cls([None] * len(checkpoints), [None] * len(checkpoints))

    def want(self, i: int | None, reason: str) -> None:
        """Keep a checkpoint, for this reason unless it stays for another."""
        if i is not None and self.keep[i] is None:
            self.protect(i, reason)

    def protect(self, i: int, reason: str) -> None:
        """Keep a checkpoint, and for this reason."""
        self.keep[i] = reason
        self.drop[i] = None

    def keep_all(self, ns: Tree, reason: str) -> None:
        """Keep every real checkpoint of a namespace."""
        for i in ns.real:
            self.keep[i] = reason

    def drop_rest(self, ns: Tree, reason: str) -> None:
        """Drop every real checkpoint of a namespace that is not kept."""
        for i in ns.real:
            if self.keep[i] is None:
                self.drop[i] = reason


def chosen(
    ns: Tree, policy: RetentionPolicy, pinned: set[int], now: datetime
) -> tuple[Choice, tuple[str, ...]]:
    """Choose by a policy; also return sentences on rules that could not be applied."""
    divided = turns(ns)
    after = policy.drop_siblings_after
    everything = ns.rows  # By place, and none of it is false.
    siblings = _old_siblings(ns, everything, pinned, after, now)
    while True:
        facts = _facts(ns, policy, divided, siblings, now)
        choice = _chosen_turns(facts, pinned)
        protect(ns, choice, pinned)
        # Where the newest turns of a branch have expired, what is left of it may be old enough.
        more = _old_siblings(ns, choice.keep, pinned, after, now)
        if not more:
            return choice, _notes(facts)
        siblings |= more


def protect(ns: Tree, choice: Choice, pinned: Iterable[int]) -> None:
    """Keep what is pinned, and the head."""
    for i in pinned:
        choice.protect(i, "pinned")
    if ns.head is not None:
        choice.protect(ns.head, "head")


@dataclass(frozen=True, slots=True)
class _Facts:
    """What turn rules look at.

    ``live`` are the checkpoints that no dropped branch takes along; ``rank`` counts for each, by
    place, the turns that began after it on its way to the nearest live tip.
    """

    ns: Tree
    policy: RetentionPolicy
    turns: Turns
    siblings: set[int]
    live: list[int]
    rank: list[int]
    young: set[int]
    matching: set[int]


def _facts(
    ns: Tree, policy: RetentionPolicy, divided: Turns, siblings: set[int], now: datetime
) -> _Facts:
    live = [i for i in ns.real if i not in siblings] if siblings else ns.real
    matches = [i for i in live if ns.rows[i].matches] if policy.keep_where is not None else []
    return _Facts(
        ns,
        policy,
        divided,
        siblings,
        live,
        _ranks(ns, live, divided),
        _young(ns, live, divided, policy.keep_within, now),
        {divided.of[i] for i in matches},
    )


def _is_young(time: datetime | None, limit: timedelta, now: datetime) -> bool:
    return time is None or now - time < limit


def _old_siblings(
    ns: Tree,
    alive: Sequence[object],
    pinned: set[int],
    after: timedelta | None,
    now: datetime,
) -> set[int]:
    """Find the branches of what is alive that are off the main line, old, and held by nothing.

    A tip stays while it is young, in flight, pinned or below a pin; whatever leads to one that
    stays, stays. With a branch goes what was dropped below it.
    """
    if after is None:
        return set()
    main = set(ns.line(ns.head))
    held = _below_pins(ns, main, pinned)
    old: set[int] = set()
    stays: set[int | None] = set()
    leads: set[int | None] = set()
    for i in reversed(ns.real):
        if alive[i] and i not in main and i not in stays:
            young = _is_young(time_of(ns.rows[i]), after, now)
            holds = i not in leads and (young or i in held or ns.begun(i))
            if holds:
                stays.add(i)
            else:
                old.add(i)
        if i in stays:
            stays.add(ns.base[i])
        if alive[i] or i in leads:
            leads.add(ns.base[i])
    for i in ns.real:
        if ns.base[i] in old:
            old.add(i)
    return old


def _below_pins(ns: Tree, main: set[int], pinned: set[int]) -> set[int]:
    below: set[int] = set()
    for i in ns.real:
        if i not in main and (i in pinned or ns.base[i] in below):
            below.add(i)
    return below


def _ranks(ns: Tree, live: list[int], divided: Turns) -> list[int]:
    unknown = len(ns.rows)  # More than there are turns.
    rank = [unknown] * len(ns.rows)
    for i in reversed(live):
        own = rank[i]
        if own == unknown:
            own = rank[i] = 0
        if divided.starts[i]:
            own += 1
        above = ns.base[i]
        if above is not None and own < rank[above]:
            rank[above] = own
    return rank


def _young(
    ns: Tree, live: list[int], divided: Turns, limit: timedelta | None, now: datetime
) -> set[int]:
    if limit is None:
        return set()
    continued = {ns.base[i] for i in live if not divided.starts[i]}
    # A turn is as old as the checkpoints that end it: those also stay when it is compacted, so
    # that it never ages by being compacted.
    ends = [i for i in live if i not in continued]
    # It is young if one of them is.
    return {divided.of[i] for i in ends if _is_young(time_of(ns.rows[i]), limit, now)}


Kept = Iterable[int]
Rules = tuple[tuple[str, Callable[[_Facts], Kept]], ...]


def _every_turn(facts: _Facts) -> Kept:
    return facts.live if facts.policy.keeps_every_turn else ()


def _unknown_turns(facts: _Facts) -> Kept:
    return () if facts.turns.told_apart else facts.live


def _last_turns(facts: _Facts) -> Kept:
    limit, rank = facts.policy.keep_last_turns, facts.rank
    return () if limit is None else [i for i in facts.live if rank[i] < limit]


def _of_turns(facts: _Facts, wanted: set[int]) -> Kept:
    return [i for i in facts.live if facts.turns.of[i] in wanted] if wanted else ()


TURN_RULES: Rules = (
    ("every_turn", _every_turn),
    ("unknown_turns", _unknown_turns),
    ("last_turns", _last_turns),
    ("young_turn", lambda facts: _of_turns(facts, facts.young)),
    ("matching_turn", lambda facts: _of_turns(facts, facts.matching)),
)
"""What stays because its turn does, rule by rule; the first rule that names it is the reason."""


def _rest(facts: _Facts) -> Kept:
    began_after = {facts.ns.base[i] for i in facts.live if facts.turns.starts[i]}
    return [i for i in facts.live if i in began_after]


def _match(facts: _Facts) -> Kept:
    return [i for i in facts.live if facts.ns.rows[i].matches] if facts.matching else ()


def _turn_start(facts: _Facts) -> Kept:
    # What follows an input row counts as its turn, so a turn that follows a turn which was never
    # more than its input keeps its own first checkpoint.
    ns = facts.ns
    for i in facts.live:
        base = ns.base[i] if facts.turns.starts[i] else None
        if base is not None and ns.source[base] == "input":
            yield i


REST_RULES: Rules = (("rest", _rest), ("match", _match), ("turn_start", _turn_start))
"""What stays of a compacted turn, rule by rule."""


def _by_rules(rules: Rules, facts: _Facts) -> list[str | None]:
    """Return by place the first rule that keeps a checkpoint."""
    reasons: list[str | None] = [None] * len(facts.ns.rows)
    for name, keeps in reversed(rules):
        for i in keeps(facts):
            reasons[i] = name
    return reasons


def _chosen_turns(facts: _Facts, pinned: set[int]) -> Choice:
    ns = facts.ns
    wanted = _by_rules(TURN_RULES, facts)
    starting = {facts.turns.of[i] for i in facts.live if wanted[i]}
    choice = Choice(_compacted(facts, wanted, pinned), [None] * len(ns.rows))
    for i in facts.live:
        if choice.keep[i] is None:
            choice.drop[i] = "superstep" if wanted[i] else "expired"
    for i in facts.siblings:
        choice.drop[i] = "sibling"
    for turn in starting:
        choice.want(ns.base[turn], "base")
    return choice


def _compacted(facts: _Facts, wanted: list[str | None], pinned: set[int]) -> list[str | None]:
    """Return ``wanted`` without the supersteps of turns that a compacting policy drops."""
    if not (facts.policy.compact_supersteps and facts.turns.marked):
        return wanted
    lasting = _lasting(facts, wanted, pinned)
    rests = _by_rules(REST_RULES, lasting)
    return [
        rests[i] if reason and lasting.rank[i] > 0 else reason for i, reason in enumerate(wanted)
    ]


def _lasting(facts: _Facts, wanted: list[str | None], pinned: set[int]) -> _Facts:
    """Look at what leads to something that stays: a branch that has expired ends no turn."""
    ns = facts.ns
    lasting: set[int | None] = {ns.head, *pinned}
    for i in reversed(facts.live):
        if i in lasting or wanted[i]:
            lasting |= {i, ns.base[i]}
    live = [i for i in facts.live if i in lasting]
    return replace(facts, live=live, rank=_ranks(ns, live, facts.turns))


def _notes(facts: _Facts) -> tuple[str, ...]:
    notes = []
    if not facts.turns.told_apart and not facts.policy.keeps_every_turn:
        notes.append("Its turns cannot be told apart, so every turn is kept.")
    if facts.policy.compact_supersteps and not facts.turns.marked:
        notes.append("Where its turns were at rest cannot be told, so no superstep is dropped.")
    return tuple(notes)
