"""Compare the calls of environments that a run made with its rows. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tallyroll.storage.ext.verification.findings import Findings, Place
from tallyroll.storage.files.run_events import EVENTS, events_of, is_event


def check_events(entries: Sequence[Mapping[str, Any]], head: int, findings: Findings) -> None:
    """Add findings on the events of each run.

    Args:
        entries: the runs of the manifest, with their events.
        head: the rows that are committed.
        findings: where they are added.
    """
    firsts = [_count(entry.get("first_row")) for entry in entries]
    for number, (entry, first) in enumerate(zip(entries, firsts, strict=True)):
        stop = firsts[number + 1] if number + 1 < len(entries) else head
        for place, problem in _problems(entry, first, stop):
            findings.add(
                "events",
                "a call of environments does not fit its run",
                Place(what=f"run {number}, event {place}: {problem}"),
            )


def _problems(entry: Mapping[str, Any], first: int, stop: int) -> Iterator[tuple[int, str]]:
    """Yield the index of each event that is wrong, and why."""
    found = entry.get(EVENTS, [])
    if not isinstance(found, list):
        yield 0, f"expected a list of events, got {type(found).__name__}"
        return
    most, before = _count(entry.get("lanes"), 2**62), 0
    apart: int | None = None
    for place, raw in enumerate(found):
        if not is_event(raw):
            yield place, "it is no event"
            continue
        (event,) = events_of({**entry, EVENTS: [raw]})
        at, row = event["at"], event["row"]
        if not max(first, before) <= row <= stop:
            yield place, f"its row is {row:,}, not from {max(first, before):,} to {stop:,}"
        elif apart is not None and row - at != apart:
            yield place, f"it was made at {at:,}, and at {row - apart:,} by its row"
        before, apart = max(before, row), row - at
        lanes, failed, firsts = event["lanes"], event.get("failed"), event.get("first")
        if not _are_lanes(lanes, most) or not _are_lanes(failed, most):
            yield place, f"its lanes are not different numbers from 0 to {most - 1:,}"
        elif firsts is not None and not _are_firsts(firsts, most if lanes is None else len(lanes)):
            yield place, "it does not name a trajectory and a step for each of its lanes"


def _count(value: object, otherwise: int = 0) -> int:
    return value if type(value) is int else otherwise


def _are_lanes(lanes: Any, most: int) -> bool:
    if lanes is None:
        return True
    if not isinstance(lanes, list) or not all(type(each) is int for each in lanes):
        return False
    return len({*lanes}) == len(lanes) and all(0 <= each < most for each in lanes)


def _are_firsts(firsts: Any, count: int) -> bool:
    return (
        isinstance(firsts, list)
        and len(firsts) == count
        and all(
            isinstance(each, list)
            and len(each) == 2
            and all(type(n) is int and n >= 0 for n in each)
            for each in firsts
        )
    )
