"""Does every row begin with what the row before it says came next? And zeros among them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from .findings import Findings, Place
from .keys import NEXT
from .lane_checks import Chunk, Links
from .ring import slots_of
from .rows import Key, spell
from .schema import Column
from .value_checks import batches, words, zero_rows

__all__ = ["ObservationChecks", "observations_of"]

_FLAGS = {"done", "terminated", "truncated", "reward"}


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
    values: int
    """Values a row."""
    zero_midway: bool = False
    """An episode comes to zero, or leaves it, without ending there."""
    zero_ends: Findings = field(default_factory=Findings)


class ObservationChecks:
    """Follows the observations in a collector's rows.

    Zero is a value like any other where the rows show how an episode came to it or left it.
    Where they do not, it looks like a row that was never written, or a final observation that
    was lost.

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
                key, words(arrays[key]), words(arrays[(NEXT, *key)]), math.prod(columns[key].shape)
            )
            for key in observations_of(columns)
        ]
        self._rows = self._zero_rows = 0
        self._zero_state = False
        """Some episode comes to a state in which all is zero, or leaves it."""
        self._zeros = Findings()

    def check_links(self, chunk: Chunk, links: Links, findings: Findings) -> None:
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
        each: _Observation, chunk: Chunk, links: Links, where: np.ndarray, findings: Findings
    ) -> None:
        here, next = spell(each.key), spell((NEXT, *each.key))

        def place_of(i: int) -> Place:
            row = int(links.after[where[i]])
            what = f"is not the {next} of row {int(links.before[where[i]]):,}"
            return chunk.place(row - chunk.start, what, here)

        message = f"{next} is not the {here} of the row that follows in the trajectory"
        findings.add_rows("observations", message, links.after[where], place_of)

    def check_zeros(self, chunk: Chunk, links: Links, valid: np.ndarray | None) -> None:
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
        for each in self._observations:
            here = zero_rows(each.here[first : first + count])
            next = zero_rows(each.next[first : first + count])
            _look_at_ends(each, chunk, here, next, final)
            all_here &= here
            all_next &= next
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
            # A single zero is a number like others.
            if each.values > 1 and not each.zero_midway:
                findings.merge(each.zero_ends)


def _look_at_ends(
    each: _Observation, chunk: Chunk, here: np.ndarray, next: np.ndarray, final: np.ndarray
) -> None:
    if not next.any() and not here.any():
        return
    turns: np.ndarray = next & ~here
    if (turns & ~chunk.ended).any() or (here & ~next).any():
        each.zero_midway = True
    name = spell((NEXT, *each.key))
    message = f"{name} is all zero at ends of episodes, and nowhere else"
    chunk.report(each.zero_ends, "finals", message, turns & final, lambda at: "was it lost?")


def _comes_or_goes(chunk: Chunk, links: Links, here: np.ndarray, next: np.ndarray) -> bool:
    """Some episode comes to zero or leaves it, and the row before or behind agrees."""
    inside = links.before >= chunk.start
    before, after = links.before[inside] - chunk.start, links.after[inside] - chunk.start
    comes = ~here[before] & next[before] & here[after]
    goes = here[before] & ~next[before] & ~here[after]
    return bool((comes | goes).any())
