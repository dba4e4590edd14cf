"""Slices of a ring in slot order, and the order in which their rows were written.

After a ring has wrapped, the newest rows precede the oldest. Code that indexes a slice needs slot
order, and code that appends the rows needs the oldest first. Such a slice therefore carries its row
numbers.
"""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDictBase

from tallyroll.storage.rows.origin import numbers_of


def in_all_slots(slots: slice, first: int, ring: int) -> np.ndarray:
    """Return the numbers of the rows in the slots of a full ring; ``first`` is the oldest."""
    return first + (np.arange(ring)[slots] - first) % ring


def oldest_first(rows: TensorDictBase) -> TensorDictBase:
    """Return the rows [n, ...] ordered by number, if each of them has a number."""
    numbers = numbers_of(rows)
    if numbers is None or (numbers[1:] >= numbers[:-1]).all():
        return rows
    return rows[torch.from_numpy(np.argsort(numbers, kind="stable"))]
