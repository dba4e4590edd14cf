"""Find the runs that made a storage's rows, including copied and packed rows. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tallyroll.storage.files.copied_runs import (
    LEFT_OUT,
    copied_runs,
    is_collected,
    is_copied,
    rows_copied,
    runs_left_out,
)
from tallyroll.storage.files.run_events import LEFT_OUT as CALLS_LEFT_OUT
from tallyroll.storage.files.run_events import without_events

Entry = Mapping[str, Any]

NO_RUN = "no run of a collector made the rows, so the start of the trajectory is unknown"
_NOT_SAID = (
    "the rows were copied, and the copy does not record which runs made them. Replay the original "
    "storage"
)
_SEVERAL = (
    "the rows were copied from several runs with different settings, and the copy does not record "
    "which run made them. Replay the original storage"
)
_PART = (
    "the rows have no reset seeds, so a replay would start at the beginning of the run, but the "
    "copied or packed storage does not contain all rows of the run. Replay the original storage"
)
OLD = "the lane has no rows left from the beginning of the run, where a replay would start"
_REPLAYED = (
    *("max_frames_per_traj", "info_keys", "rename", "frame_skip", "finals", "reset_slots"),
    *("surplus", "resets", "reward_dtype"),
)
"""Arguments of a run that change what its environments do, or what a replay reports about them."""


@dataclass(frozen=True)
class Maker:
    """The run that made the rows from ``first_row`` up to the next maker's first row."""

    first_row: int
    entry: Entry
    refused: str = ""
    """Reason why no trajectory can be replayed; empty if they can."""
    own_seeds_only: str = ""
    """Reason why trajectories without their own seeds cannot be replayed; empty if they can."""
    counted: bool = True
    """True if the losses that the run recorded are known. A copy does not keep them."""


def makers_of(runs: Sequence[Entry], stop: int) -> list[Maker]:
    """Return the makers of the rows below ``stop``, in order, from the entries of a manifest."""
    return [each for entry, end in _ended(runs, stop) for each in _made(entry, end)]


def _ended(runs: Sequence[Entry], stop: int) -> Iterator[tuple[Entry, int]]:
    """Yield each entry with the end of its rows."""
    stops = [*(run["first_row"] for run in runs), stop][1:]
    return zip(runs, stops, strict=True)


def _made(entry: Entry, stop: int) -> Iterator[Maker]:
    first = entry["first_row"]
    if LEFT_OUT in entry:
        yield Maker(first, entry, refused=_NOT_SAID)
    elif is_copied(entry):
        yield from _copied(entry, first, stop)
    elif is_collected(entry):
        yield Maker(first, entry)
    elif _has_call(entry):  # packed from selected rows, or from several storages
        yield Maker(first, without_events(entry), own_seeds_only=_PART, counted=False)
    else:
        yield Maker(first, entry, refused=NO_RUN)


def _copied(entry: Entry, first: int, stop: int) -> Iterator[Maker]:
    said, runs = rows_copied(entry), _runs_of(entry)
    assert said is not None
    _, least, last = said
    if last is not None and stop - first == last + 1 - least:
        yield from _whole(entry, first, range(least, last + 1), runs)
    else:
        yield _part(entry, first, runs)


def _whole(entry: Entry, first: int, there: range, runs: Sequence[Entry]) -> Iterator[Maker]:
    """Yield the makers of a complete range of rows of the storage that was copied.

    The copy keeps the rows of each run together even if it orders rows by trajectory. Trajectories
    follow in the order of their first rows, and no trajectory continues in another run.
    """
    if not runs or runs[0]["first_row"] > there.start:
        yield Maker(first, entry, refused=_NOT_SAID)
    for run, stop in _ended(runs, there.stop):
        begin = max(run["first_row"], there.start)
        for each in _made({**run, "first_row": begin}, stop):
            seeds_only = OLD if run["first_row"] < begin else each.own_seeds_only
            row = each.first_row - there.start + first
            yield replace(
                each,
                first_row=row,
                # The positions of calls are unknown, because rows and ids may have moved.
                entry={**without_events(each.entry), "first_row": row},
                own_seeds_only=seeds_only,
                counted=False,
            )


def _part(entry: Entry, first: int, runs: Sequence[Entry]) -> Maker:
    """Return the maker of rows selected from a storage. Such rows do not name their run."""
    made = [*_leaves(runs)]
    if not made or runs_left_out(entry):
        return Maker(first, entry, refused=_NOT_SAID)
    if not all(map(_has_call, made)):
        return Maker(first, entry, refused=NO_RUN if len(made) == 1 else _SEVERAL)
    if any(_decisive(each) != _decisive(made[0]) for each in made):
        return Maker(first, entry, refused=_SEVERAL)
    newest = {**without_events(made[-1]), "first_row": first}
    return Maker(first, newest, own_seeds_only=_PART, counted=False)


def _runs_of(entry: Entry) -> list[Entry]:
    """Return the runs of a copy; an empty list if a damaged file has invalid ones."""
    runs = copied_runs(entry)
    firsts = [run["first_row"] for run in runs if type(run.get("first_row")) is int]
    whole = len(firsts) == len(runs) and min(firsts, default=0) >= 0
    return runs if whole and firsts == sorted(firsts) else []


def _leaves(runs: Sequence[Entry]) -> Iterator[Entry]:
    """Yield the entry of each run; for a copy, yield the entries of the runs that made its rows."""
    for run in runs:
        if is_copied(run):
            inner = _runs_of(run)
            yield from _leaves(inner) if inner and not runs_left_out(run) else [run]
        else:
            yield run


def _has_call(entry: Entry) -> bool:
    return isinstance(entry.get("call"), dict) and isinstance(entry.get("environment"), dict)


def _decisive(entry: Entry) -> list[Any]:
    """Return the values of a run that determine how a trajectory replays from its own seed."""
    call = entry["call"]
    calls = CALLS_LEFT_OUT in without_events(entry)
    return [entry["environment"], calls, *(call.get(name) for name in _REPLAYED)]
