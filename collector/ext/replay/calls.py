"""The calls that changed a run's environments, by lane. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tallyroll.storage.files.run_events import EVENTS, LEFT_OUT, events_of

Array = np.ndarray[Any, Any]
Table = np.ndarray[Any, Any]

FIRST_ID = "first_id"

_UNKNOWN = "the run called the environment during the trajectory, and {} cannot be repeated: {}"
_ALL_LEFT_OUT = "the storage does not contain all calls of the environment that the run made"


@dataclass(frozen=True)
class Call:
    """A call of one lane's environment, and its position among the rows."""

    way: str
    """``"env_call"`` or ``"env_set"``."""
    name: str
    args: tuple[Any, ...]
    """The arguments, or the one value to set."""
    kwargs: Mapping[str, Any]
    row: int
    """Number of the first row after the call. It applies if ``first`` is None."""
    first: tuple[int, int] | None
    """The first trajectory and step of the lane after the call."""
    unknown: str = ""
    """Reason why the call cannot be repeated; empty if it can."""

    @property
    def content(self) -> str:
        """A text that is equal for calls with the same effect."""
        return json.dumps([self.way, self.name, self.args, self.kwargs], sort_keys=True)

    def position(self, rows: Array, ids: Array, steps: Array) -> int:
        """Return how many of a lane's rows, ``[n]`` in order, come before the call."""
        if self.first is None:
            return int(np.count_nonzero(rows < self.row))
        id, step = self.first
        return int(np.count_nonzero((ids < id) | ((ids == id) & (steps < step))))

    def changes(self, line: Table) -> bool:
        """Return True if a trajectory, given by its line of the table, has rows after the call."""
        if self.first is None:
            return bool(self.row <= line["last_row"])
        id, step = self.first
        return bool(id < line["id"] or (id == line["id"] and step < line["length"]))

    def is_before_reset(self, line: Table, previous: Table | None, *, ended: bool) -> bool:
        """Return True if the call came before the reset that began a trajectory.

        Args:
            line: line of the trajectory.
            previous: line of the lane's previous trajectory; None if the trajectory is the first of
                the run.
            ended: True if the previous trajectory terminated or was truncated, so that the lane was
                reset in that step.
        """
        late = previous is not None and not ended
        if self.first is not None:
            id = int(line["id"])
            return self.first[0] < id or (late and self.first == (id, 0))
        if previous is None:
            return False
        return bool(self.row <= previous["last_row"] or (late and self.row <= line["first_row"]))


def calls_of(entry: Mapping[str, Any], lane: int) -> list[Call]:
    """Return the calls of a lane, in order, from the entry of its run."""
    return [*_each(entry, lane)]


def with_ids_moved(entry: Mapping[str, Any], by: int) -> dict[str, Any]:
    """Return the entry of a run with all trajectory ids increased by ``by``."""
    events, first = entry.get(EVENTS), entry.get(FIRST_ID)
    if by and type(first) is int:
        entry = {**entry, FIRST_ID: first + by}
    if not by or not isinstance(events, list):
        return dict(entry)
    return {**entry, EVENTS: [_with_ids_moved(each, by) for each in events_of(entry)]}


def _with_ids_moved(event: Mapping[str, Any], by: int) -> dict[str, Any]:
    first = event.get("first")
    if not isinstance(first, list):
        return dict(event)
    moved = [[each[0] + by, each[1]] if _is_pair(each) else each for each in first]
    return {**event, "first": moved}


def _each(entry: Mapping[str, Any], lane: int) -> Iterator[Call]:
    row = 0
    for event in events_of(entry):
        lanes, row = event["lanes"], event["row"]
        failed = event.get("failed")
        if isinstance(failed, list) and lane in failed:
            yield _unknown(event, "the call raised in the run")
        elif lanes is None or lane in lanes:
            yield _call(event, lane if lanes is None else lanes.index(lane))
    if entry.get(LEFT_OUT):
        yield Call("env_call", "", (), {}, row, None, _ALL_LEFT_OUT)


def _unknown(event: Mapping[str, Any], why: str) -> Call:
    reason = _UNKNOWN.format(f"{event['call']}({event['name']!r})", why)
    return Call(event["call"], event["name"], (), {}, event["row"], None, reason)


def _call(event: Mapping[str, Any], place: int) -> Call:
    args, name = event["args"], event["name"]
    if args is None:
        return _unknown(event, "the arguments were too many, or not JSON values")
    if not name.isidentifier() or name.startswith("_"):
        return _unknown(event, "a replay calls only public names")
    if event["call"] == "env_set":
        if len(args) != 1 or (isinstance(args[0], list) and place >= len(args[0])):
            return _unknown(event, "the call has no value for the lane")
        args = [args[0][place] if isinstance(args[0], list) else args[0]]
    first = event.get("first")
    found: tuple[int, int] | None = None
    if isinstance(first, list):
        if place >= len(first) or not _is_pair(first[place]):
            return _unknown(event, "the stored call is damaged")
        found = (first[place][0], first[place][1])
    return Call(event["call"], name, tuple(args), event["kwargs"], event["row"], found)


def _is_pair(value: object) -> bool:
    return isinstance(value, Sequence) and len(value) == 2 and all(type(n) is int for n in value)
