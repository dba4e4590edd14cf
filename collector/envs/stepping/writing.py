"""The compiled way of a step's result to its slot, where that has one column of each kind."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.envs.system import Array
from tallyroll.storage.engine.kernel import compiled, table_of

Putting: TypeAlias = Callable[[Array, Array, Array, Array], int]
"""Writes the result of a step to a slot, and returns how many lanes ended.

That is observation, reward, terminated, truncated. Where they are not as the slot is it returns
-1, whatever it wrote.
"""


def putting(
    row: NDArray[Any],
    payoff: NDArray[Any],
    terminated: NDArray[Any],
    truncated: NDArray[Any],
    root: NDArray[Any],
) -> Putting | None:
    """Write to these arrays of a slot; ``root`` may be ``row``.

    None: there is no extension, or it does not know them: contiguous ones, and rewards of floats.
    """
    places = row, root, payoff, terminated, truncated
    floats = np.dtype(np.float32), np.dtype(np.float64)
    kernel = compiled()
    if kernel is None or payoff.ndim > 1 or payoff.dtype not in floats:
        return None
    if not all(each.flags.c_contiguous for each in places):
        return None
    words = [each.ctypes.data for each in places]
    if words[1] == words[0]:
        words[1] = 0
    table = table_of([*words, payoff.dtype == np.float64, len(terminated), *row.shape])
    return partial(kernel.put_step, table, row.data.format.encode())
