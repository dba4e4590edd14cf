"""Detect runs of environments that reset themselves without saying so. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from tallyroll.storage.ext.verification.findings import Findings, Place
from tallyroll.storage.ext.verification.lane_checks import CheckedRows
from tallyroll.storage.ext.verification.record_checks import RunEntry
from tallyroll.storage.readers.row_reader import ColumnReader
from tallyroll.storage.rows.keys import COUNTERS, NEXT, Key, spell
from tallyroll.storage.rows.schema import Column
from tallyroll.storage.trajectories.by_lane import MOST_LANES
from tallyroll.storage.trajectories.self_resets import (
    Ends,
    SelfResets,
    Verdict,
)


class ResetChecks:
    """Follows the ends of every run until it is decided.

    Args:
        observations: the observations of these rows.
        values: of all columns.
    """

    def __init__(self, observations: Sequence[Column], values: Mapping[Key, ColumnReader]) -> None:
        self._values = values
        self._observations = [each for each in observations if each.key[-1] not in COUNTERS]
        self._runs: dict[int, SelfResets] = {}
        self._stop = -1
        """One more than the last row that was looked at."""

    def look(
        self, run: RunEntry, chunk: CheckedRows, valid: np.ndarray | None, terminated: np.ndarray
    ) -> None:
        """Compare the rows of ``chunk``, of ``run``.

        Args:
            run: who wrote them.
            chunk: the rows.
            valid: which of them [n] hold their true next observation, None if all do.
            terminated: which of them [n] are terminated.
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
        """Return the findings on the run, a continued one included, that ``run`` belongs to."""
        origin = run.first_row if run.origin is None else run.origin
        lanes = run.lanes
        if lanes is None:  # no collector wrote it: as many as its first rows have
            inside = chunk.lane[(chunk.lane >= 0) & (chunk.lane < MOST_LANES)]
            lanes = int(inside.max(initial=-1)) + 1
        known = self._runs.get(origin)
        if known is None or not (known.decided or known.lanes >= lanes):
            known = self._runs[origin] = SelfResets(lanes)
        return known

    def _take(self, key: Key, start: int, rows: np.ndarray) -> np.ndarray:
        return self._values[key].take(start + rows)

    def finish(self, findings: Findings) -> None:
        """Report what was decided."""
        keys = [(NEXT, *each.key) for each in self._observations]
        column = spell(keys[0]) if len(keys) == 1 else None
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
