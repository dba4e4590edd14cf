"""Checks of next observations: they match the following row, and none is lost. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from tallyroll.storage.ext.verification.findings import Findings
from tallyroll.storage.ext.verification.lane_checks import CheckedRows, RowPairs
from tallyroll.storage.ext.verification.value_checks import rows_with, zero_rows
from tallyroll.storage.readers.row_reader import ColumnReader
from tallyroll.storage.rows.keys import NEXT, Key, format_key
from tallyroll.storage.rows.row_words import batches, words
from tallyroll.storage.rows.schema import Column
from tallyroll.storage.trajectories.columns import floats_of

_FLAGS = {"done", "terminated", "truncated", "reward"}
_FEW_VALUES, _SHARE = 16, 1 / 4
"""Limits for coincidence: up to 16 integers may all be zero at up to 1/4 of the ends."""
_SAMPLE_ROWS, _SAMPLE_NBYTES = 4096, 2**22
"""Maximum number of rows per chunk, and of their bytes, that are used to measure step sizes."""
_LEAST_STEPS, _MOST_STEPS = 6, 256
"""Bounds of the number of steps, one per value, that are measured to call a last step far."""
_LEAP = 2
"""A last step that exceeds all other steps by more than this factor suggests a lost observation."""


def observations_of(columns: Mapping[Key, Column]) -> list[Column]:
    """Return the observations: columns that also exist in ``next``, with equal dtype and shape."""
    found = []
    for key, column in columns.items():
        after = columns.get((NEXT, *key))
        alike = after and (after.dtype, after.shape) == (column.dtype, column.shape)
        if alike and key[0] != NEXT and key[-1] not in _FLAGS:
            found.append(column)
    return found


class _Observation:
    """One observation with counts of its zeros."""

    def __init__(
        self, column: Column, here: ColumnReader, next: ColumnReader, living: ColumnReader | None
    ) -> None:
        self.dtype, self.values = column.dtype, math.prod(column.shape)
        self.name, self.next_name = format_key(column.key), format_key((NEXT, *column.key))
        self.here, self.next, self._row_nbytes = here, next, column.row_nbytes
        self.living = living
        """For the observation of a group: the flags of the agents that live in the next state."""
        whole = column.numpy_dtype.kind in "iu" and column.dtype != torch.bfloat16
        self.flags = whole
        """True as long as all values seen are 0 or 1, as in a mask."""
        self.few = whole and self.values <= _FEW_VALUES
        """True if a row consists of a few integers, all of which may be zero by chance."""
        self.turned = 0
        """The number of ends at which the observation is zero, but was not zero before."""
        self.zero_midway = False
        """True if an episode reaches zero, or leaves it, without ending there."""
        self.zero_ends, self.zero_with_all = Findings(), Findings()
        """Zeros of the observation at ends, and those with zeros in all other observations."""
        self.strides = np.zeros(self.values)
        """The maximum change of each value in a step that does not end an episode."""
        self.steps = 0
        """The number of steps that were measured for ``strides``."""
        self.leaps = np.zeros((0, self.values))
        """The change of each value in steps to zero at ends, for the first few of these steps."""
        self.by_design = True
        """True if the observation is zero at all terminated ends, and at no truncated end."""
        self.truncated = 0
        """The number of truncated ends at which the observation is not zero."""

    def differs(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Return which rows ``after`` [n] differ from the next observations of ``before``."""
        return rows_with(
            lambda part: words(self.next.take(before[part])) != words(self.here.take(after[part])),
            len(before),
            self._row_nbytes,
        )

    def look_at_steps(
        self, chunk: CheckedRows, turns: np.ndarray, final: np.ndarray, terminated: np.ndarray
    ) -> None:
        """Measure the changes in some steps that do not end an episode, and in steps to zero.

        ``turns`` marks the steps to zero.
        """
        start, rows = chunk.start, np.flatnonzero(~chunk.ended)
        most = max(1, min(_SAMPLE_ROWS, _SAMPLE_NBYTES // self._row_nbytes))
        rows = rows[:: -(-len(rows) // most)] if len(rows) > most else rows
        self.steps += len(rows)
        if len(rows):
            self.strides = np.maximum(self.strides, self._change(start + rows).max(axis=0))
        last = np.flatnonzero(turns)[: max(0, most // 16 + 1 - len(self.leaps))]
        if len(last):
            self.leaps = np.concatenate([self.leaps, self._change(start + last)])
        if self.by_design:
            others = np.flatnonzero(final & terminated & ~turns)[:most]
            # Compare values, since the bytes of -0.0 are not zero.
            self.by_design = (
                not (turns & ~terminated).any()
                and not (self._values(self.next.take(start + others)) != 0).any()
            )
        self.truncated += int((final & ~terminated & ~turns).sum())

    def _values(self, found: np.ndarray) -> np.ndarray:
        """Reshape an array [k, ...] of the column to numbers [k, values]."""
        found = floats_of(found) if self.dtype is torch.bfloat16 else found
        return found.reshape(len(found), self.values)

    def _change(self, rows: np.ndarray) -> np.ndarray:
        """Return the absolute change of each value in rows [k]: [k, values]."""
        here, next = (self._values(each.take(rows)) for each in (self.here, self.next))
        with np.errstate(invalid="ignore", over="ignore"):
            wide = np.complex128 if here.dtype.kind == "c" else np.float64
            return np.nan_to_num(np.abs(next.astype(wide) - here.astype(wide)))

    @property
    def leapt(self) -> bool:
        """True if most zeros at ends are farther from the previous observation than steps reach."""
        enough = max(_LEAST_STEPS, min(self.values, _MOST_STEPS))
        if self.steps < enough or (self.by_design and self.truncated):
            return False
        far = np.any(self.leaps / _LEAP > self.strides, axis=1)
        return bool(2 * far.sum() > len(self.leaps))

    def look_for_flags(self, next: np.ndarray) -> None:
        """Clear ``flags`` if one of these next values [n, ...] is neither 0 nor 1."""
        for part in batches(len(next), self._row_nbytes) if self.flags else ():
            if (next[part] >> 1).any():
                self.flags = False
                return


class ObservationChecks:
    """Checks of the observations in a collector's rows, which search for lost observations.

    A zero can be a legitimate value. Two patterns indicate lost observations:

    - A row whose observation and next observation are zero was never written if adjacent rows of
      its trajectory contradict it, and no episode reaches or leaves zero.
    - A final observation of zeros was lost if no other observation is zero. It was also lost if
      zero is too far away, which means that most last steps changed some value more than twice as
      much as any step that did not end an episode.

    A goal at the origin that a step can reach is therefore not reported. A task may show zeros at
    its goal by design. In this case all terminated ends are zero, and some truncated ends are not.
    A task that shows zeros without these signs looks like an environment that lost observations,
    and is reported. Lost observations that are one step away from zero, or in episodes of one step,
    look like a goal, and are not reported.

    Some zeros are treated as ordinary values. Flags may all be off at an end, such as the action
    mask of a player without actions. Bools always count as flags. Integers that are only 0 and 1
    count as flags if another observation is not zero there. The observations of a group of agents
    without survivors may be zero, too. A lost final observation is lost with all its parts. A few
    integers may all be zero by chance, at few ends.

    Args:
        observations: the observation columns.
        values: the readers of all columns.
        gather: a factory of the collection for rows of zeros, which are reported at the end.
    """

    def __init__(
        self,
        observations: Sequence[Column],
        values: Mapping[Key, ColumnReader],
        gather: Callable[[], Findings] = Findings,
    ) -> None:
        self._observations = [
            _Observation(
                column,
                values[column.key],
                values[(NEXT, *column.key)],
                values.get((NEXT, *column.key[:-1], "mask")) if len(column.key) > 1 else None,
            )
            for column in observations
        ]
        self._rows = self._zero_rows = self._ends = 0
        """Counts of rows, of rows that are entirely zero, and of ends with a final observation."""
        self._zero_state = False
        """True if an episode reaches a state that is entirely zero, or leaves it."""
        self._torn = False
        """True if a row of zeros contradicts the row before or after it."""
        self._zeros = gather()

    def check_links(self, chunk: CheckedRows, links: RowPairs, findings: Findings) -> np.ndarray:
        """Compare consecutive rows of trajectories; the later rows are in ``chunk``.

        Returns:
            A mask of the ``links`` that are broken.
        """
        broken = np.zeros(len(links.after), np.bool_)
        for each in self._observations:
            here, next = each.name, each.next_name
            message = f"{next} is not the {here} of the row that follows in the trajectory"
            differs = each.differs(links.before, links.after)
            broken |= differs
            chunk.report(
                findings, "observations", message, differs,
                partial(_other_than, next, links.before), links.after - chunk.start, here,
            )  # fmt: skip
        return broken

    def check_zeros(
        self,
        chunk: CheckedRows,
        links: RowPairs,
        broken: np.ndarray,
        valid: np.ndarray | None,
        terminated: np.ndarray,
    ) -> None:
        """Search a chunk for zeros.

        Args:
            chunk: the rows.
            links: consecutive rows of trajectories.
            broken: a mask of the links that do not match.
            valid: a mask [n] of the rows whose next observation is the true one; None: all rows.
            terminated: a mask [n] of the terminated rows.
        """
        count = len(chunk.ids)
        all_here, all_next = np.ones(count, np.bool_), np.ones(count, np.bool_)
        final = chunk.ended if valid is None else chunk.ended & valid
        turned: list[tuple[_Observation, np.ndarray]] = []
        for each in self._observations:
            next_values = each.next.slice(chunk.start, chunk.stop)
            here = zero_rows(words(each.here.slice(chunk.start, chunk.stop)))
            next = zero_rows(words(next_values))
            turns = next & ~here
            if (turns & ~chunk.ended).any() or (here & ~next).any():
                each.zero_midway = True
            if (turns := turns & final).any():
                turned.append((each, turns))
                each.turned += int(turns.sum())
                each.look_for_flags(next_values)
            if not each.zero_midway:
                each.look_at_steps(chunk, turns, final, terminated)
            all_here &= here
            all_next &= next
        for each, turns in turned:
            message = f"{each.next_name} is all zero at ends of episodes, and nowhere else"
            # If no agent of a group survives, there may be nothing to observe.
            alive = True if each.living is None else _any(each.living, chunk) | all_next
            for gathered, where in (
                (each.zero_ends, turns & alive),
                (each.zero_with_all, turns & all_next),
            ):
                chunk.report(gathered, "finals", message, where, lambda at: "was it lost?")
        both = all_here & all_next
        message = "all observations are zero, now and next, and no other row leads there"
        chunk.report(self._zeros, "zeros", message, both, lambda at: "was it ever written?")
        self._rows += count
        self._zero_rows += int(both.sum())
        self._ends += int(final.sum())
        self._torn |= _touches(chunk, links, broken, both)
        if not self._zero_state and (all_here.any() or all_next.any()):
            self._zero_state = _comes_or_goes(chunk, links, all_here, all_next)

    def finish(self, findings: Findings) -> None:
        """Report zeros on the basis of all rows."""
        values = sum(each.values for each in self._observations)
        seldom = self._zero_rows < self._rows and not self._zero_state
        if values > 1 and seldom and self._torn:
            findings.merge(self._zeros)
        for each in self._observations:
            if each.few and each.turned <= _SHARE * self._ends:
                continue
            # A single zero is an ordinary number, and flags may all be off.
            lost = not each.zero_midway and each.dtype != torch.bool and each.leapt
            if each.values > 1 and lost:
                findings.merge(each.zero_with_all if each.flags else each.zero_ends)


def _any(mask: ColumnReader, chunk: CheckedRows) -> np.ndarray:
    """Return which rows of a chunk have a mask with at least one True value."""
    return np.asarray(mask.slice(chunk.start, chunk.stop).reshape(len(chunk.ids), -1).any(1))


def _other_than(name: str, before: np.ndarray, at: int) -> str:
    return f"is not the {name} of row {before[at]:,}"


def _touches(chunk: CheckedRows, links: RowPairs, broken: np.ndarray, rows: np.ndarray) -> bool:
    """Return True if a broken link begins or ends at one of ``rows`` [n] of the chunk."""
    if not (broken.any() and rows.any()):
        return False
    before = links.before[broken & (links.before >= chunk.start)]
    ends = np.concatenate([before, links.after[broken]]) - chunk.start
    return bool(rows[ends].any())


def _comes_or_goes(chunk: CheckedRows, links: RowPairs, here: np.ndarray, next: np.ndarray) -> bool:
    """Return True if two successive rows agree that an episode reaches or leaves zero."""
    inside = links.before >= chunk.start
    before, after = links.before[inside] - chunk.start, links.after[inside] - chunk.start
    comes = ~here[before] & next[before] & here[after]
    goes = here[before] & ~next[before] & ~here[after]
    return bool((comes | goes).any())
