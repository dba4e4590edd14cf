"""One pass over the rows of a storage, in the order in which they were written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tallyroll.storage.engine.ring import pieces
from tallyroll.storage.ext.verification.episode_checks import EpisodeChecks
from tallyroll.storage.ext.verification.findings import Findings, NumberedRows
from tallyroll.storage.ext.verification.lane_checks import CheckedRows, LaneChecks
from tallyroll.storage.ext.verification.observation_checks import ObservationChecks, observations_of
from tallyroll.storage.ext.verification.record_checks import RunEntry
from tallyroll.storage.ext.verification.reset_checks import ResetChecks
from tallyroll.storage.ext.verification.value_checks import (
    SpaceChecks,
    UnwrittenRows,
    holds_numbers,
    not_finite,
)
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
    next_valid_keys,
    spell,
)

if TYPE_CHECKING:
    from tallyroll.storage.readers.row_reader import RowReader


_NUMBERS = (TRAJ_IDS, STEP, LANE)
_ENDS = (DONE, TERMINATED, TRUNCATED)
_FLAGS = (*_ENDS, CUT, NEXT_VALID)
_CHUNK_ROWS = 2**18
_CHUNK_NBYTES = 2**27
_BY_TRAJECTORY = ("lanes", "ids", "steps", "versions", "observations", "finals")


class RowChecks:
    """Checks the valid rows of a storage, as they are when it is made.

    Args:
        reader: of the rows.
        runs: the runs that wrote its rows, by their first rows.
        nan: look for NaN, too.
        table: the table of episodes that the rows are to be compared with.
        gather: makes the collections of findings that are merged into the caller's.
    """

    def __init__(
        self,
        reader: RowReader,
        runs: Sequence[RunEntry],
        *,
        nan: bool = True,
        table: np.ndarray | None = None,
        gather: Callable[[], Findings] = Findings,
    ) -> None:
        self._reader, self.span, self._gather = reader, reader.span, gather
        self._runs = runs
        self._columns = {column.key: column for column in reader.schema.columns}
        self._values = {key: reader.column(key) for key in self._columns}
        self.unavailable: dict[str, str] = {}
        """Checks that the storage does not allow, and why."""
        self.overtaken = False
        """Another process overwrote rows before they were read."""
        self.ended: dict[int, int] = {}
        """How many episodes ended in a run, by the run's first row."""
        self.largest_id = -1
        self._flags = [key for key in _FLAGS if self._is_scalar(key, "b")]
        self._valid = [key for key in next_valid_keys(self._columns) if self._is_bool(key)]
        self._both_known = TERMINATED in self._flags and TRUNCATED in self._flags
        observed = observations_of(self._columns)
        self._observed = {key for each in observed for key in (each.key, (NEXT, *each.key))}
        self._followed = self._look_at_columns()
        self._observations = ObservationChecks(observed, self._values, gather)
        self._resets = ResetChecks(observed, self._values)
        self._finite = [c for c in self._columns.values() if nan and holds_numbers(c)]
        self._spaces = SpaceChecks(self._columns, finals=not self._valid)
        if not any(run.spaces for run in runs):
            self.unavailable["spaces"] = "no run says spaces to which its rows keep"
        self._unwritten = UnwrittenRows(() if self._followed else self._values.values())
        self._episodes: EpisodeChecks | None = None
        if table is not None:
            if self._followed and self._both_known and REWARD in self._columns:
                self._episodes = EpisodeChecks(reader, table, self.span.start)
            else:
                why = "not all columns are there that the table is made of"
                self.unavailable["episodes"] = why

    # --- what the columns allow -------------------------------------------------------------------

    def _is_scalar(self, key: Key, kinds: str = "iu") -> bool:
        column = self._columns.get(key)
        return (
            column is not None and column.shape in ((), (1,)) and column.numpy_dtype.kind in kinds
        )

    def _look_at_columns(self) -> bool:
        """Say what cannot be checked; returns whether trajectories can be followed."""
        if not self._both_known or DONE not in self._flags:
            self.unavailable["ends"] = "not all of next/done, terminated and truncated are there"
        lacking = [key for key in _NUMBERS if not self._is_scalar(key)]
        if not self._both_known and DONE not in self._flags:
            lacking.append(DONE)
        if lacking:
            why = f"there is no column {spell(lacking[0])} of a collector"
            self.unavailable |= dict.fromkeys(_BY_TRAJECTORY, why)
            return False
        if not self._is_scalar(POLICY_VERSION):
            self.unavailable["versions"] = f"there is no column {spell(POLICY_VERSION)}"
        if not self._observed:
            why = "no column is alike at the root and under next"
            self.unavailable |= {"observations": why, "finals": why}
        return True

    # --- the pass ---------------------------------------------------------------------------------

    def run(self, findings: Findings, tell: Callable[[int], None]) -> None:
        """Check all rows; call ``tell`` with the number of bytes that were read."""
        lanes: LaneChecks | None = None
        for run, rows in self._parts():
            if lanes is None or not run.goes_on:
                self._leave(lanes, findings)
                late = run.first_row < rows.start
                lanes = LaneChecks(run.lanes, floor=self.largest_id, late=late)
            for part in self._chunks(rows):
                found = self._gather()
                oldest = self._check(run, part, lanes, found)
                if self._reader.span.start > oldest:
                    self.overtaken = True
                    lanes = LaneChecks(run.lanes, floor=self.largest_id, late=True)
                else:
                    findings.merge(found)
                tell(len(part) * self._reader.schema.row_nbytes)
        self._leave(lanes, findings)
        self._unwritten.finish(self.span.stop, findings)
        if self.overtaken:
            why = "another process writes to this ring; wait for it"
            self.unavailable |= dict.fromkeys(("zeros", "finals", "episodes"), why)
            return
        self._observations.finish(findings)
        self._resets.finish(findings)
        if self._episodes is not None:
            self._episodes.finish(findings)

    def _leave(self, lanes: LaneChecks | None, findings: Findings) -> None:
        if lanes is not None:
            lanes.finish(findings)
            self.largest_id = max(self.largest_id, lanes.largest)

    def _parts(self) -> Iterator[tuple[RunEntry, range]]:
        """Yield each run with its valid rows."""
        runs = self._runs or [RunEntry(0)]
        stops = [*(run.first_row for run in runs[1:]), self.span.stop]
        for run, stop in zip(runs, stops, strict=True):
            rows = range(max(run.first_row, self.span.start), min(stop, self.span.stop))
            if rows:
                yield run, rows

    def _chunks(self, rows: range) -> Iterator[range]:
        """Pieces of ``rows`` that are read at once, and lie side by side."""
        size = max(1, min(_CHUNK_ROWS, _CHUNK_NBYTES // self._reader.schema.row_nbytes))
        for _, first, count in pieces(rows.start, rows.stop, self._reader.ring):
            for at in range(0, count, size):
                yield rows[first + at : first + min(at + size, count)]

    def _check(self, run: RunEntry, part: range, lanes: LaneChecks, findings: Findings) -> int:
        """Check rows; returns the oldest row that was looked at."""
        start = part.start
        flags = {key: self._scalar(key, part) for key in self._flags}
        ended, of_each = flags.get(DONE), [self._of_rows(key, part) for key in self._valid]
        valid = np.logical_and.reduce([each.all(1) for each in of_each]) if of_each else None
        if self._both_known:
            ended = flags[TERMINATED] | flags[TRUNCATED]
        chunk = self._chunk(part, ended)
        rows = chunk or NumberedRows(start)
        self._check_flags(rows, flags, ended, findings)
        self._check_finite(rows, part, valid, findings)
        self._check_spaces(run, rows, part, findings)
        if chunk is None:
            self._unwritten.advance(part, findings)
            return start
        if run.origin is not None:
            self.ended[run.origin] = self.ended.get(run.origin, 0) + int(chunk.ended.sum())
        _check_own(chunk, findings)
        for key, each in zip(self._valid, of_each, strict=True):
            self._check_valid(key, each, chunk, part, findings)
        links = lanes.advance(chunk, findings)
        terminated = flags[TERMINATED] if self._both_known else chunk.ended
        broken = self._observations.check_links(chunk, links, findings)
        self._observations.check_zeros(chunk, links, broken, valid, terminated)
        self._resets.look(run, chunk, valid, terminated)
        if self._episodes is not None:
            self._episodes.extend(start, start + len(chunk.ids))
        return min(start, int(links.before.min(initial=start)))

    def _is_bool(self, key: Key) -> bool:
        return self._columns[key].numpy_dtype.kind == "b"

    def _of_rows(self, key: Key, part: range) -> np.ndarray:
        """Return a column ``[row, ...]`` as ``[row, value]``."""
        values: np.ndarray = self._values[key].slice(part.start, part.stop)
        return values.reshape(len(part), -1)

    def _check_valid(
        self, key: Key, valid: np.ndarray, chunk: CheckedRows, part: range, findings: Findings
    ) -> None:
        """Check where next observations are lost: of rows at ends, of agents where they acted."""
        if key == NEXT_VALID:
            chunk.report(
                findings, "finals", "the next observation is marked as lost in mid-episode",
                ~valid[:, 0] & ~chunk.ended, lambda at: "collector/next_valid is False",
            )  # fmt: skip
            return
        mask = (*key[len(NEXT_VALID) :], "mask")
        if mask in self._columns and self._is_bool(mask):
            acted = self._of_rows(mask, part)
            chunk.report(
                findings, "finals", "the next observation of an agent that did not act is lost",
                (~valid & ~acted).any(axis=1) & ~chunk.ended,
                lambda at: f"{spell(key)} is {valid[at].tolist()}",
            )  # fmt: skip

    def _scalar(self, key: Key, part: range) -> np.ndarray:
        return self._values[key].slice(part.start, part.stop).reshape(-1)

    def _chunk(self, part: range, ended: np.ndarray | None) -> CheckedRows | None:
        """Return the rows with what a collector says of them, None where not all of it is there."""
        if not self._followed or ended is None:
            return None
        ids, steps, lane = (self._scalar(key, part).astype(np.int64) for key in _NUMBERS)
        known = self._is_scalar(POLICY_VERSION)
        version = self._scalar(POLICY_VERSION, part) if known else np.full(len(ids), -1)
        return CheckedRows(part.start, ids, steps, lane, ended, version)

    def _check_flags(
        self,
        rows: NumberedRows,
        flags: Mapping[Key, np.ndarray],
        ended: np.ndarray | None,
        findings: Findings,
    ) -> None:
        if "ends" in self.unavailable or ended is None:
            return
        rows.report(
            findings, "ends", "done is not terminated or truncated",
            flags[DONE] != ended | flags.get(CUT, np.False_),
            lambda at: ", ".join(f"{key[-1]} {flags[key][at]}" for key in _ENDS),
        )  # fmt: skip

    def _check_finite(
        self, rows: NumberedRows, part: range, valid: np.ndarray | None, findings: Findings
    ) -> None:
        for column in self._finite:
            key, name = column.key, spell(column.key)
            infinity = key in self._observed or key == REWARD
            values = self._values[key].slice(part.start, part.stop)
            wrong = not_finite(column, values, infinity=infinity)
            if valid is not None and key in self._observed and key[0] == NEXT:
                wrong &= valid  # what was lost may be anything
            message = f"{'NaN or infinity' if infinity else 'NaN'} in {name}"
            rows.report(findings, "nan", message, wrong, lambda at: "", column=name)

    def _check_spaces(
        self, run: RunEntry, rows: NumberedRows, part: range, findings: Findings
    ) -> None:
        """Compare values with the spaces that the run says."""
        for column, space in self._spaces.of(run.first_row, run.spaces):
            values = self._values[column.key].slice(part.start, part.stop)
            self._spaces.check(column, space, values, rows, findings)


def _check_own(chunk: CheckedRows, findings: Findings) -> None:
    """Check what a row says of itself."""
    version = chunk.version
    chunk.report(
        findings, "versions", "a policy version below -1", version < -1,
        lambda at: f"version {version[at]}",
    )  # fmt: skip
