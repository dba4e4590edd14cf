"""Entries of a manifest's runs for rows that were copied from another storage.

Such an entry is ``{"first_row": 0, "copied_from": {"id": ..., "rows": [first, last]},
"runs": [...]}``. ``rows`` is a range of the other storage that has all that were copied; its
last one is None where they are copied in pieces, until the writer knows. ``runs`` are the entries
there of the runs that made them, with the numbers of rows that they have there.
``runs_left_out`` says how many more there were, ``unchanged`` that no program had the rows in its
hands on their way. ``copied_from`` may have more: ``rewinds`` counts how often the other storage
had taken rows back by then, ``ids_moved_by`` is the number by which trajectory ids are larger than
there (None: they were numbered again), and ``sources`` are the storages of which the other one is a
view or a union, as such mappings (None: some are not named). After `_MOST_COPIES` one last entry,
``{"first_row": n, "copies_left_out": true}``, is of all rows that come from elsewhere.
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
"""True if no program had the rows in its hands on their way, which may have changed them."""
_OURS = (COPIED, _RUNS, _RUNS_LEFT_OUT, _UNCHANGED)
PACKED = "packed_from"
"""The key of a packed storage's manifest under which it names the storage that was packed."""
SOURCES, MOVED, REWINDS = "sources", "ids_moved_by", "rewinds"
_MOST_SOURCES = 64

ENTRY_NBYTES = 2**14
_ALL_NBYTES = 2**17
"""Bytes of all copies in a manifest: the runs of collectors have to fit beside them."""
_MOST_COPIES = 256
_DEEPEST = 24


def is_copied(entry: Mapping[str, Any]) -> bool:
    """Return whether the entry is of copied rows; others may use the word for their own."""
    return COPIED in entry and rows_copied(entry) is not None


def is_collected(entry: Mapping[str, Any]) -> bool:
    """Return whether the entry is a collector's, whose record counts its rows."""
    return FIRST_ROW_OF_RUN in entry


def goes_on(before: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    """Return whether `extend` made ``entry``: trajectories of ``before`` may go on in it."""
    made = is_copied(entry) or LEFT_OUT in entry
    made = made or (is_copied(before) and entry.keys() == {"first_row"})
    return made and not is_collected(before)


def copied_runs(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the runs that made the rows of a copy, as far as the entry has them."""
    found = entry.get(_RUNS)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def all_makers(entry: Mapping[str, Any], *, unchanged: bool = False) -> list[Mapping[str, Any]]:
    """Return the runs that made an entry's rows, none where one of them is not known.

    ``unchanged``: of rows that are certainly as these runs made them; none of others.
    """
    if not is_copied(entry):
        return [entry]
    found = [all_makers(run, unchanged=unchanged) for run in copied_runs(entry)]
    changed = unchanged and not is_unchanged(entry)
    return [] if changed or runs_left_out(entry) or not all(found) else list(chain(*found))


def is_unchanged(entry: Mapping[str, Any]) -> bool:
    """Return whether the rows of a copy are certainly those that were there."""
    return entry.get(_UNCHANGED) is True


def runs_left_out(entry: Mapping[str, Any]) -> int:
    """Return how many runs the entry of a copy leaves out."""
    count = entry.get(_RUNS_LEFT_OUT)
    return count if type(count) is int and count > 0 else 0


def rows_copied(entry: Mapping[str, Any]) -> tuple[str, int, int | None] | None:
    """Return the storage that rows were copied from, and the first and the last of them there."""
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
    """Return the source that the entry of a copy names, without unknown or oversized values."""
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
    """Return the rows of storage ``id`` in the entry, empty if it does not name the last one."""
    found = rows_copied(entry)
    if found is None or found[0] != id:
        return None
    _, first, last = found
    return range(first, first if last is None else last + 1)


def source_of(
    manifest: Mapping[str, Any], rows: list[int | None], ids_moved_by: int | None = 0
) -> dict[str, Any]:
    """Return the part of an entry that names the storage from which ``rows`` were copied.

    ``ids_moved_by`` is the difference of trajectory ids from those there; None: it is unknown.
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
    """Return the storages whose rows a view, a union or a packed storage has, as `source_of`."""
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
    """``entry`` as one of rows that ``runs`` made and that were copied from a storage.

    It has the newest runs, as many as fit into ``room`` bytes. ``source`` is a result of
    `source_of`. ``unchanged``: the rows are as they were there.
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
    """``entry`` without what it says of a copy."""
    ours = _OURS if is_copied(entry) else ()
    return {name: value for name, value in entry.items() if name not in ours}


def makers(runs: Sequence[Mapping[str, Any]], span: range) -> tuple[list[Any], range]:
    """Return the entries of ``runs`` that made rows of ``span``, and all rows of these entries."""
    stops = [*(run["first_row"] for run in runs), 2**62][1:]
    found = [
        (run, stop)
        for run, stop in zip(runs, stops, strict=True)
        if run["first_row"] < span.stop and stop > max(span.start, run["first_row"])
    ]
    if not found:
        return [], span
    return [run for run, _ in found], range(found[0][0]["first_row"], found[-1][1])


def room_beside(others: Sequence[Mapping[str, Any]], most: int = ENTRY_NBYTES) -> int:
    """Return the bytes of runs that one more copy may have, where a manifest has ``others``."""
    copies = sum(len(json.dumps(each)) for each in others if is_copied(each))
    return min(most, _ALL_NBYTES - copies)


def _that_fit(runs: Sequence[Any], room: int) -> list[Any]:
    kept: list[Any] = []
    left: float = room
    for run in reversed(runs):
        if isinstance(run, dict):
            run = inline(run, left)
        least = run if not isinstance(run, dict) or _nbytes_of(run) <= left else without_events(run)
        left -= _nbytes_of(least)
        if left < 0:
            break
        kept.append(least)
    return kept[::-1]


def has_room(entries: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether there is space for one more copy among ``entries``."""
    return sum(map(is_copied, entries)) < _MOST_COPIES


def _nbytes_of(run: Any) -> float:
    """Return bytes of its JSON; infinitely many where it is none, or nested too deep."""
    if is_deep(run):
        return math.inf
    try:
        return len(json.dumps(run, allow_nan=False))
    except (TypeError, ValueError):
        return math.inf


def is_deep(value: Any, levels: int = _DEEPEST) -> bool:
    """Return whether a JSON value is nested deeper than entries of runs may be."""
    inner = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list | tuple):
        return False
    return levels == 0 or any(is_deep(each, levels - 1) for each in inner)
