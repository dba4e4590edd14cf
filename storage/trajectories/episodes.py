"""The episode table: one line per trajectory, computed from the rows. Pure.

Fields of a line:

================= ==============================================================================
``id``, ``lane``  the id and lane of the trajectory
``first_row``     number of the first row that was counted; ``first_step`` is the step of that
                  row, 0 unless earlier rows were never stored, or were overwritten before
                  they were counted
``last_row``      number of the last row
``length``        number of rows counted
``return``        sum of the rewards; a vector if rows have several rewards; NaN without rewards
``end``           the end: 0 open, 1 terminated (possibly truncated as well), 2 truncated, 3 cut
``version_first`` and ``version_last``: the policy version at these rows; -1 if unknown
``reset_seed``    the seed of the reset that began the trajectory, from its first row or from the
                  seeds of the run's first resets; -1 if unknown
================= ==============================================================================

Lines are ordered by first row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tallyroll.storage.rows.dtypes import in_float64
from tallyroll.storage.trajectories.lane_stretches import (
    MOST_LANES,
    NOBODY,
    LaneOrder,
    RowChunk,
    extended,
    grown,
    lane_order,
)

END_OPEN, END_TERMINATED, END_TRUNCATED, END_CUT = range(4)
END_NAMES: Final = ("open", "terminated", "truncated", "cut")
"""The names of the codes of ``end``, in order."""

_FIRST_ROOM = 64


def table_dtype(reward_shape: tuple[int, ...] = ()) -> np.dtype[Any]:
    """Return the dtype of a table. Returns are vectors if rows have several rewards."""
    shape = () if all(size == 1 for size in reward_shape) else reward_shape
    return np.dtype(
        [
            ("id", "<i8"),
            ("lane", "<i4"),
            ("first_row", "<i8"),
            ("first_step", "<i8"),
            ("last_row", "<i8"),
            ("length", "<i8"),
            ("return", "<f8", shape),
            ("end", "i1"),
            ("version_first", "<i8"),
            ("version_last", "<i8"),
            ("reset_seed", "<i8"),
        ]
    )


@dataclass(frozen=True, slots=True)
class EpisodeRows(RowChunk):
    """Rows to be counted; each array is [n]."""

    terminated: np.ndarray
    truncated: np.ndarray
    reward: np.ndarray
    """Shape [n, *shape of a return]."""
    version: np.ndarray
    reset_seed: np.ndarray
    """The seed of the reset at each row, or -1."""


@dataclass(frozen=True, slots=True)
class RunSeeds:
    """The lane seeds of a run, which wrote the rows from its first row to the next run's."""

    first_row: int
    lane_seeds: np.ndarray
    """The seeds of each lane's first reset, [lanes], or empty."""


def runs_of(entries: Sequence[Mapping[str, Any]]) -> list[RunSeeds]:
    """Return the runs in a manifest. Seeds that are not 64-bit integers are left out."""
    return [RunSeeds(entry["first_row"], _seeds_of(entry.get("lane_seeds"))) for entry in entries]


def _seeds_of(seeds: Any) -> np.ndarray:
    if not isinstance(seeds, list) or not all(
        type(seed) is int and 0 <= seed < 2**63 for seed in seeds
    ):
        return np.empty(0, np.int64)
    return np.array(seeds, np.int64)


class Episodes:
    """Episode table that is extended as rows arrive.

    Args:
        ring: the number of slots of the ring, or 0 if every row is kept. In a ring, the lines of
            trajectories without rows are dropped.
        reward_shape: the shape of one row's reward.
    """

    def __init__(self, ring: int = 0, reward_shape: tuple[int, ...] = ()) -> None:
        self._ring = ring
        self._lines = np.zeros(_FIRST_ROOM, table_dtype(reward_shape))
        self._count = 0
        # The last trajectory of each lane: its line (-1 if there is none) and its id.
        self._tail, self._tail_id = np.empty(0, np.int64), np.empty(0, np.int64)
        self._tail_step = np.empty(0, np.int64)  # the step of its last row
        self._since = self.seen = 0
        """The number of rows that have been counted."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of a line."""
        dtype: np.dtype[Any] = self._lines.dtype
        return dtype

    def last_row(self, id: int) -> int | None:
        """Return the last row of a trajectory, or None if the table has no line for it."""
        found = np.flatnonzero(self._lines["id"][: self._count] == id)
        return int(self._lines["last_row"][found[-1]]) if len(found) else None

    def last_id(self, lane: int) -> int:
        """Return the last trajectory of a lane, or `NOBODY` if the lane has none."""
        return self._tail_id.item(lane) if lane < len(self._tail_id) else NOBODY

    def resume(self, lines: np.ndarray) -> None:
        """Continue from the lines of a table that `what_is_wrong` accepts."""
        self._restart_from(0)
        self._lines = lines.copy() if len(lines) else self._lines
        self._count = len(lines)
        self._know_lanes(int(lines["lane"].max(initial=-1)) + 1)
        self._tail[lines["lane"]] = np.arange(len(lines))  # the last one stays
        self._tail_id[lines["lane"]] = lines["id"]
        self._tail_step[lines["lane"]] = lines["first_step"] + lines["length"] - 1
        self.seen = int(lines["last_row"].max(initial=-1)) + 1
        self._since = self.seen if self._ring else 0

    def extend(self, rows: EpisodeRows, runs: Sequence[RunSeeds] = ()) -> None:
        """Count rows that follow those already counted.

        If there is a gap, because rows were overwritten, counting restarts with ``rows``.

        Args:
            rows: the rows; for a ring, at most as many as the ring has slots.
            runs: all runs so far, by their first rows.

        Raises:
            CorruptStorage: a lane number is out of range.
        """
        if rows.start > self.seen:
            self._restart_from(rows.start)
        if len(rows.ids):
            self._count_in(rows, lane_order(rows.lane, rows.start), runs)
        self.seen = rows.stop

    def _restart_from(self, since: int) -> None:
        self._count, self._since = 0, since
        self._tail[:], self._tail_id[:] = -1, NOBODY

    def _count_in(self, rows: EpisodeRows, order: LaneOrder, runs: Sequence[RunSeeds]) -> None:
        """Count each trajectory's rows as one stretch, which starts a new line or extends one."""
        at = order.at
        self._know_lanes(int(order.lane[-1]) + 1)
        ids = rows.ids[at]
        begins = order.carry(ids, self._tail_id) != ids
        if self._ring:
            # An id may be used again once its rows have been overwritten.
            steps = rows.steps[at]
            begins |= order.carry(steps, self._tail_step) >= steps
        stretches = order.stretches(begins)
        # From here on arrays have one entry per stretch. A stretch that begins a trajectory gets a
        # new line, in the order of first rows; any other extends the last line of its lane.
        start, last = stretches.at, at[stretches.until]
        fresh = begins[start]
        new = self._new_lines(rows, at[start[fresh]])
        line = self._tail.take(stretches.lane)
        line[fresh] = new
        before = stretches.carry(line, self._tail)

        # Every line occurs at most once, so that sums can be added by index.
        lines = self._lines
        lines["length"][line] += stretches.length
        reward = in_float64(rows.reward[at])
        with np.errstate(invalid="ignore", over="ignore"):  # infinite rewards of both signs
            lines["return"][line] += np.add.reduceat(reward, start, axis=0)
        lines["last_row"][line] = last + rows.start
        lines["version_last"][line] = rows.version[last]
        lines["end"][line] = np.where(
            rows.terminated[last],
            END_TERMINATED,
            np.where(rows.truncated[last], END_TRUNCATED, END_OPEN),
        )
        # An open line is cut if the next trajectory of its lane has begun.
        superseded = before[fresh]
        superseded = superseded[superseded >= 0]
        lines["end"][superseded[lines["end"][superseded] == END_OPEN]] = END_CUT
        self._seed(line[fresh], before[fresh], runs)

    def _new_lines(self, rows: EpisodeRows, at: np.ndarray) -> np.ndarray:
        """Add lines for trajectories that begin at index ``at``; return the lines' numbers."""
        self._make_room(len(at), rows.stop)
        number = np.empty(len(at), np.int64)
        number[np.argsort(at)] = np.arange(self._count, self._count + len(at))
        lines = self._lines
        lines["id"][number], lines["lane"][number] = rows.ids[at], rows.lane[at]
        lines["first_row"][number] = at + rows.start
        lines["first_step"][number] = rows.steps[at]
        lines["version_first"][number] = rows.version[at]
        lines["reset_seed"][number] = rows.reset_seed[at]
        lines["length"][number] = 0
        lines["return"][number] = 0
        self._count += len(at)
        return number

    def _make_room(self, more: int, stop: int) -> None:
        if self._count + more > len(self._lines):
            if self._ring:
                self._forget(stop - self._ring)
            # Half of the table is then free, so that lines are moved once or twice on average.
            self._lines = grown(self._lines, 2 * self._count + more)

    def _forget(self, first: int) -> None:
        """Drop lines of trajectories that have no row from ``first`` on and cannot continue."""
        current = self._tail >= 0
        keep = self._lines["last_row"][: self._count] >= first
        keep[self._tail[current]] = True
        kept = self._lines[: self._count][keep]
        self._tail[current] = (np.cumsum(keep) - 1)[self._tail[current]]
        self._lines[: len(kept)], self._count = kept, len(kept)

    def _know_lanes(self, lanes: int) -> None:
        self._tail = extended(self._tail, lanes, -1)
        self._tail_id = extended(self._tail_id, lanes, NOBODY)
        self._tail_step = extended(self._tail_step, lanes, -1)

    def _seed(self, line: np.ndarray, before: np.ndarray, runs: Sequence[RunSeeds]) -> None:
        """Assign lane seeds to the first trajectory of each lane in a run, if rows have no seeds.

        Args:
            line: the numbers of new lines, [n].
            before: the preceding line in the lane of each new line, or -1, [n].
            runs: all runs so far.
        """
        if not len(line) or not any(len(run.lane_seeds) for run in runs):
            return
        lines = self._lines
        first_row, lane = lines["first_row"][line], lines["lane"][line]
        rows_before = np.where(before < 0, -1, lines["first_row"][before])
        run = np.searchsorted([run.first_row for run in runs], first_row, side="right") - 1
        for number in np.unique(run[run >= 0]).tolist():
            begun, seeds = runs[number].first_row, runs[number].lane_seeds
            if begun < self._since:
                continue  # the first trajectories of the run were not counted
            mine = (run == number) & (rows_before < begun) & (lane < len(seeds))
            mine &= (lines["first_step"][line] == 0) & (lines["reset_seed"][line] < 0)
            lines["reset_seed"][line[mine]] = seeds[lane[mine]]

    def table(self, first: int = 0, active_from: int | None = None) -> np.ndarray:
        """Return a copy of the lines of all trajectories that have rows from ``first`` on.

        Args:
            first: the lowest valid row.
            active_from: the first row of the run that is being written; None: no process writes.
                Trajectories that have not ended and have rows from there on may still continue.
        """
        table = self._lines[: self._count].copy()
        current = self._tail[self._tail >= 0]
        current = current[np.isin(table["end"][current], (END_OPEN, END_CUT))]
        goes_on = active_from is not None and table["last_row"][current] >= active_from
        table["end"][current] = np.where(goes_on, END_OPEN, END_CUT)
        return table[table["last_row"] >= first] if first else table


def what_is_wrong(table: np.ndarray, head: int) -> str | None:
    """Return the reason why a table cannot describe ``head`` rows, or None."""
    first, last, length = table["first_row"], table["last_row"], table["length"]
    checks = {
        "lines are not in the order of first rows": np.diff(first) <= 0,
        "a trajectory begins before the first row": first < 0,
        "a trajectory ends before it begins": last < first,
        "a length does not match the rows": (length < 1) | (length > last - first + 1),
        "a lane has an invalid number": (table["lane"] < 0) | (table["lane"] >= MOST_LANES),
        "an end has an unknown value": (table["end"] < END_OPEN) | (table["end"] > END_CUT),
        f"it has rows beyond the {head} that are stored": last >= head,
    }
    return next((what for what, wrong in checks.items() if wrong.any()), None)
