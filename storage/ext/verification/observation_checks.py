"""Compare each next observation with the following row's, and find lost ones. Pure."""

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
"""Limits of chance: at most 16 whole numbers are all zero at no more than 1/4 of ends."""
_SAMPLE_ROWS, _SAMPLE_NBYTES = 4096, 2**22
"""The most rows of a chunk, and their bytes, that are measured to see how far steps go."""
_LEAST_STEPS, _MOST_STEPS = 6, 256
"""The limits of the steps to measure, one a value, before a last step is called far."""
_LEAP = 2
"""A last step more than this many times as far as any other leads to a lost observation."""


def observations_of(columns: Mapping[Key, Column]) -> list[Column]:
    """Return the observations: columns that are alike at the root and under ``next``."""
    found = []
    for key, column in columns.items():
        after = columns.get((NEXT, *key))
        alike = after and (after.dtype, after.shape) == (column.dtype, column.shape)
        if alike and key[0] != NEXT and key[-1] not in _FLAGS:
            found.append(column)
    return found


class _Observation:
    """One observation, and counts of its zeros."""

    def __init__(
        self, column: Column, here: ColumnReader, next: ColumnReader, living: ColumnReader | None
    ) -> None:
        self.dtype, self.values = column.dtype, math.prod(column.shape)
        self.name, self.next_name = format_key(column.key), format_key((NEXT, *column.key))
        self.here, self.next, self._row_nbytes = here, next, column.row_nbytes
        self.living = living
        """The flags of agents that live next, for the observation of a group of agents."""
        whole = column.numpy_dtype.kind in "iu" and column.dtype != torch.bfloat16
        self.flags = whole
        """True while all values seen are 0 or 1: perhaps a mask."""
        self.few = whole and self.values <= _FEW_VALUES
        """True if a row is a few whole numbers, all of which may be zero by chance."""
        self.turned = 0
        """The number of ends at which it is zero, and was not before."""
        self.zero_midway = False
        """True if an episode comes to zero, or leaves it, without ending there."""
        self.zero_ends, self.zero_with_all = Findings(), Findings()
        """Its zeros at ends, and those of them where all other observations are zero, too."""
        self.strides = np.zeros(self.values)
        """The most that each of its values changes in a step that ends no episode."""
        self.steps = 0
        """The number of these steps that were measured."""
        self.leaps = np.zeros((0, self.values))
        """The changes in the last steps before its zeros at ends, of the first few of them."""
        self.by_design = True
        """True if it is zero at all ends that are terminated, and at none that is truncated."""
        self.truncated = 0
        """The number of ends that are truncated, where it is not zero."""

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
        """Measure some steps that end no episode, and those to zero, at ``turns`` [n]."""
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
            # By value: the bytes of -0.0 are not zero.
            self.by_design = (
                not (turns & ~terminated).any()
                and not (self._values(self.next.take(start + others)) != 0).any()
            )
        self.truncated += int((final & ~terminated & ~turns).sum())

    def _values(self, found: np.ndarray) -> np.ndarray:
        """Return the numbers [k, values] of an array [k, ...] of the column."""
        found = floats_of(found) if self.dtype is torch.bfloat16 else found
        return found.reshape(len(found), self.values)

    def _change(self, rows: np.ndarray) -> np.ndarray:
        """Return how far each value moves in rows [k]: [k, values]."""
        here, next = (self._values(each.take(rows)) for each in (self.here, self.next))
        with np.errstate(invalid="ignore", over="ignore"):
            wide = np.complex128 if here.dtype.kind == "c" else np.float64
            return np.nan_to_num(np.abs(next.astype(wide) - here.astype(wide)))

    @property
    def leapt(self) -> bool:
        """True if most zeros at ends are farther from the observation before than a step goes."""
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
    """Checks of the observations in a collector's rows.

    Zero is a value like any other. A row that is zero now and next was never written if the rows
    before or after it in its trajectory say something else, and no episode comes to zero or leaves
    it. A final observation of zeros was lost if no other observation is zero, or if zero is too
    far away: most last steps changed some value more than twice as much as any step that ended
    no episode. So a goal at the origin, which a step reaches, is not reported. A task may show
    zeros at its goal by design: then all ends that are terminated are zero, and some truncated
    ones are not. A task that shows zeros without these signs looks like an environment that lost
    them, and is reported; lost ones a step away from zero, or in episodes of one step, look like a
    goal, and are not.

    Flags that are all off at an end, such as the mask of actions of a player that has none left,
    are values like others: bools always, whole numbers that are only 0 and 1 where another
    observation is not zero there, and so are the observations of a group of agents that has died
    out. A final observation that is lost is lost with all its parts. And of a few whole numbers all
    may be zero by chance, at few ends.

    Args:
        observations: the observations of these rows.
        values: of all columns.
        gather: makes the collection of rows that may be found to be zeros at the end.
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
        """Rows, those in which all is zero, and ends whose final observation is there."""
        self._zero_state = False
        """True if an episode comes to a state in which all is zero, or leaves it."""
        self._torn = False
        """True if a row of zeros differs from what the row before or after it says."""
        self._zeros = gather()

    def check_links(self, chunk: CheckedRows, links: RowPairs, findings: Findings) -> np.ndarray:
        """Compare rows that follow one another; the later ones are in ``chunk``.

        Returns which of the ``links`` are broken.
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
        """Look for zeros in a chunk.

        Args:
            chunk: the rows.
            links: rows that follow one another.
            broken: which of these do not fit.
            valid: which rows [n] hold their true next observation, None if all do.
            terminated: which rows [n] are terminated.
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
            # Of a group that has died out nothing may be seen.
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
        """Judge the zeros by what was seen of them all."""
        values = sum(each.values for each in self._observations)
        seldom = self._zero_rows < self._rows and not self._zero_state
        if values > 1 and seldom and self._torn:
            findings.merge(self._zeros)
        for each in self._observations:
            if each.few and each.turned <= _SHARE * self._ends:
                continue
            # A single zero is a number like others, and so are flags that are all off.
            lost = not each.zero_midway and each.dtype != torch.bool and each.leapt
            if each.values > 1 and lost:
                findings.merge(each.zero_with_all if each.flags else each.zero_ends)


def _any(mask: ColumnReader, chunk: CheckedRows) -> np.ndarray:
    """In which rows of a chunk a mask has anything."""
    return np.asarray(mask.slice(chunk.start, chunk.stop).reshape(len(chunk.ids), -1).any(1))


def _other_than(name: str, before: np.ndarray, at: int) -> str:
    return f"is not the {name} of row {before[at]:,}"


def _touches(chunk: CheckedRows, links: RowPairs, broken: np.ndarray, rows: np.ndarray) -> bool:
    """Return whether a broken link begins or ends at one of ``rows`` [n] of the chunk."""
    if not (broken.any() and rows.any()):
        return False
    before = links.before[broken & (links.before >= chunk.start)]
    ends = np.concatenate([before, links.after[broken]]) - chunk.start
    return bool(rows[ends].any())


def _comes_or_goes(chunk: CheckedRows, links: RowPairs, here: np.ndarray, next: np.ndarray) -> bool:
    """Return whether an episode comes to zero or leaves it, and the row beside agrees."""
    inside = links.before >= chunk.start
    before, after = links.before[inside] - chunk.start, links.after[inside] - chunk.start
    comes = ~here[before] & next[before] & here[after]
    goes = here[before] & ~next[before] & ~here[after]
    return bool((comes | goes).any())
