"""Powers with a fixed exponent by table lookup, with bit-identical results in C and NumPy.

A number is 2^e * f with 1 <= f < 2, and f = c * (1 + r), where c is the midpoint of one of 128
equal parts of this range. Its power is therefore (2^e)^a * c^a * (1 + r)^a. The table contains the
first two factors. The last factor is the series 1 + a r + a (a - 1) / 2 r^2 + ..., of which six
terms suffice because |r| is below 2^-8. `engine/_sum_tree.c` computes the series in the same order.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np

from tallyroll.storage.engine.kernel import in_order

LARGEST: Final = 2.0
"""The largest exponent for which six terms suffice. Larger exponents use `numpy.power`."""
_TERMS: Final = 6
_PARTS: Final = 128
_EXPONENTS: Final = 2048
_FRACTION_BITS: Final = 52
_PART_BITS: Final = 45
_ONE: Final = 0x3FF << _FRACTION_BITS
_FLOAT64: Final = np.finfo(np.float64)


class Powers:
    """Powers of priorities with a constant added to each.

    Args:
        exponent: the exponent, 0 or more.
        added: the constant that is added to each priority first.
    """

    def __init__(self, exponent: float, added: float) -> None:
        self._exponent, self._added = exponent, added
        self._table: np.ndarray | None = None
        self.address: int | None = None
        """The address of the table; None if the exponent is too large for a table."""
        if exponent <= LARGEST:
            series = np.ones(_TERMS)
            for term in range(1, _TERMS):
                series[term] = series[term - 1] * (exponent - term + 1) / term
            middle = 1 + (np.arange(_PARTS) + 0.5) / _PARTS
            with np.errstate(over="ignore", under="ignore"):
                exponents = np.arange(-1023, _EXPONENTS - 1023)
                whole = np.exp2(np.longdouble(exponent) * exponents).astype(np.float64)
            self._series, self._inverse = series, 1 / middle
            self._middle, self._whole = middle**exponent, whole
            parts = in_order(
                "POWERS",
                added=np.array([added]),
                series=self._series,
                inverse=self._inverse,
                middle=self._middle,
                whole=self._whole,
            )
            self._table = np.concatenate(parts)
            self.address = self._table.ctypes.data

    def of(self, priorities: np.ndarray) -> np.ndarray:
        """Return (priority + added)^exponent as float32 [n] for priorities in float64 [n]."""
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            numbers = priorities + self._added
            if self._table is None:
                return np.power(numbers, self._exponent).astype(np.float32)
            normal = (numbers >= _FLOAT64.tiny) & (numbers <= _FLOAT64.max)
            if normal.all():
                return self._looked_up(numbers).astype(np.float32)
            found = np.power(numbers, self._exponent)
            found[normal] = self._looked_up(numbers[normal])
            return found.astype(np.float32)

    def _looked_up(self, numbers: np.ndarray) -> np.ndarray:
        """Return the powers of normal (not subnormal) floats."""
        bits = numbers.view(np.int64)
        part = bits >> _PART_BITS & _PARTS - 1
        fraction = bits & (1 << _FRACTION_BITS) - 1 | _ONE
        middle = fraction >> _PART_BITS << _PART_BITS | 1 << _PART_BITS - 1
        off = (fraction.view(np.float64) - middle.view(np.float64)) * self._inverse[part]
        found = np.full(len(numbers), self._series[-1])
        for term in self._series[-2::-1]:
            found = found * off + term
        powers: np.ndarray = found * self._middle[part] * self._whole[bits >> _FRACTION_BITS]
        return powers


@lru_cache(maxsize=8)
def powers_of(exponent: float, added: float) -> Powers:
    """Return `Powers` from a cache of the most recently used ones."""
    return Powers(exponent, added)
