"""Check the values of a few slots, one slot after the other."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from tallyroll.collector.batches.checks.ranges import Range
from tallyroll.collector.native.kernel import KINDS, compiled, in_order
from tallyroll.collector.slab.slab import Slab
from tallyroll.storage.engine.kernel import table_of

_SMALL_NBYTES = 2**16


class _SlotCheck:
    """A `Range` whose bounds have the shape of a slot, so that no comparison broadcasts."""

    __slots__ = ("_array", "_high", "_inside", "_low", "_size")

    def __init__(self, check: Range, slab: Slab) -> None:
        self._array = slab.array(check.key)
        slot, dtype = self._array.shape[1:], self._array.dtype
        self._low, self._high = (
            np.broadcast_to(bound, slot).astype(dtype, order="C")
            for bound in (check.low, check.high)
        )
        self._inside = np.zeros((2, *slot), np.bool_)
        self._size = self._inside.size

    @staticmethod
    def fits(check: Range, slab: Slab) -> bool:
        """Return True if slots are so small that this check is the faster one."""
        return check.key in slab.flat and slab.array(check.key)[:1].nbytes <= _SMALL_NBYTES

    @property
    def words(self) -> list[Any]:
        """The table words that describe the check to `StepKernel.are_inside`."""
        words: list[Any] = in_order(
            "CHECK",
            values=self._array,
            dtype=KINDS.get(self._array.dtype, -1),
            count=self._low.size,
            low=self._low,
            high=self._high,
        )
        return words

    def is_good(self, at: int) -> bool:
        """Return True if the values of slot ``at`` are in range."""
        values, inside = self._array[at], self._inside
        np.greater_equal(values, self._low, inside[0])
        np.less_equal(values, self._high, inside[1])
        return bool(np.count_nonzero(inside) == self._size)


class SlotChecks:
    """Checks all columns of a slab slot by slot, if that is faster."""

    def __init__(self, ranges: Sequence[Range], slab: Slab) -> None:
        ranges = [each for each in ranges if each.key in slab.columns]
        self._kernel = compiled()
        self.fit = all(_SlotCheck.fits(each, slab) for each in ranges)
        self._checks = [_SlotCheck(each, slab) for each in ranges] if self.fit else []
        self.table = table_of(chain.from_iterable(check.words for check in self._checks))

    def are_good(self, used: int) -> bool:
        """Return True if all values of the first ``used`` slots are in range.

        False means that a value is out of range, or that this object cannot check the values.
        """
        if not self.fit:
            return False
        if self._kernel is not None:
            return self._kernel.are_inside(self.table, used)
        return all(check.is_good(at) for check in self._checks for at in range(used))
