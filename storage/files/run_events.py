"""Stored form of the events of a run, which are the calls that changed its environments. Pure.

A stored event omits values that can be derived: ``row`` if it is ``at`` transitions after the run's
first row, ``kwargs`` if they are empty, and ``lanes`` if they are all lanes. Other fields are
stored unchanged. `tallyroll.storage.readers.event_file` reads and writes the file of the events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

Event = dict[str, Any]

EVENTS: Final = "events"
IN_FILE: Final = "events_in_file"
"""The field of a run's entry that holds the name of its events in the file."""
LEFT_OUT: Final = "events_left_out"
"""True if a run has more events than are stored."""
EVENTS_NBYTES: Final = 2**26
"""Maximum bytes of all events of a storage, which take up to ten times as much in memory."""
_FIRST_ROW_OF_RUN: Final = "first_row_of_run"
_MOST: Final = 2**62
_LEAST_NBYTES: Final = len('{"at":0,"call":"env_set","name":"","args":[]}')


def stored_form(event: Mapping[str, Any], run: Mapping[str, Any]) -> Event:
    """Return the stored form of an event of the entry ``run``."""
    usual = {"kwargs": {}, "lanes": None, "row": _first_row(run) + event["at"]}
    return {name: each for name, each in event.items() if usual.get(name, event) != each}


def events_of(run: Mapping[str, Any], stop: int = _MOST) -> list[Event]:
    """Return the events of an entry that occurred before row ``stop`` was collected.

    Invalid values, from damaged or crafted files, are left out.
    """
    found = run.get(EVENTS)
    if not isinstance(found, list):
        return []
    first = _first_row(run)
    events = []
    for each in found:
        if not is_event(each):
            continue
        event = {"at": each["at"], "row": first + each["at"], "kwargs": {}, "lanes": None, **each}
        if event["row"] <= stop:
            events.append(event)
    return events


def is_event(event: Any) -> bool:
    """Return True if a JSON value is an event."""
    if not isinstance(event, dict) or not _is_count(event.get("at")):
        return False
    return (
        _is_count(event.get("row", 0))
        and event.get("call") in ("env_call", "env_set")
        and isinstance(event.get("name"), str)
        and isinstance(event.get("args"), list | None)
        and isinstance(event.get("kwargs", {}), dict)
        and isinstance(event.get("lanes"), list | None)
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _first_row(run: Mapping[str, Any]) -> int:
    first = run.get(_FIRST_ROW_OF_RUN, run.get("first_row"))
    return first if type(first) is int else 0


def shown(runs: Sequence[Mapping[str, Any]], head: int) -> list[dict[str, Any]]:
    """Return the entries of the runs of ``head`` rows, with the omitted values of events restored.

    The events in entries of copied runs are restored too.
    """
    stops = [*(run["first_row"] for run in runs), head][1:]
    return [_shown(run, stop) for run, stop in zip(runs, stops, strict=True)]


def _shown(run: Mapping[str, Any], stop: int = _MOST) -> dict[str, Any]:
    entry = without_name(run)
    if EVENTS in entry:
        entry[EVENTS] = events_of(run, stop)
    if isinstance(copied := entry.get("runs"), list):
        entry["runs"] = [_shown(each) if isinstance(each, dict) else each for each in copied]
    return entry


def before_row(run: Mapping[str, Any], row: int) -> dict[str, Any]:
    """Return an entry without the events that occurred when ``row`` was the next row, or later."""
    found = run.get(EVENTS)
    if not isinstance(found, list):
        return dict(run)
    first = _first_row(run)
    left = [each for each in found if is_event(each) and each.get("row", first + each["at"]) < row]
    return {**run, EVENTS: left}


def without_name(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry without the name of its events in the file."""
    return {name: each for name, each in run.items() if name != IN_FILE}


def inline(run: Mapping[str, Any], room: float) -> dict[str, Any]:
    """Return an entry with a copy of its events, or without them if they exceed ``room`` bytes."""
    events = run.get(EVENTS)
    if not isinstance(events, list):
        return without_name(run)
    if len(events) * _LEAST_NBYTES > room:
        return without_events(run)
    return {**without_name(run), EVENTS: list(events)}


def without_events(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry that records only that it has events, if it has some."""
    if not run.get(EVENTS) and IN_FILE not in run:
        return dict(run)
    rest = {name: each for name, each in run.items() if name not in (EVENTS, IN_FILE)}
    return {**rest, LEFT_OUT: True}
