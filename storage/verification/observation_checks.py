"""Compare each next observation with the following row's, and find lost ones. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from tallyroll.storage.engine.ring import slots_of
from tallyroll.storage.rows.keys import NEXT, Key, spell
from tallyroll.storage.rows.schema import Column
from tallyroll.storage.verification.findings import Findings, Place
from tallyroll.storage.verification.lane_checks import CheckedRows, RowPairs
from tallyroll.storage.verification.value_checks import batches, words, zero_rows

__all__ = ["ObservationChecks", "observations_of"]

_FLAGS = {"done", "terminated", "truncated", "reward"}
_FEW_VALUES, _SHARE = 16, 1 / 4
"""Of so few whole numbers some ends are all zero by chance; more than this share are not."""


def observations_of(columns: Mapping[Key, Column]) -> list[Key]:
    """Keys of observations: columns that occur alike at the root and under ``next``."""
    found = []
    for key, column in columns.items():
        after = columns.get((NEXT, *key))
        alike = after and (after.dtype, after.shape) == (column.dtype, column.shape)
        if alike and key[0] != NEXT and key[-1] not in _FLAGS:
            found.append(key)
    return found


@dataclass
class _Observation:
    """One observation, as `words` [slots, k], and what is known of its zeros."""

    key: Key
    here: np.ndarray
    next: np.ndarray
    column: Column
    array: np.ndarray
    """As ``next``, but as the values that they are."""
    flags: bool = False
    """All values are 0 or 1, as far as the rows were looked at: a mask, perhaps."""
    few: bool = False
    """A row is a few whole numbers, all of which may be zero by chance."""
    ends: int = 0
    """Ends whose final observation is there."""
    turned: int = 0
    """Those at which it is zero, and was not before."""
    zero_midway: bool = False
    """An episode comes to zero, or leaves it, without ending there."""
    zero_ends: Findings = field(default_factory=Findings)
    zero_with_all: Findings = field(default_factory=Findings)
    """Those of its zeros at ends where all other observations are zero too."""

    @property
    def values(self) -> int:
        """Values a row."""
        return math.prod(self.column.shape)

    def look_for_flags(self, rows: slice) -> None:
        """Take notice of values in these slots that are neither 0 nor 1."""
        for part in batches(rows.stop - rows.start, self.array.strides[0]) if self.flags else ():
            if (self.array[rows][part] >> 1).any():
                self.flags = False
                return


class ObservationChecks:
    """Follows the observations in a collector's rows.

    Zero is a value like any other where the rows show how an episode came to it or left it.
    Where they do not, it looks like a row that was never written, or a final observation that
    was lost. Flags that are all off at an end, such as the mask of actions of a player that has
    none left, are values like others: bools always, whole numbers that are only 0 and 1 where
    another observation is not zero there. A final observation that is lost is lost with all its
    parts. And of a few whole numbers all may be zero by chance, at few ends.

    Args:
        columns: the storage's columns.
        arrays: their rows, slot by slot.
        ring: slots of the ring, 0 without one.
    """

    def __init__(
        self, columns: Mapping[Key, Column], arrays: Mapping[Key, np.ndarray], ring: int
    ) -> None:
        self._ring = ring
        self._observations = [
            _Observation(
                key,
                words(arrays[key]),
                words(arrays[(NEXT, *key)]),
                columns[key],
                arrays[(NEXT, *key)],
                flags=_is_whole(columns[key]),
                few=_is_whole(columns[key]) and math.prod(columns[key].shape) <= _FEW_VALUES,
            )
            for key in observations_of(columns)
        ]
        self._rows = self._zero_rows = 0
        self._zero_state = False
        """Some episode comes to a state in which all is zero, or leaves it."""
        self._zeros = Findings()

    def check_links(self, chunk: CheckedRows, links: RowPairs, findings: Findings) -> None:
        """Compare rows that follow one another; the later ones are in ``chunk``."""
        before, after = slots_of(links.before, self._ring), slots_of(links.after, self._ring)
        for each in self._observations:
            for part in batches(len(before), each.here.strides[0]):
                left, right = each.next.take(before[part], 0), each.here.take(after[part], 0)
                if (differs := left != right).any():
                    where = part.start + np.flatnonzero(differs.any(axis=1))
                    self._report(each, chunk, links, where, findings)

    @staticmethod
    def _report(
        each: _Observation,
        chunk: CheckedRows,
        links: RowPairs,
        where: np.ndarray,
        findings: Findings,
    ) -> None:
        here, next = spell(each.key), spell((NEXT, *each.key))

        def place_of(i: int) -> Place:
            row = int(links.after[where[i]])
            what = f"is not the {next} of row {int(links.before[where[i]]):,}"
            return chunk.place(row - chunk.start, what, here)

        message = f"{next} is not the {here} of the row that follows in the trajectory"
        findings.add_rows("observations", message, links.after[where], place_of)

    def check_zeros(self, chunk: CheckedRows, links: RowPairs, valid: np.ndarray | None) -> None:
        """Look for zeros in a chunk, whose rows lie in consecutive slots.

        Args:
            chunk: the rows.
            links: rows that follow one another.
            valid: which rows [n] hold their true next observation, None if all do.
        """
        count = len(chunk.ids)
        first = slots_of(chunk.start, self._ring)
        all_here, all_next = np.ones(count, np.bool_), np.ones(count, np.bool_)
        final = chunk.ended if valid is None else chunk.ended & valid
        turned: list[tuple[_Observation, np.ndarray]] = []
        for each in self._observations:
            here = zero_rows(each.here[first : first + count])
            next = zero_rows(each.next[first : first + count])
            if (turns := _turns_at_ends(each, chunk, here, next, final)).any():
                turned.append((each, turns))
                each.turned += int(turns.sum())
                each.look_for_flags(slice(first, first + count))
            each.ends += int(final.sum())
            all_here &= here
            all_next &= next
        for each, turns in turned:
            _report_ends(each.zero_ends, each, chunk, turns)
            _report_ends(each.zero_with_all, each, chunk, turns & all_next)
        self._rows += count
        both: np.ndarray = all_here & all_next
        if both.any():
            self._zero_rows += int(both.sum())
            message = "all observations are zero, now and next, and no other row leads there"
            chunk.report(self._zeros, "zeros", message, both, lambda at: "was it ever written?")
        if not self._zero_state and (all_here.any() or all_next.any()):
            self._zero_state = _comes_or_goes(chunk, links, all_here, all_next)

    def finish(self, findings: Findings) -> None:
        """Judge the zeros by what was seen of them all."""
        sizes = [each.values for each in self._observations]
        if sum(sizes) > 1 and self._zero_rows < self._rows and not self._zero_state:
            findings.merge(self._zeros)
        for each in self._observations:
            if each.few and each.turned <= _SHARE * each.ends:
                continue
            # A single zero is a number like others, and so are flags that are all off.
            if each.values > 1 and not each.zero_midway and each.column.dtype != torch.bool:
                findings.merge(each.zero_with_all if each.flags else each.zero_ends)


def _is_whole(column: Column) -> bool:
    return column.numpy_dtype.kind in "iu" and column.dtype != torch.bfloat16


def _turns_at_ends(
    each: _Observation, chunk: CheckedRows, here: np.ndarray, next: np.ndarray, final: np.ndarray
) -> np.ndarray:
    """Entries whose observation is zero at the end of an episode only, [n]."""
    turns: np.ndarray = next & ~here
    if (turns & ~chunk.ended).any() or (here & ~next).any():
        each.zero_midway = True
    turned: np.ndarray = turns & final
    return turned


def _report_ends(
    findings: Findings, each: _Observation, chunk: CheckedRows, where: np.ndarray
) -> None:
    if where.any():
        name = spell((NEXT, *each.key))
        message = f"{name} is all zero at ends of episodes, and nowhere else"
        chunk.report(findings, "finals", message, where, lambda at: "was it lost?")


def _comes_or_goes(chunk: CheckedRows, links: RowPairs, here: np.ndarray, next: np.ndarray) -> bool:
    """Some episode comes to zero or leaves it, and the row before or behind agrees."""
    inside = links.before >= chunk.start
    before, after = links.before[inside] - chunk.start, links.after[inside] - chunk.start
    comes = ~here[before] & next[before] & here[after]
    goes = here[before] & ~next[before] & ~here[after]
    return bool((comes | goes).any())
