"""Compare each next observation with the following row's, and find lost ones. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

from tallyroll.storage.readers.row_reader import ColumnReader
from tallyroll.storage.rows.keys import NEXT, Key, spell
from tallyroll.storage.rows.schema import Column
from tallyroll.storage.verification.findings import Findings
from tallyroll.storage.verification.lane_checks import CheckedRows, RowPairs
from tallyroll.storage.verification.value_checks import batches, rows_with, words, zero_rows

_FLAGS = {"done", "terminated", "truncated", "reward"}
_FEW_VALUES, _SHARE = 16, 1 / 4
"""Of so few whole numbers some ends are all zero by chance; more than this share are not."""


def observations_of(columns: Mapping[Key, Column]) -> list[Column]:
    """Observations: columns that occur alike at the root and under ``next``."""
    found = []
    for key, column in columns.items():
        after = columns.get((NEXT, *key))
        alike = after and (after.dtype, after.shape) == (column.dtype, column.shape)
        if alike and key[0] != NEXT and key[-1] not in _FLAGS:
            found.append(column)
    return found


class _Observation:
    """One observation, and what is known of its zeros."""

    def __init__(
        self, column: Column, here: ColumnReader, next: ColumnReader, living: ColumnReader | None
    ) -> None:
        self.dtype, self.values = column.dtype, math.prod(column.shape)
        self.name, self.next_name = spell(column.key), spell((NEXT, *column.key))
        self.here, self.next, self._row_nbytes = here, next, column.row_nbytes
        self.living = living
        """Of a group of agents: who lives next."""
        whole = column.numpy_dtype.kind in "iu" and column.dtype != torch.bfloat16
        self.flags = whole
        """All values are 0 or 1, as far as the rows were looked at: a mask, perhaps."""
        self.few = whole and self.values <= _FEW_VALUES
        """A row is a few whole numbers, all of which may be zero by chance."""
        self.turned = 0
        """Ends at which it is zero, and was not before."""
        self.zero_midway = False
        """An episode comes to zero, or leaves it, without ending there."""
        self.zero_ends, self.zero_with_all = Findings(), Findings()
        """Its zeros at ends, and those of them where all other observations are zero, too."""

    def differs(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Which rows ``after`` [n] do not begin with what came next in the rows ``before``."""
        return rows_with(
            lambda part: words(self.next.take(before[part])) != words(self.here.take(after[part])),
            len(before),
            self._row_nbytes,
        )

    def look_for_flags(self, next: np.ndarray) -> None:
        """Take notice of values that are neither 0 nor 1 in some of its next values [n, ...]."""
        for part in batches(len(next), self._row_nbytes) if self.flags else ():
            if (next[part] >> 1).any():
                self.flags = False
                return


class ObservationChecks:
    """Follows the observations in a collector's rows.

    Zero is a value like any other where the rows show how an episode came to it or left it.
    Where they do not, it looks like a row that was never written, or a final observation that
    was lost. Flags that are all off at an end, such as the mask of actions of a player that has
    none left, are values like others: bools always, whole numbers that are only 0 and 1 where
    another observation is not zero there, and so are the observations of a group of agents that has
    died out. A final observation that is lost is lost with all its
    parts. And of a few whole numbers all may be zero by chance, at few ends.

    Args:
        observations: the observations of these rows.
        values: of all columns.
    """

    def __init__(self, observations: Sequence[Column], values: Mapping[Key, ColumnReader]) -> None:
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
        """Some episode comes to a state in which all is zero, or leaves it."""
        self._zeros = Findings()

    def check_links(self, chunk: CheckedRows, links: RowPairs, findings: Findings) -> None:
        """Compare rows that follow one another; the later ones are in ``chunk``."""
        for each in self._observations:
            here, next = each.name, each.next_name
            message = f"{next} is not the {here} of the row that follows in the trajectory"
            chunk.report(
                findings, "observations", message, each.differs(links.before, links.after),
                partial(_other_than, next, links.before), links.after - chunk.start, here,
            )  # fmt: skip

    def check_zeros(self, chunk: CheckedRows, links: RowPairs, valid: np.ndarray | None) -> None:
        """Look for zeros in a chunk.

        Args:
            chunk: the rows.
            links: rows that follow one another.
            valid: which rows [n] hold their true next observation, None if all do.
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
        if not self._zero_state and (all_here.any() or all_next.any()):
            self._zero_state = _comes_or_goes(chunk, links, all_here, all_next)

    def finish(self, findings: Findings) -> None:
        """Judge the zeros by what was seen of them all."""
        values = sum(each.values for each in self._observations)
        if values > 1 and self._zero_rows < self._rows and not self._zero_state:
            findings.merge(self._zeros)
        for each in self._observations:
            if each.few and each.turned <= _SHARE * self._ends:
                continue
            # A single zero is a number like others, and so are flags that are all off.
            if each.values > 1 and not each.zero_midway and each.dtype != torch.bool:
                findings.merge(each.zero_with_all if each.flags else each.zero_ends)


def _any(mask: ColumnReader, chunk: CheckedRows) -> np.ndarray:
    """In which rows of a chunk a mask has anything."""
    return np.asarray(mask.slice(chunk.start, chunk.stop).reshape(len(chunk.ids), -1).any(1))


def _other_than(name: str, before: np.ndarray, at: int) -> str:
    return f"is not the {name} of row {before[at]:,}"


def _comes_or_goes(chunk: CheckedRows, links: RowPairs, here: np.ndarray, next: np.ndarray) -> bool:
    """Some episode comes to zero or leaves it, and the row before or behind agrees."""
    inside = links.before >= chunk.start
    before, after = links.before[inside] - chunk.start, links.after[inside] - chunk.start
    comes = ~here[before] & next[before] & here[after]
    goes = here[before] & ~next[before] & ~here[after]
    return bool((comes | goes).any())
