"""The compiled way of a step's result to its slot, which has one column of rewards."""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tallyroll.storage.engine.kernel import compiled, table_of

Putting: TypeAlias = partial[int]
"""Writes the result of a step to a slot, and returns how many lanes ended.

That is observations, reward, terminated, truncated, and final observations or None. Where they are
not as the slot is it returns -1, whatever it wrote.
"""


def putting(
    rows: Sequence[NDArray[Any]],
    payoff: NDArray[Any],
    terminated: NDArray[Any],
    truncated: NDArray[Any],
    roots: Sequence[NDArray[Any]],
) -> Putting | None:
    """Write to these arrays of a slot; each of ``roots`` may be that of ``rows``.

    None: there is no extension, or it does not know them: contiguous ones, and rewards of floats.
    """
    floats = np.dtype(np.float32), np.dtype(np.float64)
    kernel = compiled()
    if kernel is None or payoff.ndim > 1 or payoff.dtype not in floats:
        return None
    if not all(each.flags.c_contiguous for each in (*rows, *roots, payoff, terminated, truncated)):
        return None
    words = [each.ctypes.data for each in (payoff, terminated, truncated)]
    words += [payoff.dtype == np.float64, len(terminated)]
    for row, root in zip(rows, roots, strict=True):
        place, other = row.ctypes.data, root.ctypes.data
        words += [place, 0 if other == place else other, row.ndim, *row.shape]
    formats = tuple(row.data.format.encode() for row in rows)
    return partial(kernel.put_step, table_of(words), formats)
