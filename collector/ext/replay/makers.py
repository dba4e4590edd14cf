"""The runs that made a storage's rows, those of copied and of packed rows too. Pure."""

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

NO_RUN = "no collector's run made its rows, so that nothing says how it began"
_NOT_SAID = (
    "its rows were copied, and the copy does not say which runs made them: replay the storage that "
    "they came from"
)
_SEVERAL = (
    "its rows were copied from among those of several runs that were made differently, and which "
    "of them made it is not stored: replay the storage that they came from"
)
_PART = (
    "its rows have no seed of their own, and are copied or packed without all rows of their run, "
    "from whose seed it would be stepped again: replay the storage that they came from"
)
OLD = "its lane has no rows left from the run's beginning, from which it would be stepped again"
_REPLAYED = (
    *("max_frames_per_traj", "info_keys", "rename", "frame_skip", "finals", "reset_slots"),
    *("surplus", "resets", "reward_dtype"),
)
"""The arguments of a run that change what its environments do, or what a replay says of them."""


@dataclass(frozen=True)
class Maker:
    """The run that made rows, from one on until the next maker's first."""

    first_row: int
    entry: Entry
    refused: str = ""
    """The reason that no trajectory can be replayed; empty: they may."""
    own_seeds_only: str = ""
    """The reason that those without own seeds cannot be; empty: they may begin with the run."""
    counted: bool = True
    """True if what the run lost is known, where it says so; a copy does not keep that."""


def makers_of(runs: Sequence[Entry], stop: int) -> list[Maker]:
    """Return what made the rows below ``stop``, by the entries of a manifest, in their order."""
    return [each for entry, end in _ended(runs, stop) for each in _made(entry, end)]


def _ended(runs: Sequence[Entry], stop: int) -> Iterator[tuple[Entry, int]]:
    """Yield entries, each with the row after its last one."""
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
    elif _has_call(entry):  # packed from chosen rows, or those of several storages
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
    """Yield the makers of a stretch of the other storage's rows, all of them.

    Each run's rows are together here too, if one trajectory comes after the other: that is in the
    order of their first rows, and none of them goes on in another run.
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
                # Where its environments were called is not known: rows and ids may have moved.
                entry={**without_events(each.entry), "first_row": row},
                own_seeds_only=seeds_only,
                counted=False,
            )


def _part(entry: Entry, first: int, runs: Sequence[Entry]) -> Maker:
    """Return the maker of some of a storage's rows, of which none says from which run it is."""
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
    """Return the runs of a copy; none where these are no runs, in files that were damaged."""
    runs = copied_runs(entry)
    firsts = [run["first_row"] for run in runs if type(run.get("first_row")) is int]
    whole = len(firsts) == len(runs) and min(firsts, default=0) >= 0
    return runs if whole and firsts == sorted(firsts) else []


def _leaves(runs: Sequence[Entry]) -> Iterator[Entry]:
    """Yield the entries of runs, and of a copy those of the runs that made it."""
    for run in runs:
        if is_copied(run):
            inner = _runs_of(run)
            yield from _leaves(inner) if inner and not runs_left_out(run) else [run]
        else:
            yield run


def _has_call(entry: Entry) -> bool:
    return isinstance(entry.get("call"), dict) and isinstance(entry.get("environment"), dict)


def _decisive(entry: Entry) -> list[Any]:
    """Return what of a run decides how a trajectory of it is replayed from its own seed."""
    call = entry["call"]
    calls = CALLS_LEFT_OUT in without_events(entry)
    return [entry["environment"], calls, *(call.get(name) for name in _REPLAYED)]
