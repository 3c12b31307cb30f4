"""The retention mark in checkpoint metadata, and folding annotations from one into another. Pure.

One nested key of plain JSON values, ``metadata["retention"]``, because Postgres drops
``metadata["writes"]``::

    {"kind": "duration", "id": ..., "added": {...}}      on a metadata-only checkpoint
    {..., "whole": True}                                 where it carries the whole run history
    {"folded": {"id": ..., "entries": {...}},            on a checkpoint that was folded into
     "reclaimed": [...]}

``added`` and ``entries`` hold *names*: ``{"run_durations": ["run-1"], "title": None}`` means the
entry ``run-1`` of the mapping ``run_durations`` and the whole value of ``title``. A mark whose id
is another checkpoint's came along when a writer copied that checkpoint's metadata, and is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

MARK = "retention"
DURATION = "duration"
"""The kind of a checkpoint that records runs."""
LEGACY_MARKER = "runtime_run_duration"
HISTORY_MAPS = ("run_durations", "run_message_ids")
RECLAIMED_KEPT = 64
"""How many reclaimed ids a checkpoint remembers: enough for every writer still in flight."""

# What a checkpoint says about itself rather than about runs; never folded, and not free to use.
RESERVED_KEYS = frozenset(
    {
        "source",
        "step",
        "parents",
        "run_id",
        "writes",
        "counters_since_delta_snapshot",
        "delta_writes_versioned",
        MARK,
    }
)

Metadata = Mapping[str, Any]
Names = dict[str, "list[str] | None"]


def kind_of(checkpoint_id: str, metadata: Metadata) -> str | None:
    """Return the kind that a checkpoint's own mark claims, or ``None``."""
    mark = _mapping(metadata.get(MARK))
    kind = mark.get("kind")
    return kind if isinstance(kind, str) and mark.get("id") == checkpoint_id else None


def has_legacy_marker(metadata: Metadata) -> bool:
    """Tell whether an application marked a duration-only checkpoint by itself."""
    return LEGACY_MARKER in _mapping(metadata.get("writes"))


def added_names(metadata: Metadata, parent: Metadata) -> Names:
    """Name what ``metadata`` records that ``parent`` does not."""
    names: Names = {}
    for key, value in metadata.items():
        if key in RESERVED_KEYS or (key in parent and parent[key] == value):
            continue
        if isinstance(value, Mapping):
            known = _mapping(parent.get(key))
            new = [k for k, v in value.items() if k not in known or known[k] != v]
            if new or not value:
                names[key] = new
        else:
            names[key] = None
    return names


def adds_history(checkpoint_id: str, metadata: Metadata, parent: Metadata | None = None) -> bool:
    """Tell whether a checkpoint records runs by itself that its parent does not.

    Entries that were folded into it do not count: they were another checkpoint's. Without
    ``parent``, tell whether it records any run by itself.
    """
    folded = _folded_names(checkpoint_id, metadata)
    for key in HISTORY_MAPS:
        known = _mapping((parent or {}).get(key))
        came_by_folding = set(folded.get(key) or ())
        for name, value in _mapping(metadata.get(key)).items():
            if name not in came_by_folding and (name not in known or known[name] != value):
                return True
    return False


def tagged(
    metadata: Metadata,
    checkpoint_id: str,
    kind: str,
    parent: Metadata,
    before: Metadata | None = None,
) -> dict[str, Any]:
    """Return ``metadata`` marked as a metadata-only checkpoint's, naming what it adds.

    ``before`` is the run history up to ``parent``, where that was read. What it has does not count
    as added: a writer that repeats the whole history in each leaf would else have all of it folded
    into each parent. A leaf that has all of it carries the whole history.
    """
    marked = {**metadata, **_told_durations(metadata)}
    added = added_names(marked, {**parent, **(before or {})})
    mark: dict[str, Any] = {"kind": kind, "id": checkpoint_id, "added": added}
    if before is not None and not added_names(before, marked):
        mark["whole"] = True
    return {**marked, MARK: mark}


def runs_added(metadata: Metadata, parent: Metadata) -> int:
    """Count the runs of which ``metadata`` records something that ``parent`` does not."""
    added = added_names(metadata, parent)
    messages = _mapping(metadata.get("run_message_ids"))
    wrote = (messages[name] for name in added.get("run_message_ids") or ())
    return len(
        {*(added.get("run_durations") or ()), *(run for run in wrote if isinstance(run, str))}
    )


def _told_durations(metadata: Metadata) -> dict[str, Any]:
    """Say durations that only the legacy marker holds in the map: Postgres drops the marker."""
    told = _legacy_durations(metadata)
    recorded = _mapping(metadata.get("run_durations"))
    if told.keys() <= recorded.keys():
        return {}
    return {"run_durations": {**told, **recorded}}


def leaf_metadata(
    head: Metadata, leaf_id: str, kind: str, entries: Metadata, history: Metadata
) -> dict[str, Any]:
    """Return the marked metadata of a leaf on ``head``: adds ``entries``, carries ``history``.

    Everything else is copied: without its delta counters no snapshot would ever be taken again,
    and without its run id a run that is entered again would store its input twice.
    """
    metadata = {k: v for k, v in head.items() if k != "writes"}
    for key, value in (*history.items(), *entries.items()):
        if isinstance(value, Mapping):
            metadata[key] = {**_mapping(metadata.get(key)), **value}
        else:
            metadata[key] = value
    added = added_names(entries, head)
    metadata["source"] = "update"
    metadata[MARK] = {"kind": kind, "id": leaf_id, "added": added, "whole": True}
    return metadata


def is_whole(checkpoint_id: str, metadata: Metadata) -> bool:
    """Tell whether a checkpoint carries the run history of all its ancestors."""
    return kind_of(checkpoint_id, metadata) is not None and bool(metadata[MARK].get("whole"))


def history_of(metadata: Metadata) -> tuple[dict[str, int], dict[str, str | None]]:
    """Return the durations by run and the runs by message that a checkpoint records."""
    durations = {**_legacy_durations(metadata), **_mapping(metadata.get("run_durations"))}
    return durations, dict(_mapping(metadata.get("run_message_ids")))


def merged_history(
    newest_first: Iterable[Metadata],
) -> tuple[dict[str, int], dict[str, str | None]]:
    """Merge what checkpoints of one line record; the newest word about a run or message stands.

    The runs of older checkpoints come first.
    """
    durations: dict[str, int] = {}
    messages: dict[str, str | None] = {}
    for metadata in reversed([*newest_first]):
        timed, wrote = history_of(metadata)
        durations.update(timed)
        messages.update(wrote)
    return durations, messages


def folded_into(
    parent: Metadata, parent_id: str, leaf: Metadata, leaf_id: str | None
) -> dict[str, Any]:
    """Return ``parent`` with everything that ``leaf`` itself recorded, and with its id remembered.

    Without a ``leaf_id``, ``leaf`` holds mere entries that never were a checkpoint's.
    Raises nothing and changes neither argument. What other leaves folded into ``parent`` stays.
    """
    added = _own_names(leaf, leaf_id, parent)
    merged = dict(parent)
    for key, names in added.items():
        if names is None:
            merged[key] = leaf[key]
        else:
            merged[key] = {**_mapping(parent.get(key)), **{n: leaf[key][n] for n in names}}
    durations = _legacy_durations(leaf)
    if durations:
        merged["run_durations"] = {**durations, **_mapping(merged.get("run_durations"))}
        added = _union(added, {"run_durations": list(durations)})
    merged[MARK] = _marked_as_folded(parent, parent_id, leaf, leaf_id, added)
    return merged


def history_by_age(
    checkpoint_id: str, metadata: Metadata
) -> tuple[dict[str, int], dict[str, str | None]]:
    """Return ``history_of`` a checkpoint, what was folded into it first, oldest first.

    JSON columns keep no order of keys; the list of what was folded does.
    """
    folded = _folded_names(checkpoint_id, metadata)
    durations, messages = history_of(metadata)
    return (
        _first(durations, folded.get("run_durations")),
        _first(messages, folded.get("run_message_ids")),
    )


def _first(entries: dict[str, Any], names: list[Any] | None) -> dict[str, Any]:
    return {**{name: entries[name] for name in names or () if name in entries}, **entries}


def history_into(
    target: Metadata, target_id: str, dropped: Metadata, keep_runs: int, *, older: bool = False
) -> dict[str, Any]:
    """Return ``target`` with the run history that ``dropped`` records, and nothing else of it.

    What is ``older`` comes before what was folded into ``target`` already, for that is its own.
    What ``target`` says by itself stands. Of the runs that came by folding only the ``keep_runs``
    newest stay, with the messages they wrote, so that no checkpoint's map grows for ever.
    """
    durations, messages = history_of(dropped)
    gained: dict[str, dict[str, Any]] = {
        "run_durations": durations,
        "run_message_ids": messages,
    }
    merged, names = dict(target), _folded_names(target_id, target)
    for key, entries in gained.items():
        known = _mapping(target.get(key))
        new = {name: value for name, value in entries.items() if name not in known}
        if new:
            merged[key] = {**new, **known} if older else {**known, **new}
            if older:
                names[key] = [*new, *(names.get(key) or ())]
            else:
                names = _union(names, {key: list(new)})
    wrote = _mapping(merged.get("run_message_ids"))
    timed = names.get("run_durations") or []
    writers = list(dict.fromkeys(wrote.get(n) for n in names.get("run_message_ids") or ()))
    expired = {
        *timed[: max(len(timed) - keep_runs, 0)],
        *writers[: max(len(writers) - keep_runs, 0)],
    }
    _forget(merged, names, "run_durations", lambda name, _: name in expired)
    _forget(merged, names, "run_message_ids", lambda _, run_id: run_id in expired)
    mark = dict(_mapping(target.get(MARK)))
    gone = reclaimed_ids(target_id, target)
    merged[MARK] = {**mark, "folded": {"id": target_id, "entries": names}, "reclaimed": gone}
    return merged


def _forget(
    metadata: dict[str, Any], names: Names, key: str, is_expired: Callable[[str, Any], bool]
) -> None:
    entries = _mapping(metadata.get(key))
    folded = set(names.get(key) or ())
    expired = {n for n, value in entries.items() if n in folded and is_expired(n, value)}
    if expired:
        metadata[key] = {n: value for n, value in entries.items() if n not in expired}
        names[key] = [n for n in names.get(key) or () if n not in expired]


def reclaimed_ids(checkpoint_id: str, metadata: Metadata) -> list[str]:
    """List the reclaimed checkpoints whose state ``checkpoint_id`` holds."""
    mark = _mapping(metadata.get(MARK))
    if _mapping(mark.get("folded")).get("id") != checkpoint_id:
        return []
    return [i for i in _list(mark.get("reclaimed")) if isinstance(i, str)]


def _own_names(leaf: Metadata, leaf_id: str | None, parent: Metadata) -> Names:
    mark = _mapping(leaf.get(MARK))
    if leaf_id is None or mark.get("id") != leaf_id or not isinstance(mark.get("added"), Mapping):
        return added_names(leaf, parent)
    names: Names = {}
    for key, added in _names(mark["added"]).items():
        if key not in leaf or key in RESERVED_KEYS:
            continue
        if added is None or not isinstance(leaf[key], Mapping):
            names[key] = None
        else:
            names[key] = [n for n in added if n in leaf[key]]
    return names


def _marked_as_folded(
    parent: Metadata, parent_id: str, leaf: Metadata, leaf_id: str | None, added: Names
) -> dict[str, Any]:
    mark = dict(_mapping(parent.get(MARK)))
    if kind_of(parent_id, parent) is not None:
        # The target is a leaf itself: what it was given leaves with it. Without a readable list
        # of what it added, everything that its parent lacks does.
        if isinstance(mark.get("added"), Mapping):
            mark["added"] = _union(_names(mark["added"]), added)
    else:
        for key in ("kind", "id", "added", "whole"):
            mark.pop(key, None)
    entries = _union(_folded_names(parent_id, parent), added)
    gone = reclaimed_ids(parent_id, parent)
    if leaf_id is not None:
        gone += [*reclaimed_ids(leaf_id, leaf), leaf_id]
    mark["folded"] = {"id": parent_id, "entries": entries}
    mark["reclaimed"] = list(dict.fromkeys(gone))[-RECLAIMED_KEPT:]
    return mark


def _folded_names(checkpoint_id: str, metadata: Metadata) -> Names:
    folded = _mapping(_mapping(metadata.get(MARK)).get("folded"))
    if folded.get("id") != checkpoint_id:
        return {}
    return _names(folded.get("entries"))


def _names(stored: Any) -> Names:
    """Read names from a mark. Metadata is anybody's to write, so what cannot be one is left out."""
    return {
        key: None if names is None else [n for n in names if not isinstance(n, (list, dict))]
        for key, names in _mapping(stored).items()
        if names is None or isinstance(names, list)
    }


def _union(one: Names, other: Names) -> Names:
    names = dict(one)
    for key, added in other.items():
        known = names.get(key)
        if added is None or (key in names and known is None):
            names[key] = None
        else:
            names[key] = list(dict.fromkeys([*(known or ()), *added]))
    return names


def _legacy_durations(leaf: Metadata) -> dict[str, Any]:
    payload = _mapping(_mapping(leaf.get("writes")).get(LEGACY_MARKER))
    if "run_id" in payload and "duration" in payload:
        return {str(payload["run_id"]): payload["duration"]}
    return {k: v for k, v in payload.items() if isinstance(v, (int, float))}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
