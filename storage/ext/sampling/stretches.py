"""Steps before and after rows in their trajectories. Pure.

A *stretch* are the rows of a trajectory that follow one another step by step, as far as they are
stored.
"""

from __future__ import annotations

import numpy as np

from tallyroll.storage.trajectories.row_index import RowIndex

_REACH, _MOST_REACH, _MOST_NUMBERS = 32, 2**12, 2**20


def ends_of(index: RowIndex, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the last row of each one's stretch, and how many steps it is after ``rows`` [n].

    It looks at as many rows as the stretches have left, of all ``rows`` at once.
    """
    last, left = rows.copy(), np.zeros(len(rows), np.int64)
    going, reach = np.arange(len(rows)), _REACH
    while len(going):
        size, more = max(1, _MOST_NUMBERS // reach), []
        for begin in range(0, len(going), size):
            part = going[begin : begin + size]
            onward = index.onward(last[part], reach)
            steps = (onward[1:] != onward[:-1]).sum(axis=0)  # the last row is repeated
            last[part] = onward[-1]
            left[part] += steps
            more.append(part[steps == reach - 1])
        going, reach = np.concatenate(more), min(2 * reach, _MOST_REACH)
    return last, left


def steps_before(index: RowIndex, rows: np.ndarray, first: int) -> np.ndarray:
    """Return how many rows from ``first`` on come before each of ``rows`` [n] in its stretch."""
    before, _ = index.places(rows)
    most = before.astype(np.int64)
    if not first:
        return most
    least, middle = np.zeros_like(most), most
    while True:
        there = index.back(rows, middle) >= first
        least, most = np.where(there, middle, least), np.where(there, most, middle - 1)
        if (least >= most).all():
            return least
        middle = (least + most + 1) >> 1
