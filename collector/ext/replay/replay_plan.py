"""Plan a replay: where trajectories begin, and why some cannot be replayed. Pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tallyroll.collector.ext.replay.calls import FIRST_ID, Call, calls_of
from tallyroll.collector.ext.replay.makers import NO_RUN, OLD, Maker
from tallyroll.storage.trajectories.episodes import END_TERMINATED, END_TRUNCATED

Table = np.ndarray[Any, Any]
"""Lines of trajectories, as in ``storage.trajectories.table``."""

_GONE = "rows of the trajectory are missing: a ring overwrote them, or a run or a copy omitted them"
_NO_SEED = "neither the trajectory nor its run has a seed"
_NOT_FIRST = "the lane's first trajectory of the run is not stored, and a replay would start there"
_DISCARDS = (
    "the trajectory differs, and it may begin in mid-episode, because the run discarded transitions"
)
_UNCOUNTED = (
    "the trajectory differs, and it may not begin where the previous one ended, because the run "
    "had workers, and a copy does not record the transitions that a run lost"
)
_RESTARTED = (
    "the trajectory differs, and it may not begin where the previous one ended, because the run "
    "lost or discarded transitions, or reset lanes"
)


@dataclass(frozen=True)
class Line:
    """Trajectories of one lane that are stepped one after the other, starting with a reset."""

    lane: int
    """Number of the lane in the run."""
    trajectories: tuple[int, ...]
    """Ids of the trajectories."""


@dataclass(frozen=True)
class Group:
    """Lines that start together: each from its own seed, or all from the run's seed."""

    maker: int
    """Index of the maker of their rows in :attr:`History.makers`."""
    seeded: bool
    """True if each line begins from the seed in its rows."""
    lines: tuple[Line, ...]
    doubt: str = ""
    """Reason why a trajectory may begin in a different state; empty without a reason."""
    first_too: bool = False
    """True if the doubt also applies to the first trajectory of each line."""


@dataclass
class ReplayPlan:
    """The lines to replay, and the reasons why other trajectories cannot be replayed."""

    groups: list[Group] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    """Reasons by the id of each trajectory that cannot be replayed."""


@dataclass(frozen=True)
class History:
    """The trajectories of a storage, and the runs that made them."""

    table: Table
    span: range
    """Rows in the storage."""
    makers: Sequence[Maker]
    """Makers of the rows, in order."""
    seeded: bool
    """True if rows have the seeds of their resets."""
    losses: Mapping[str, int]
    """Losses in the ledgers of the runs, as far as known."""

    known: dict[tuple[int, int], list[Call]] = field(default_factory=dict)
    """Cache of calls by maker and lane."""

    def calls_of(self, at: int, lane: int) -> list[Call]:
        """Return the calls of a lane in the run of a maker."""
        if (at, lane) not in self.known:
            self.known[at, lane] = calls_of(self.makers[at].entry, lane)
        return self.known[at, lane]

    def maker_of(self, line: Table) -> int:
        """Return the index of the maker of a line's first row; -1 if there is none."""
        firsts = [maker.first_row for maker in self.makers]
        return int(np.searchsorted(firsts, line["first_row"], side="right")) - 1


def plan_of(history: History, wanted: Collection[int]) -> ReplayPlan:
    """Plan the replay of the ``wanted`` trajectory ids, and find those that cannot be replayed."""
    plan = ReplayPlan()
    by_maker: dict[int, list[Table]] = defaultdict(list)
    ids = {*wanted}
    for line in history.table:
        if int(line["id"]) not in ids:
            continue
        at = history.maker_of(line)
        if why := _refused(history, line, at):
            plan.refused[int(line["id"])] = why
        else:
            by_maker[at].append(line)
    for at, found in by_maker.items():
        lines = np.array(found)
        if history.seeded:
            sure = _begin_with_reset(history, at, lines)
            for doubt, some in (("", lines[sure]), (_DISCARDS, lines[~sure])):
                lone = tuple(Line(int(each["lane"]), (int(each["id"]),)) for each in some)
                if lone:
                    plan.groups.append(Group(at, True, lone, doubt, bool(doubt)))
        else:
            _chain(history, plan, at, lines)
    return plan


def _refused(history: History, line: Table, at: int) -> str:
    """Return why a trajectory cannot be replayed, judged by its own line; "" if it can."""
    if at < 0:
        return NO_RUN
    maker = history.makers[at]
    if maker.refused:
        return maker.refused
    if line["first_row"] < history.span.start or line["first_step"] != 0:
        return _GONE
    for call in history.calls_of(at, int(line["lane"])):
        if call.unknown and call.changes(line):
            return call.unknown
    if history.seeded:
        return ""
    if maker.own_seeds_only:
        return maker.own_seeds_only
    if not all(_is_number(maker.entry.get(name)) for name in ("seed", "incarnation")):
        return _NO_SEED
    return OLD if maker.first_row < history.span.start else ""


def _chain(history: History, plan: ReplayPlan, at: int, wanted: Table) -> None:
    """Add lines from the start or resumption of the run up to the last wanted trajectory."""
    lines = lines_of_maker(history, at)
    lanes = int(history.makers[at].entry.get("lanes", 0))
    first = _first_id(history, at)
    if first is None:
        first = min((int(line["id"]) - int(line["lane"]) for line in lines), default=0)
    by_lane: dict[int, list[Table]] = defaultdict(list)
    for line in lines:
        by_lane[int(line["lane"])].append(line)
    made: list[Line] = []
    for lane in sorted({int(line["lane"]) for line in wanted}):
        asked = {int(line["id"]) for line in wanted if line["lane"] == lane}
        stepped, why = _unbroken(by_lane[lane], first + lane, lanes)
        plan.refused.update((id, why) for id in asked - {*stepped})
        last = max((number for number, id in enumerate(stepped) if id in asked), default=-1)
        if last >= 0:
            made.append(Line(lane, tuple(stepped[: last + 1])))
    if made:
        doubt = _doubt(history, at)
        first_too = bool(doubt) and not _skips_ids(history.makers[at])
        plan.groups.append(Group(at, False, tuple(made), doubt, first_too))


def lines_of_maker(history: History, at: int) -> Table:
    """Return the lines of trajectories that began in a maker's rows."""
    first, table = history.makers[at].first_row, history.table
    stop = history.span.stop
    if at + 1 < len(history.makers):
        stop = history.makers[at + 1].first_row
    found: Table = table[(table["first_row"] >= first) & (table["first_row"] < stop)]
    return found


def calls_around(history: History, at: int, lone: Line) -> tuple[list[Call], list[Call]]:
    """Return the calls before and after the reset that began a trajectory."""
    calls, (id,) = history.calls_of(at, lone.lane), lone.trajectories
    if not calls:
        return [], []
    lines = lines_of_maker(history, at)
    line = lines[lines["id"] == id][0]
    own = lines[(lines["lane"] == line["lane"]) & (lines["id"] < id)]
    entry, previous = history.makers[at].entry, own[-1] if len(own) else None
    ended = previous is not None and previous["end"] in (END_TERMINATED, END_TRUNCATED)
    ended = ended and not _call(entry).get("reset_at_each_iter")
    before = [each for each in calls if each.is_before_reset(line, previous, ended=bool(ended))]
    return before, [each for each in calls if each not in before and each.changes(line)]


def _unbroken(lines: Sequence[Table], first: int, lanes: int) -> tuple[list[int], str]:
    """Return the ids of a lane from ``first`` to the first gap, and the reason for the gap."""
    found: list[int] = []
    whole, before = True, -1
    for line in lines:
        id = int(line["id"])
        if line["first_step"] != 0:
            return found, _GONE
        if not found and id != first:
            return found, _NOT_FIRST
        if found and not (whole and id == before + lanes):
            return found, (
                f"the stored rows of the lane have a gap during or after trajectory {before}, "
                "because the run lost or discarded transitions, or reset the lane"
            )
        found.append(id)
        whole, before = line["end"] in (END_TERMINATED, END_TRUNCATED), id
    return found, ""


def _doubt(history: History, at: int) -> str:
    maker = history.makers[at]
    call = _call(maker.entry)
    if not maker.counted and "num_workers" in call:
        return _UNCOUNTED
    lost = history.losses.get("lost", 0) or history.losses.get("respawned", 0)
    breaks = call.get("surplus") == "discard" or call.get("reset_at_each_iter")
    return _RESTARTED if lost or (breaks and not _skips_ids(maker)) else ""


def _skips_ids(maker: Maker) -> bool:
    """Return True if a lane skips an id whenever it does not continue from its last trajectory."""
    return FIRST_ID in maker.entry


def _first_id(history: History, at: int) -> int | None:
    """Return the first id of a maker's trajectories; None if it is unknown, as in a copy."""
    maker = history.makers[at]
    first = maker.entry.get(FIRST_ID)
    return first if maker.counted and _is_number(first) else None


def _begin_with_reset(history: History, at: int, lines: Table) -> np.ndarray[Any, Any]:
    """Return a mask ``[n]`` of the lines that are known to begin with a reset."""
    maker = history.makers[at]
    if _call(maker.entry).get("surplus") != "discard":
        return np.ones(len(lines), np.bool_)
    first = _first_id(history, at)
    if first is None:
        return np.zeros(len(lines), np.bool_)
    own, lanes = lines_of_maker(history, at), int(maker.entry.get("lanes", 0))
    whole = own["id"][np.isin(own["end"], (END_TERMINATED, END_TRUNCATED))]
    found: np.ndarray[Any, Any] = np.isin(lines["id"] - lanes, whole)
    found |= lines["id"] == first + lines["lane"]
    return found


def _call(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    call = entry.get("call")
    return call if isinstance(call, dict) else {}


def _is_number(value: object) -> bool:
    return type(value) is int and value >= 0
