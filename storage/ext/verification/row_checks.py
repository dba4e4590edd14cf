"""Checks that run in one pass over the rows of a storage, in the order of writing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tallyroll.storage.engine.ring import pieces
from tallyroll.storage.errors import CorruptStorage
from tallyroll.storage.ext.verification.findings import Findings, NumberedRows, Place
from tallyroll.storage.ext.verification.lane_checks import CheckedRows, LaneChecks
from tallyroll.storage.ext.verification.observation_checks import ObservationChecks, observations_of
from tallyroll.storage.ext.verification.record_checks import RunEntry
from tallyroll.storage.ext.verification.value_checks import (
    SpaceChecks,
    UnwrittenRows,
    holds_numbers,
    not_finite,
)
from tallyroll.storage.files.excluded_columns import excluded_note
from tallyroll.storage.readers.row_reader import ColumnReader
from tallyroll.storage.rows.keys import (
    COUNTERS,
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
    format_key,
    next_valid_keys,
)
from tallyroll.storage.rows.schema import Column
from tallyroll.storage.trajectories.columns import RowOrder
from tallyroll.storage.trajectories.episodes import (
    END_CUT,
    END_NAMES,
    END_OPEN,
    Episodes,
    runs_of,
)
from tallyroll.storage.trajectories.lane_stretches import MOST_LANES
from tallyroll.storage.trajectories.self_resets import (
    Ends,
    SelfResets,
    Verdict,
)

if TYPE_CHECKING:
    from tallyroll.storage.readers.row_reader import RowReader


class ResetChecks:
    """Search for runs whose environment reset itself within ``step``.

    The search compares the final observations of each run with the first observations that follow
    them, until there is a verdict.

    Args:
        observations: the observation columns.
        values: the readers of all columns.
    """

    def __init__(self, observations: Sequence[Column], values: Mapping[Key, ColumnReader]) -> None:
        self._values = values
        self._observations = [each for each in observations if each.key[-1] not in COUNTERS]
        self._runs: dict[int, SelfResets] = {}
        self._stop = -1
        """One more than the last row that was checked."""

    def look(
        self, run: RunEntry, chunk: CheckedRows, valid: np.ndarray | None, terminated: np.ndarray
    ) -> None:
        """Compare the ends of episodes in ``chunk``, whose rows belong to ``run``.

        Args:
            run: the run that wrote the rows.
            chunk: the rows.
            valid: a mask [n] of the rows whose next observation is the true one; None: all rows.
            terminated: a mask [n] of the terminated rows.
        """
        observed = [each for each in self._observations if list(each.key) not in run.unobserved]
        if run.finals_kept or not observed:
            return
        resets = self._of(run, chunk)
        if self._stop != chunk.start or run.first_row == chunk.start:
            resets.forget(np.ones(resets.lanes, np.bool_))
        self._stop = chunk.stop
        first, next = (
            [
                (partial(self._take, (*under, *each.key), chunk.start), each.row_nbytes)
                for each in observed
            ]
            for under in ((), (NEXT,))
        )
        lane, steps, ended = chunk.lane, chunk.steps, chunk.ended
        resets.look(Ends(lane, steps, ended, terminated, first, next, valid, chunk.start))

    def _of(self, run: RunEntry, chunk: CheckedRows) -> SelfResets:
        """Return the state of the search in ``run``, or in the run that it continues."""
        origin = run.first_row if run.origin is None else run.origin
        lanes = run.lanes
        if lanes is None:  # no collector wrote the run: use the number of lanes in its first rows
            inside = chunk.lane[(chunk.lane >= 0) & (chunk.lane < MOST_LANES)]
            lanes = int(inside.max(initial=-1)) + 1
        known = self._runs.get(origin)
        if known is None or not (known.decided or known.lanes >= lanes):
            known = self._runs[origin] = SelfResets(lanes)
        return known

    def _take(self, key: Key, start: int, rows: np.ndarray) -> np.ndarray:
        return self._values[key].take(start + rows)

    def finish(self, findings: Findings) -> None:
        """Report the verdicts."""
        keys = [(NEXT, *each.key) for each in self._observations]
        column = format_key(keys[0]) if len(keys) == 1 else None
        for resets in self._runs.values():
            if resets.verdict is Verdict.SELF_RESET:
                seen = resets.seen
                what = "the lane's next trajectory begins with it"
                findings.add(
                    "finals",
                    f"{seen.equal} of {seen.ends} final observations are the first ones of the "
                    "next episode, so the environment reset itself within step (where its resets "
                    'keep the state, collect with finals="kept")',
                    *(Place(row, column=column, what=what) for row in resets.places),
                    count=seen.equal,
                )


_EXACT = ("lane", "first_row", "first_step", "length", "version_first")
_AT_THE_END = ("last_row", "version_last")
_RTOL = 1e-9
"""Relative tolerance of returns, since the order of summation is unspecified."""


class EpisodeChecks:
    """Comparison of a table of episodes with trajectories that are recomputed from the rows.

    A writer writes the table when it closes. Rows after the last row in the table are ignored.

    Args:
        reader: the reader of the rows.
        table: the lines of the table.
        first: the lowest row that is valid.
    """

    def __init__(self, reader: RowReader, table: np.ndarray, first: int) -> None:
        self._table, self._first = table, first
        self._stop = int(table["last_row"].max(initial=-1)) + 1
        self._reader, self._order = reader, RowOrder(reader.schema)
        self._runs = runs_of(reader.runs)
        reward = next(each.shape for each in reader.schema.columns if each.key == REWARD)
        self._episodes: Episodes | None = Episodes(reader.ring, reward)

    def extend(self, start: int, stop: int) -> None:
        """Count the rows ``[start, stop)``, which follow the rows counted so far."""
        stop = min(stop, self._stop)
        if self._episodes is None or start >= stop:
            return
        try:
            rows = self._order.episode_rows(self._reader, start, stop)
            self._episodes.extend(rows, self._runs)
        except CorruptStorage:
            self._episodes = None  # an invalid lane, which another check reports

    def finish(self, findings: Findings) -> None:
        """Compare the lines with the recomputed trajectories."""
        if self._episodes is None:
            return
        told, counted = self._table, self._episodes.table()
        told = told[told["last_row"] >= self._first]
        missing = np.setdiff1d(counted["id"], told["id"])
        extra = np.setdiff1d(told["id"], counted["id"])
        message = "a trajectory has rows, but no line in the table"
        findings.add_rows("episodes", message, missing, lambda i: Place(trajectory=int(missing[i])))
        message = "a line in the table has no rows"
        findings.add_rows("episodes", message, extra, lambda i: Place(trajectory=int(extra[i])))
        _, mine, theirs = np.intersect1d(counted["id"], told["id"], return_indices=True)
        self._compare(counted[mine], told[theirs], findings)

    def _compare(self, counted: np.ndarray, told: np.ndarray, findings: Findings) -> None:
        # If the first rows of a trajectory are overwritten, only its end can be compared.
        whole = (told["first_row"] >= self._first) & (counted["first_row"] >= self._first)
        whole &= counted["first_step"] == told["first_step"]
        wrong = {name: whole & (counted[name] != told[name]) for name in _EXACT}
        wrong |= {name: counted[name] != told[name] for name in _AT_THE_END}
        wrong["end"] = _ends(counted) != _ends(told)
        with np.errstate(all="ignore"):
            close = np.isclose(
                counted["return"], told["return"], rtol=_RTOL, atol=0, equal_nan=True
            )
        wrong["return"] = whole & ~close.reshape(len(close), math.prod(close.shape[1:])).all(axis=1)
        seeds = counted["reset_seed"], told["reset_seed"]
        wrong["reset_seed"] = whole & (seeds[0] != seeds[1]) & (seeds[0] >= 0) & (seeds[1] >= 0)
        for name, where in wrong.items():
            lines, rows = told[where], counted[where]
            message = f"the table gives another {name} than the rows"
            place = partial(_place_of, name, lines, rows)
            findings.add_rows("episodes", message, lines["first_row"], place)


def _place_of(name: str, told: np.ndarray, counted: np.ndarray, at: int) -> Place:
    line = told[at]
    says, are = line[name], counted[name][at]
    if name == "end":
        says, are = END_NAMES[says], END_NAMES[are]
    return Place(
        row=int(line["first_row"]),
        lane=int(line["lane"]),
        trajectory=int(line["id"]),
        column=name,
        what=f"{says} in the table, {are} by the rows",
    )


def _ends(table: np.ndarray) -> np.ndarray:
    """Return the ends of trajectories; cuts count as open, as tables do not distinguish the two."""
    return np.where(table["end"] == END_CUT, END_OPEN, table["end"])


_NUMBERS = (TRAJ_IDS, STEP, LANE)
_ENDS = (DONE, TERMINATED, TRUNCATED)
_FLAGS = (*_ENDS, CUT, NEXT_VALID)
_CHUNK_ROWS = 2**18
_CHUNK_NBYTES = 2**27
_BY_TRAJECTORY = ("lanes", "ids", "steps", "versions", "observations", "finals")


class RowChecks:
    """Checks of the rows that a storage has when the object is created.

    Args:
        reader: the reader of the rows.
        runs: the runs that wrote the rows, by first row.
        nan: True to search for NaNs, too.
        table: the table of episodes to compare with the rows.
        gather: a factory of the collections of findings, which are merged into the caller's.
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
        """Checks that the storage does not permit, with the reasons."""
        self.overtaken = False
        """True if another process overwrote rows before they were read."""
        self.ended: dict[int, int] = {}
        """The number of episodes that ended in a run, by the run's first row."""
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
            self.unavailable["spaces"] = "no run records the spaces of its rows"
        self._unwritten = UnwrittenRows(() if self._followed else self._values.values())
        self._episodes: EpisodeChecks | None = None
        if table is not None:
            if self._followed and self._both_known and REWARD in self._columns:
                self._episodes = EpisodeChecks(reader, table, self.span.start)
            else:
                why = "a column from which the table is made is missing"
                self.unavailable["episodes"] = why

    # --- checks that the columns permit -----------------------------------------------------------

    def _is_scalar(self, key: Key, kinds: str = "iu") -> bool:
        column = self._columns.get(key)
        return (
            column is not None and column.shape in ((), (1,)) and column.numpy_dtype.kind in kinds
        )

    def _look_at_columns(self) -> bool:
        """Record the checks that are impossible; return True if trajectories can be followed."""
        if not self._both_known or DONE not in self._flags:
            self.unavailable["ends"] = "next/done, next/terminated or next/truncated is missing"
        lacking = [key for key in _NUMBERS if not self._is_scalar(key)]
        if not self._both_known and DONE not in self._flags:
            lacking.append(DONE)
        if lacking:
            why = f"there is no column {format_key(lacking[0])}, which collectors write"
            self.unavailable |= dict.fromkeys(_BY_TRAJECTORY, why)
            return False
        if not self._is_scalar(POLICY_VERSION):
            self.unavailable["versions"] = f"there is no column {format_key(POLICY_VERSION)}"
        if not self._observed:
            note = excluded_note(self._reader.runs)
            why = "no column at the root has a counterpart under next"
            why += f".{note[:-1]}" if note else ""
            self.unavailable |= {"observations": why, "finals": why}
        return True

    # --- the pass ---------------------------------------------------------------------------------

    def run(self, findings: Findings, tell: Callable[[int], None]) -> None:
        """Check all rows; call ``tell`` with the number of bytes read since its last call."""
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
        """Yield contiguous pieces of ``rows`` that are read at once."""
        size = max(1, min(_CHUNK_ROWS, _CHUNK_NBYTES // self._reader.schema.row_nbytes))
        for _, first, count in pieces(rows.start, rows.stop, self._reader.ring):
            for at in range(0, count, size):
                yield rows[first + at : first + min(at + size, count)]

    def _check(self, run: RunEntry, part: range, lanes: LaneChecks, findings: Findings) -> int:
        """Check rows; return the oldest row that was checked."""
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
        """Check that next observations are lost only at ends, or only for agents that acted."""
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
                lambda at: f"{format_key(key)} is {valid[at].tolist()}",
            )  # fmt: skip

    def _scalar(self, key: Key, part: range) -> np.ndarray:
        return self._values[key].slice(part.start, part.stop).reshape(-1)

    def _chunk(self, part: range, ended: np.ndarray | None) -> CheckedRows | None:
        """Return the rows with the collector's columns; None if a column is missing."""
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
            key, name = column.key, format_key(column.key)
            infinity = key in self._observed or key == REWARD
            values = self._values[key].slice(part.start, part.stop)
            wrong = not_finite(column, values, infinity=infinity)
            if valid is not None and key in self._observed and key[0] == NEXT:
                wrong &= valid  # a lost observation may have any value
            message = f"{'NaN or infinity' if infinity else 'NaN'} in {name}"
            rows.report(findings, "nan", message, wrong, lambda at: "", column=name)

    def _check_spaces(
        self, run: RunEntry, rows: NumberedRows, part: range, findings: Findings
    ) -> None:
        """Compare values with the spaces that the run records."""
        for column, space in self._spaces.of(run.first_row, run.spaces):
            values = self._values[column.key].slice(part.start, part.stop)
            self._spaces.check(column, space, values, rows, findings)


def _check_own(chunk: CheckedRows, findings: Findings) -> None:
    """Check each row on its own."""
    version = chunk.version
    chunk.report(
        findings, "versions", "a policy version below -1", version < -1,
        lambda at: f"version {version[at]}",
    )  # fmt: skip
