"""Checks of lanes, ids and steps: in each lane, trajectories follow one another. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import numpy as np

from tallyroll.storage.ext.verification.findings import Findings, NumberedRows, Place
from tallyroll.storage.trajectories.lane_stretches import (
    MOST_LANES,
    LaneOrder,
    extended,
    lane_order,
)

_NONE = -1
"""Row number that means: there is no earlier row in this lane."""
_VAGUE = -2
"""Row number that means: there is an earlier row, but its trajectory is unknown."""


@dataclass(frozen=True, slots=True)
class CheckedRows(NumberedRows):
    """Consecutive rows with the collector's columns, each [n]."""

    ids: np.ndarray
    steps: np.ndarray
    lane: np.ndarray
    ended: np.ndarray
    """True for rows that are terminated or truncated."""
    version: np.ndarray

    @property
    def stop(self) -> int:
        """One more than the last row's number."""
        return self.start + len(self.ids)

    def place(self, at: int, what: str, column: str | None = None) -> Place:
        """Return the place of entry ``at``."""
        ids, lane, steps = int(self.ids[at]), int(self.lane[at]), int(self.steps[at])
        return Place(self.start + at, lane, ids, steps, column, what)


@dataclass(frozen=True, slots=True)
class RowPairs:
    """Pairs of rows of one trajectory, by number: ``after[i]`` comes right after ``before[i]``."""

    before: np.ndarray
    after: np.ndarray


class _LaneRows(NamedTuple):
    """The five values of each row that the checks track along lanes.

    The rows are those of a chunk, their predecessors, or the last row of each lane.
    """

    row: np.ndarray
    """The number of the row, or `_NONE` or `_VAGUE`."""
    ids: np.ndarray
    steps: np.ndarray
    ended: np.ndarray
    version: np.ndarray


_NO_ROW = (_NONE, -1, -1, False, -1)


@dataclass(frozen=True, slots=True)
class _Series:
    """The rows of a chunk in lane order. All arrays are [n]."""

    chunk: CheckedRows
    order: LaneOrder
    vague: np.ndarray
    """True for a row that names two lanes. It is in both, and no later row is compared with it."""
    rows: _LaneRows
    before: _LaneRows
    """The predecessor of each row in its lane."""


class LaneChecks:
    """Checks that follow the lanes of one run through its rows, chunk by chunk.

    They store five numbers per lane. A row whose id belongs to another lane is reported, and
    excluded from the other checks.

    Args:
        lanes: the number of lanes of the run; None if it is unknown.
        floor: the largest id of earlier runs; -1 if there is none.
        late: True if rows before the first ones are gone, so that trajectories may begin late.
    """

    def __init__(self, lanes: int | None, *, floor: int = -1, late: bool = False) -> None:
        self._declared, self._floor, self._late = lanes, floor, late
        self.largest = floor
        """The largest id so far among the ids that a lane of the run can have."""
        self._rest: int | None = None
        self._begun: list[np.ndarray] = []
        self._lanes = lanes or 0
        self._tails = _LaneRows(*(np.empty(0, np.array(fill).dtype) for fill in _NO_ROW))

    def advance(self, chunk: CheckedRows, findings: Findings) -> RowPairs:
        """Check the rows of ``chunk`` against one another and against earlier rows.

        Returns:
            The pairs of consecutive rows of trajectories, whose later rows are in ``chunk``.
        """
        self._know_lanes(chunk)
        usable = self._check_owners(chunk, findings)
        self._check_floor(chunk, findings)
        ids = chunk.ids if usable.all() else chunk.ids[usable]
        self.largest = max(self.largest, int(ids.max(initial=-1)))
        return self._follow(self._series(chunk, usable), findings)

    def finish(self, findings: Findings) -> None:
        """If the number of lanes is unknown, check that each id begins a trajectory only once."""
        if not self._begun:
            return
        ids, counts = np.unique(np.concatenate(self._begun), return_counts=True)
        twice = ids[counts > 1]
        findings.add_rows(
            "ids", "two trajectories have the same id", twice,
            lambda i: Place(trajectory=int(twice[i]), what=f"begins {counts[counts > 1][i]} times"),
        )  # fmt: skip

    def _know_lanes(self, chunk: CheckedRows) -> None:
        if self._declared is None:
            inside = chunk.lane[(chunk.lane >= 0) & (chunk.lane < MOST_LANES)]
            self._lanes = max(self._lanes, int(inside.max(initial=-1)) + 1)
        self._tails = _LaneRows(*map(extended, self._tails, repeat(self._lanes), _NO_ROW))

    # --- single rows ------------------------------------------------------------------------------

    def _check_owners(self, chunk: CheckedRows, findings: Findings) -> np.ndarray:
        """Report rows without a valid lane and id; return a mask [n] of the valid rows."""
        lane, ids, lanes = chunk.lane, chunk.ids, self._lanes
        inside: np.ndarray = (lane >= 0) & (lane < lanes)
        chunk.report(
            findings, "lanes", "a lane that the run does not have", ~inside,
            lambda at: f"the run has {lanes} lanes, numbered from 0",
        )  # fmt: skip
        if self._declared is None:
            return inside
        rest = (ids - lane) % lanes
        if self._rest is None:
            self._rest = self._most_common(rest[inside], lanes)
        first = self._rest
        foreign: np.ndarray = inside & (rest != first)
        chunk.report(
            findings, "ids", "a trajectory id belongs to another lane", foreign,
            lambda at: f"trajectory {ids[at]} belongs to lane {(int(ids[at]) - first) % lanes}",
        )  # fmt: skip
        owned: np.ndarray = inside & ~foreign
        return owned

    def _most_common(self, rest: np.ndarray, lanes: int) -> int:
        """Return the most frequent of the remainders ``rest``.

        The ids of lane l are remainder + l + k * lanes.

        If several are equally frequent, prefer the one with which a run usually begins.
        """
        votes = np.bincount(rest, minlength=lanes).astype(np.float64)
        votes[(self._floor + 1) % lanes] += 0.5
        return int(votes.argmax())

    def _check_floor(self, chunk: CheckedRows, findings: Findings) -> None:
        floor = self._floor
        chunk.report(
            findings, "ids", "an id that is negative or was used by an earlier run",
            chunk.ids <= floor, lambda at: f"ids are above {floor} here",
        )  # fmt: skip

    # --- successive rows --------------------------------------------------------------------------

    def _series(self, chunk: CheckedRows, usable: np.ndarray) -> _Series:
        order, vague = self._in_order(chunk, usable)
        at = order.at
        rows = _LaneRows(
            np.where(vague, _VAGUE, chunk.start + at),
            chunk.ids[at],
            chunk.steps[at],
            chunk.ended[at],
            chunk.version[at],
        )
        return _Series(chunk, order, vague, rows, _LaneRows(*map(order.carry, rows, self._tails)))

    def _in_order(self, chunk: CheckedRows, usable: np.ndarray) -> tuple[LaneOrder, np.ndarray]:
        """Return the rows by lane and time, and a mask of rows whose lane or id is invalid."""
        if usable.all():
            return lane_order(chunk.lane, chunk.start), np.zeros(len(usable), np.bool_)
        good, bad = np.flatnonzero(usable), np.flatnonzero(~usable)
        by_column = bad[(chunk.lane[bad] >= 0) & (chunk.lane[bad] < self._lanes)]
        by_id = bad if self._rest is not None else bad[:0]
        owner = (chunk.ids[by_id] - (self._rest or 0)) % max(1, self._lanes)
        at = np.concatenate([good, by_column, by_id])
        lane = np.concatenate([chunk.lane[good], chunk.lane[by_column], owner])
        order = np.lexsort((at, lane))
        return LaneOrder.of(at[order], lane[order]), order >= len(good)

    def _follow(self, series: _Series, findings: Findings) -> RowPairs:
        rows, before, clear = series.rows, series.before, ~series.vague
        known = (before.row >= 0) & clear
        same: np.ndarray = known & (rows.ids == before.ids)
        series.chunk.report(
            findings, "ids", "a lane goes back to an earlier trajectory",
            known & (rows.ids < before.ids),
            lambda i: f"row {before.row[i]:,} of this lane has trajectory {before.ids[i]} already",
            series.order.at,
        )  # fmt: skip
        # A lane's first row also begins a trajectory, unless older rows may have been overwritten.
        begins = (known & ~same) | ((before.row == _NONE) & clear & (not self._late))
        goes_back = known & (rows.version < before.version)
        if self._declared is None:
            # Rows of several sources may follow one another, and those of a ring begin late.
            begins, goes_back = np.zeros_like(begins), goes_back & same
            self._begun.append(rows.ids[(before.row != _VAGUE) & ~same & clear])
        _check_steps(series, same, begins, findings)
        series.chunk.report(
            findings, "versions", "the policy's version goes back within a lane",
            # Random actions, version -1, may occur again if a lane restarted.
            goes_back & ((rows.version >= 0) | same),
            lambda i: f"version {rows.version[i]} after version {before.version[i]}",
            series.order.at,
        )  # fmt: skip
        over = same & before.ended
        _check_over(series, over, findings)
        # Observations are compared along these pairs, so the steps must be consecutive.
        linked = same & ~over & (rows.steps == before.steps + 1)
        return RowPairs(before.row[linked], rows.row[linked])


def _check_steps(series: _Series, same: np.ndarray, begins: np.ndarray, findings: Findings) -> None:
    steps = series.rows.steps
    wanted = np.where(same, series.before.steps + 1, 0)
    wrong: np.ndarray = (same | begins) & (steps != wanted)
    if wrong.any():
        # A row after a wrong one is right if it continues from the wrong step.
        excused = wrong[:-1] & same[1:] & (steps[1:] == wanted[:-1] + 1)
        excused[series.order.first[1:] - 1] = False
        wrong[1:] &= ~excused
    series.chunk.report(
        findings, "steps", "the steps of a trajectory are not 0, 1, 2 ...", wrong,
        lambda i: f"expected step {wanted[i]}",
        series.order.at,
    )  # fmt: skip


def _check_over(series: _Series, over: np.ndarray, findings: Findings) -> None:
    """Report trajectories that continue after an end, at the row that claims the end."""
    before, where = series.before, np.flatnonzero(over)
    findings.add_rows(
        "ends", "a trajectory continues after its end", before.row[where],
        lambda i: Place(
            int(before.row[where[i]]), int(series.order.lane[where[i]]), int(before.ids[where[i]]),
            int(before.steps[where[i]]), None,
            f"terminated or truncated, but continues at row {series.rows.row[where[i]]:,}",
        ),
    )  # fmt: skip
