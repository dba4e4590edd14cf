"""Manifest entries of rows that were copied from another storage.

Such an entry is ``{"first_row": 0, "copied_from": {"id": ..., "rows": [first, last]},
"runs": [...]}``. Its fields are:

- ``copied_from``: the source. ``rows`` is a range of source rows that contains all copied rows. The
  last row is None while rows are copied in pieces, until the writer knows it.
- ``runs``: the source's entries of the runs that made the rows, with row numbers of the source.
- ``runs_left_out``: the number of runs that ``runs`` omits.
- ``unchanged``: True if no program could change the rows during the copy.

``copied_from`` may have more fields:

- ``rewinds``: the number of rewinds of the source at the time of the copy.
- ``ids_moved_by``: the offset that was added to trajectory ids; None if the ids were renumbered
  individually.
- ``sources``: the storages behind a source that is a view or a union, in the form of
  ``copied_from``; None if some of them are not named.

After `_MOST_COPIES` copies, one last entry, ``{"first_row": n, "copies_left_out": true}``, covers
the rows of all further copies.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from tallyroll.storage.files.run_events import inline, without_events

Entry = dict[str, Any]

COPIED = "copied_from"
LEFT_OUT = "copies_left_out"
FIRST_ROW_OF_RUN = "first_row_of_run"
_RUNS, _RUNS_LEFT_OUT = "runs", "runs_left_out"
_UNCHANGED = "unchanged"
"""True if no program that could have changed the rows had access to them during the copy."""
_OURS = (COPIED, _RUNS, _RUNS_LEFT_OUT, _UNCHANGED)
PACKED = "packed_from"
"""The manifest key of a packed storage whose value names the original storage."""
SOURCES, MOVED, REWINDS = "sources", "ids_moved_by", "rewinds"
_MOST_SOURCES = 64

COPIES_NBYTES = 2**20
"""Maximum bytes of the copies in a manifest, and of the runs in the metadata of an export.

The metadata of an export have to stay far below 4 MiB, the most that an import reads.
"""
_EVENTS_NBYTES = 2**14
"""Maximum bytes of the events in the entry of a copy."""
_MOST_COPIES = 256
_DEEPEST = 24


def is_copied(entry: Mapping[str, Any]) -> bool:
    """Return True if the entry describes copied rows.

    Other programs may have written other values under the key `COPIED`.
    """
    return COPIED in entry and rows_copied(entry) is not None


def is_collected(entry: Mapping[str, Any]) -> bool:
    """Return True if the entry describes a run of a collector, whose record counts its rows."""
    return FIRST_ROW_OF_RUN in entry


def goes_on(before: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    """Return True if `extend` made ``entry`` and may have continued trajectories of ``before``."""
    made = is_copied(entry) or LEFT_OUT in entry
    made = made or (is_copied(before) and entry.keys() == {"first_row"})
    return made and not is_collected(before)


def copied_runs(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the runs that made the rows of a copy, as far as the entry lists them."""
    found = entry.get(_RUNS)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def all_makers(entry: Mapping[str, Any], *, unchanged: bool = False) -> list[Mapping[str, Any]]:
    """Return the runs that made an entry's rows, or an empty list if one of them is unknown.

    If ``unchanged`` is True, the list is also empty unless the rows are certain to be unchanged
    since those runs.
    """
    if not is_copied(entry):
        return [entry]
    found = [all_makers(run, unchanged=unchanged) for run in copied_runs(entry)]
    changed = unchanged and not is_unchanged(entry)
    return [] if changed or runs_left_out(entry) or not all(found) else list(chain(*found))


def is_unchanged(entry: Mapping[str, Any]) -> bool:
    """Return True if the rows of a copy are certainly the same as in the source."""
    return entry.get(_UNCHANGED) is True


def runs_left_out(entry: Mapping[str, Any]) -> int:
    """Return the number of runs that the entry of a copy leaves out."""
    count = entry.get(_RUNS_LEFT_OUT)
    return count if type(count) is int and count > 0 else 0


def rows_copied(entry: Mapping[str, Any]) -> tuple[str, int, int | None] | None:
    """Return the id of the source of copied rows, and their first and last numbers in the source.

    The result is None if the entry does not describe copied rows.
    """
    source = entry.get(COPIED)
    if not isinstance(source, dict) or not isinstance(id := source.get("id"), str):
        return None
    match source.get("rows"):
        case [int(first), None] if first >= 0:
            return id, first, None
        case [int(first), int(last)] if 0 <= first <= last:
            return id, first, last
    return None


def bounded(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field `COPIED` of the entry of a copy, without unknown or oversized values."""
    said, found = entry[COPIED], rows_copied(entry)
    assert found is not None
    id, first, last = found
    more = {name: said[name] for name in (REWINDS, MOVED) if type(said.get(name)) is int}
    if SOURCES in said:
        more[SOURCES] = sources = said[SOURCES]
        right = isinstance(sources, list) and len(sources) <= _MOST_SOURCES
        if not right or any(rows_copied({COPIED: each}) is None for each in sources):
            more[SOURCES] = None
        else:
            more[SOURCES] = [bounded({COPIED: {**each, SOURCES: []}}) for each in sources]
    return {"id": id[:200], "rows": [first, last], **more}


def copied_span(entry: Mapping[str, Any], id: str) -> range | None:
    """Return the range of rows that were copied from storage ``id``, or None if none were.

    The range is empty if the last row is not recorded.
    """
    found = rows_copied(entry)
    if found is None or found[0] != id:
        return None
    _, first, last = found
    return range(first, first if last is None else last + 1)


def source_of(
    manifest: Mapping[str, Any], rows: list[int | None], ids_moved_by: int | None = 0
) -> dict[str, Any]:
    """Return the part of an entry that names the source of copied ``rows``.

    ``ids_moved_by`` is the offset of trajectory ids from those in the source, or None if unknown.
    """
    found: dict[str, Any] = {"id": manifest["id"], "rows": rows}
    if rewinds := manifest.get("rewinds"):
        found[REWINDS] = len(rewinds)
    if ids_moved_by != 0:
        found[MOVED] = ids_moved_by
    if sources := sources_of(manifest):
        found[SOURCES] = sources if len(sources) <= _MOST_SOURCES else None
    return found


def sources_of(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the source storages of a view, a union or a packed storage; see `source_of`."""
    found = list(manifest.get(SOURCES, ()))
    packed = manifest.get(PACKED)
    if isinstance(packed, Mapping):
        match packed.get("rows"):
            case [int(start), int(stop)] if 0 <= start < stop:
                found.append({**packed, "rows": [start, stop - 1]})
    return found


def copy_entry(
    entry: Mapping[str, Any],
    source: Mapping[str, Any],
    runs: Sequence[Any],
    room: int,
    *,
    unchanged: bool = False,
) -> Entry:
    """Return ``entry`` extended by the source and the runs of copied rows.

    Args:
        entry: the entry of the rows.
        source: a result of `source_of`.
        runs: the runs that made the rows. The newest ones are kept, as many as fit.
        room: the maximum number of bytes of the runs. Their events take a small part of it.
        unchanged: True if the rows are the same as in the source.
    """
    kept = _that_fit(runs, room)
    more: Entry = {_RUNS_LEFT_OUT: len(runs) - len(kept)} if len(kept) < len(runs) else {}
    left = runs[: len(runs) - len(kept)]
    if any(is_copied(run) or LEFT_OUT in run for run in left if isinstance(run, Mapping)):
        source = {**source, SOURCES: None}
    if unchanged:
        more[_UNCHANGED] = True
    return {**without_copy(entry), COPIED: dict(source), _RUNS: kept, **more}


def without_copy(entry: Mapping[str, Any]) -> Entry:
    """Return ``entry`` without the fields that describe a copy."""
    ours = _OURS if is_copied(entry) else ()
    return {name: value for name, value in entry.items() if name not in ours}


def makers(runs: Sequence[Mapping[str, Any]], span: range) -> tuple[list[Any], range]:
    """Return the entries of ``runs`` that made rows of ``span``, and the range of their rows."""
    stops = [*(run["first_row"] for run in runs), 2**62][1:]
    found = [
        (run, stop)
        for run, stop in zip(runs, stops, strict=True)
        if run["first_row"] < span.stop and stop > max(span.start, run["first_row"])
    ]
    if not found:
        return [], span
    return [run for run, _ in found], range(found[0][0]["first_row"], found[-1][1])


def room_for_copies(others: Sequence[Mapping[str, Any]], most: int = COPIES_NBYTES) -> int:
    """Return the maximum bytes for the runs of another copy, given the entries ``others``.

    ``most`` is the maximum for all copies.
    """
    return most - sum(len(json.dumps(each)) for each in others if is_copied(each))


def _that_fit(runs: Sequence[Any], room: int) -> list[Any]:
    """Return the newest runs that fit, of which the newest keep their events."""
    kept: list[Any] = []
    left: float = room
    for_events: float = _EVENTS_NBYTES
    for run in reversed(runs):
        least = without_events(run) if isinstance(run, dict) else run
        left -= (least_nbytes := _nbytes_of(least))
        if left < 0:
            break
        if isinstance(run, dict):
            most = min(left, for_events)
            whole = inline(run, most)
            if (more := _nbytes_of(whole) - least_nbytes) <= most:
                least, left, for_events = whole, left - more, for_events - more
        kept.append(least)
    return kept[::-1]


def has_room(entries: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if there is room for one more copy among ``entries``."""
    return sum(map(is_copied, entries)) < _MOST_COPIES


def _nbytes_of(run: Any) -> float:
    """Return the bytes of a run in JSON; infinity if the run is invalid or nested too deeply."""
    if is_deep(run):
        return math.inf
    try:
        return len(json.dumps(run, allow_nan=False))
    except (TypeError, ValueError):
        return math.inf


def is_deep(value: Any, levels: int = _DEEPEST) -> bool:
    """Return True if a JSON value is nested more deeply than entries of runs may be."""
    inner = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list | tuple):
        return False
    return levels == 0 or any(is_deep(each, levels - 1) for each in inner)
