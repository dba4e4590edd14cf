"""Lossless casts of arrays, which report the values that they would change. Pure functions.

An observation keeps the dtype of its space. For values of another dtype, `ExactRow.array`
(``envs/exact.py``) converts those of one lane, and `Results.array` (``envs/stepping/results.py``)
refuses those of all lanes together. The storage converts nothing. Rewards: `fitting`
(``envs/stepping/arrays.py``), `reward_of` (``envs/exact.py``), and ``put_reward`` in
``native/_step.c``.
"""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Mask = NDArray[np.bool_]

_WHOLE = "biu"


def cast(values: Array, dtype: np.dtype[Any]) -> tuple[Array, Mask | None]:
    """Cast ``values`` of a numeric dtype to ``dtype``.

    NaN stays NaN. An integer and the float of the same value count as equal, and so do ``True`` and
    1.

    Returns:
        The cast values, and a mask of the values that changed. The mask is None if no value
        changed.
    """
    if values.dtype == dtype:
        return values, None
    if _always(values.dtype, dtype):
        with np.errstate(invalid="ignore"):  # raised by signaling NaNs
            return values.astype(dtype), None
    if values.dtype.kind in _WHOLE and dtype.kind in _WHOLE:
        found = values.astype(dtype)  # casts of integers do not warn
        if (found == values).all():
            return found, None
    lost = np.zeros(values.shape, np.bool_)
    if values.dtype.kind == "c" and dtype.kind != "c":
        lost |= values.imag != 0
        values = values.real
    with np.errstate(all="ignore"):
        fits = _fits(values, dtype)
        found = np.where(fits, values, np.zeros((), values.dtype)).astype(dtype)
    lost |= ~fits
    return found, lost if lost.any() else None


@cache
def _always(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Return True if every value fits; NumPy wrongly calls casts of int64 to floats safe."""
    wide = source.kind in "iu" and source.itemsize == 8 and target.kind in "fc"
    return not wide and np.can_cast(source, target, "safe")


def _fits(values: Array, dtype: np.dtype[Any]) -> Mask:
    kind = values.dtype.kind
    if dtype.kind == "b":
        return np.asarray((values == 0) | (values == 1))
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if kind == "f":
            # Powers of two, which floats represent exactly, unlike the largest int64.
            low, beyond = np.float64(limits.min), _beyond(dtype)
            wide = values if values.dtype.itemsize > 8 else values.astype(np.float64)
            return np.asarray((wide >= low) & (wide < beyond) & (np.trunc(wide) == wide))
        own = np.iinfo(values.dtype)
        least, most = max(limits.min, own.min), min(limits.max, own.max)
        return np.asarray((values >= least) & (values <= most))
    found = values.astype(dtype)
    if kind in "iu":
        real = found.real
        beyond = _beyond(values.dtype)
        inside = np.isfinite(real) & (real < beyond)
        return np.asarray(inside & (np.where(inside, real, 0).astype(values.dtype) == values))
    return _same(values.real, found.real) & _same(values.imag, found.imag)


def _beyond(dtype: np.dtype[Any]) -> np.float64:
    """Return the power of two above all integers of ``dtype``."""
    return np.float64(np.iinfo(dtype).max) + np.float64(1)


def _same(one: Array, other: Array) -> Mask:
    return np.asarray((one == other) | (np.isnan(one) & np.isnan(other)))
