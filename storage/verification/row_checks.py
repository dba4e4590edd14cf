"""One pass over the rows of a storage, in the order in which they were written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tallyroll.storage.engine.ring import slots_of
from tallyroll.storage.rows.keys import (
    CUT,
    DONE,
    LANE,
    NEXT,
    NEXT_VALID,
    POLICY_VERSION,
    REWARD,
    STEP,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    Key,
    spell,
)
from tallyroll.storage.trajectories.columns import RowOrder
from tallyroll.storage.trajectories.episodes import runs_of
from tallyroll.storage.verification.episode_checks import EpisodeChecks
from tallyroll.storage.verification.findings import Findings, Place
from tallyroll.storage.verification.lane_checks import CheckedRows, LaneChecks
from tallyroll.storage.verification.observation_checks import ObservationChecks, observations_of
from tallyroll.storage.verification.record_checks import RunEntry
from tallyroll.storage.verification.self_reset_checks import ResetChecks
from tallyroll.storage.verification.value_checks import (
    UnwrittenRows,
    check_finite,
    holds_numbers,
    words,
)

if TYPE_CHECKING:
    from tallyroll.storage.storages import DiskStorage

__all__ = ["RowChecks"]

_PlaceOf: TypeAlias = Callable[[int, str, str | None], Place]

_NUMBERS = (TRAJ_IDS, STEP, LANE)
_CHUNK_ROWS = 2**18
_CHUNK_NBYTES = 2**27
_BY_TRAJECTORY = ("lanes", "ids", "steps", "versions", "observations", "finals")


class RowChecks:
    """Checks the valid rows of a storage, as they are when it is made.

    Args:
        storage: the storage.
        runs: the runs that wrote its rows, by their first rows.
        nan: look for NaN, too.
        table: the table of episodes that the rows are to be compared with.
    """

    def __init__(
        self,
        storage: DiskStorage,
        runs: Sequence[RunEntry],
        *,
        nan: bool = True,
        table: np.ndarray | None = None,
    ) -> None:
        self._storage, self.span = storage, storage.span
        self._runs = runs
        self._columns = {column.key: column for column in storage.schema.columns}
        self._arrays = {key: storage.column(key) for key in self._columns}
        self.unavailable: dict[str, str] = {}
        """Checks that the storage does not allow, and why."""
        self.overtaken = False
        """Another process overwrote rows before they were read."""
        self.ended: dict[int, int] = {}
        """How many episodes ended in a run, by the run's first row."""
        self.largest_id = -1
        self._both_known = self._look_at_flags()
        self._followed = self._look_at_collector()
        self._observations = ObservationChecks(self._columns, self._arrays, storage.ring)
        self._resets = ResetChecks(self._columns, self._arrays, storage.ring)
        self._observed = {(*prefix, *key) for key in observations_of(self._columns)
                          for prefix in ((), (NEXT,))}  # fmt: skip
        self._finite = [c for c in self._columns.values() if nan and holds_numbers(c)]
        arrays = {} if self._followed else self._arrays
        self._unwritten = UnwrittenRows({key: words(array) for key, array in arrays.items()})
        self._order = RowOrder(storage.schema)
        self._episodes = None if table is None else self._episode_checks(table)

    def _episode_checks(self, table: np.ndarray) -> EpisodeChecks | None:
        if not self._followed or not self._both_known or REWARD not in self._columns:
            self.unavailable["episodes"] = "not all columns are there that the table is made of"
            return None
        return EpisodeChecks(
            table,
            runs_of(self._storage.manifest["runs"]),
            ring=self._storage.ring,
            first=self.span.start,
            reward_shape=self._columns[REWARD].shape,
        )

    # --- what the columns allow -------------------------------------------------------------------

    def _is_scalar(self, key: Key, kinds: str = "iu") -> bool:
        column = self._columns.get(key)
        return (
            column is not None and column.shape in ((), (1,)) and column.numpy_dtype.kind in kinds
        )

    def _look_at_flags(self) -> bool:
        known = self._is_scalar(TERMINATED, "b") and self._is_scalar(TRUNCATED, "b")
        if not known or not self._is_scalar(DONE, "b"):
            self.unavailable["ends"] = "not all of next/done, terminated and truncated are there"
        return known

    def _look_at_collector(self) -> bool:
        lacking = [key for key in _NUMBERS if not self._is_scalar(key)]
        if not self._both_known and not self._is_scalar(DONE, "b"):
            lacking.append(DONE)
        if lacking:
            why = f"there is no column {spell(lacking[0])} of a collector"
            self.unavailable |= dict.fromkeys(_BY_TRAJECTORY, why)
            return False
        if not self._is_scalar(POLICY_VERSION):
            self.unavailable["versions"] = f"there is no column {spell(POLICY_VERSION)}"
        if not observations_of(self._columns):
            why = "no column is alike at the root and under next"
            self.unavailable |= {"observations": why, "finals": why}
        return True

    # --- the pass ---------------------------------------------------------------------------------

    def run(self, findings: Findings, tell: Callable[[int], None]) -> None:
        """Check all rows; ``tell`` is told of the bytes that were read."""
        for run, rows in self._parts():
            late = run.first_row < rows.start
            lanes = LaneChecks(run.lanes, floor=self.largest_id, late=late)
            for start, stop in self._chunks(rows):
                found = Findings()
                oldest = self._check(run, start, stop, lanes, found)
                if self._storage.span.start > oldest:
                    self.overtaken = True
                    lanes = LaneChecks(run.lanes, floor=self.largest_id, late=True)
                else:
                    findings.merge(found)
                tell((stop - start) * self._storage.schema.row_nbytes)
            lanes.finish(findings)
            self.largest_id = max(self.largest_id, lanes.largest)
        self._unwritten.finish(self.span.stop, findings)
        if self.overtaken:
            why = "another process writes to this ring; wait for it"
            self.unavailable |= dict.fromkeys(("zeros", "finals", "episodes"), why)
            return
        self._observations.finish(findings)
        self._resets.finish(findings)
        if self._episodes is not None:
            self._episodes.finish(findings)

    def _parts(self) -> Iterator[tuple[RunEntry, range]]:
        """Each run with its valid rows."""
        runs = self._runs or [RunEntry(0)]
        stops = [*(run.first_row for run in runs[1:]), self.span.stop]
        for run, stop in zip(runs, stops, strict=True):
            rows = range(max(run.first_row, self.span.start), min(stop, self.span.stop))
            if rows:
                yield run, rows

    def _chunks(self, rows: range) -> Iterator[tuple[int, int]]:
        """Pieces of ``rows`` that lie in consecutive slots and are read at once."""
        size = max(1, min(_CHUNK_ROWS, _CHUNK_NBYTES // self._storage.schema.row_nbytes))
        ring, start = self._storage.ring, rows.start
        while start < rows.stop:
            stop = min(start + size, rows.stop)
            if ring:
                stop = min(stop, start - start % ring + ring)
            yield start, stop
            start = stop

    def _check(
        self, run: RunEntry, start: int, stop: int, lanes: LaneChecks, findings: Findings
    ) -> int:
        """Check rows; returns the oldest row that was looked at."""
        first = slots_of(start, self._storage.ring)
        slots = slice(first, first + stop - start)
        ended = self._ended(slots)
        valid = self._scalar(NEXT_VALID, slots) if self._is_scalar(NEXT_VALID, "b") else None
        if not self._followed or ended is None:
            place = partial(_place, start)
            self._check_flags(slots, ended, place, findings)
            self._check_finite(slots, valid, place, findings)
            self._unwritten.advance(start, slots, findings)
            return start
        chunk = self._chunk(start, slots, ended)
        if run.origin is not None:
            self.ended[run.origin] = self.ended.get(run.origin, 0) + int(ended.sum())
        self._check_flags(slots, ended, chunk.place, findings)
        self._check_finite(slots, valid, chunk.place, findings)
        _check_own(chunk, valid, findings)
        links = lanes.advance(chunk, findings)
        self._observations.check_links(chunk, links, findings)
        self._observations.check_zeros(chunk, links, valid)
        self._resets.look(run, chunk, valid, self._terminated(slots, ended))
        if self._episodes is not None:
            engine = self._storage._running()
            self._episodes.extend(self._order.episode_rows(engine, start, stop))
        return min(start, int(links.before.min(initial=start)))

    def _scalar(self, key: Key, slots: slice) -> np.ndarray:
        return self._arrays[key][slots].reshape(-1)

    def _chunk(self, start: int, slots: slice, ended: np.ndarray) -> CheckedRows:
        ids, steps, lane = (self._scalar(key, slots).astype(np.int64) for key in _NUMBERS)
        if self._is_scalar(POLICY_VERSION):
            return CheckedRows(start, ids, steps, lane, ended, self._scalar(POLICY_VERSION, slots))
        return CheckedRows(start, ids, steps, lane, ended, np.full(len(ids), -1))

    def _ended(self, slots: slice) -> np.ndarray | None:
        """Which rows end their episode, None where no column says so."""
        if self._both_known:
            ended: np.ndarray = self._scalar(TERMINATED, slots) | self._scalar(TRUNCATED, slots)
            return ended
        return self._scalar(DONE, slots) if self._is_scalar(DONE, "b") else None

    def _terminated(self, slots: slice, ended: np.ndarray) -> np.ndarray:
        return self._scalar(TERMINATED, slots) if self._both_known else ended

    def _check_flags(
        self, slots: slice, ended: np.ndarray | None, place: _PlaceOf, findings: Findings
    ) -> None:
        if not self._both_known or not self._is_scalar(DONE, "b") or ended is None:
            return
        cut = self._scalar(CUT, slots) if self._is_scalar(CUT, "b") else False
        wrong = np.flatnonzero(self._scalar(DONE, slots) != ended | cut)

        def what(at: int) -> str:
            flags = (self._scalar(key, slots)[at] for key in (DONE, TERMINATED, TRUNCATED))
            done, terminated, truncated = map(bool, flags)
            return f"done {done}, terminated {terminated}, truncated {truncated}"

        message = "done is not terminated or truncated"
        findings.add_rows(
            "ends", message, wrong, lambda i: place(int(wrong[i]), what(int(wrong[i])), None)
        )

    def _check_finite(
        self, slots: slice, valid: np.ndarray | None, place: _PlaceOf, findings: Findings
    ) -> None:
        for column in self._finite:
            observed = column.key in self._observed
            exempt = ~valid if valid is not None and observed and column.key[0] == NEXT else None
            infinity = observed or column.key == REWARD
            rows = self._arrays[column.key][slots]
            check_finite(column, rows, findings, place, infinity=infinity, exempt=exempt)


def _place(start: int, at: int, what: str, column: str | None) -> Place:
    return Place(row=start + at, column=column, what=what)


def _check_own(chunk: CheckedRows, valid: np.ndarray | None, findings: Findings) -> None:
    """Check what a row says of itself."""
    version = chunk.version
    chunk.report(
        findings, "versions", "a policy version below -1", version < -1,
        lambda at: f"version {version[at]}",
    )  # fmt: skip
    if valid is not None:
        chunk.report(
            findings, "finals", "the next observation is marked as lost in mid-episode",
            ~valid & ~chunk.ended, lambda at: "collector/next_valid is False",
        )  # fmt: skip
