"""Detect runs of environments that reset themselves without saying so. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from tallyroll.storage.engine.ring import slots_of
from tallyroll.storage.rows.keys import COUNTERS, NEXT, Key, spell
from tallyroll.storage.rows.schema import Column
from tallyroll.storage.trajectories.by_lane import MOST_LANES
from tallyroll.storage.verification.findings import Findings, Place
from tallyroll.storage.verification.lane_checks import CheckedRows
from tallyroll.storage.verification.observation_checks import observations_of
from tallyroll.storage.verification.record_checks import RunEntry
from tallyroll.storage.verification.self_reset_detection import (
    Ends,
    SelfResets,
    Verdict,
    digests,
    joined,
)

__all__ = ["ResetChecks"]


class ResetChecks:
    """Follows the ends of every run until it is decided.

    Args:
        columns: the storage's columns.
        arrays: their rows, slot by slot.
        ring: slots of the ring, 0 without one.
    """

    def __init__(
        self, columns: Mapping[Key, Column], arrays: Mapping[Key, np.ndarray], ring: int
    ) -> None:
        self._arrays, self._ring = arrays, ring
        self._nbytes = {key: column.row_nbytes for key, column in columns.items()}
        self._keys = [key for key in observations_of(columns) if key[-1] not in COUNTERS]
        self._runs: dict[int | None, SelfResets] = {}
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
        keys = [key for key in self._keys if key not in run.unobserved]
        if run.finals_kept or not keys:
            return
        resets = self._of(run, chunk)
        if self._stop != chunk.start or run.first_row == chunk.start:
            resets.forget(np.ones(resets.lanes, np.bool_))
        self._stop = chunk.start + len(chunk.ids)
        resets.look(
            Ends(
                chunk.lane,
                chunk.steps,
                chunk.ended,
                terminated,
                partial(self._digests, keys, chunk.start),
                partial(self._digests, [(NEXT, *key) for key in keys], chunk.start),
                valid,
                chunk.start,
            )
        )

    def _of(self, run: RunEntry, chunk: CheckedRows) -> SelfResets:
        """The findings on the run, a continued one included, that ``run`` belongs to."""
        origin = run.first_row if run.origin is None else run.origin
        lanes = run.lanes
        if lanes is None:  # no collector wrote it: as many as its first rows have
            inside = chunk.lane[(chunk.lane >= 0) & (chunk.lane < MOST_LANES)]
            lanes = int(inside.max(initial=-1)) + 1
        known = self._runs.get(origin)
        if known is None or not (known.decided or known.lanes >= lanes):
            known = self._runs[origin] = SelfResets(lanes)
        return known

    def _digests(self, keys: list[Key], start: int, rows: np.ndarray) -> np.ndarray:
        slots = slots_of(start + rows, self._ring)
        return joined(
            [
                digests(partial(self._arrays[key].take, axis=0), slots, self._nbytes[key])
                for key in keys
            ]
        )

    def finish(self, findings: Findings) -> None:
        """Report what was decided."""
        key = spell((NEXT, *self._keys[0])) if len(self._keys) == 1 else None
        for resets in self._runs.values():
            if resets.verdict is Verdict.SELF_RESET:
                seen = resets.seen
                what = "the lane's next trajectory begins with it"
                message = (
                    f"{seen.equal} of {seen.ends} final observations are the first ones of the "
                    "next episode, so the environment reset itself within step (where its resets "
                    'keep the state, collect with finals="kept")'
                )
                for row in resets.places:
                    findings.add("finals", message, Place(row, column=key, what=what), count=0)
                findings.add("finals", message, count=seen.equal)
