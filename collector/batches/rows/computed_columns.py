"""Columns that the collector computes from the other columns of a row.

An entry in `COMPUTED_COLUMNS` adds such a column. It is stored, yielded and read like the columns
of the environment, whichever path the rows take.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.storage.rows.keys import DONE, NEXT_VALID, Key

Columns = Callable[[Key], NDArray[Any]]
"""Returns a column of rows, ``[row, ...]``, by its key."""


@dataclass(frozen=True)
class ComputedColumn:
    """A column with one number per row."""

    key: Key
    dtype: torch.dtype
    compute: Callable[[Columns], NDArray[Any]]
    """Takes a function that returns the other columns, and returns the values ``[row]``.

    It may be called with slots that are not transitions; their values are not used.
    """
    is_in: Callable[[SlabPlan], bool] = lambda plan: True
    """Returns True if rows of a plan have the column."""
    by_extension: bool = False
    """True if the extension computes it too, as a word of its ``NUMBERING`` table."""


COMPUTED_COLUMNS: list[ComputedColumn] = [
    ComputedColumn(
        NEXT_VALID,
        torch.bool,
        lambda column: np.logical_not(column(DONE).reshape(-1)),
        is_in=lambda plan: plan.lost_finals,
        by_extension=True,
    ),
]


def computed_columns(plan: SlabPlan) -> Sequence[ComputedColumn]:
    """Return the computed columns of the rows of ``plan``."""
    return [each for each in COMPUTED_COLUMNS if each.is_in(plan)]
