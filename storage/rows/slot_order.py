"""Slices of a ring, slot by slot, and the order in which their rows were written.

In a ring that began again the newest rows come before the oldest. Code that indexes a slice needs
them in that order, and code that appends them needs the oldest first: so such a slice says which
rows it has.
"""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDictBase

from tallyroll.storage.rows.origin import numbers_of


def in_all_slots(slots: slice, first: int, ring: int) -> np.ndarray:
    """Return the numbers of the rows in the slots of a full ring, ``first`` the oldest."""
    return first + (np.arange(ring)[slots] - first) % ring


def oldest_first(rows: TensorDictBase) -> TensorDictBase:
    """Return the rows [n, ...] in the order of their numbers, where they say the number of each."""
    numbers = numbers_of(rows)
    if numbers is None or (numbers[1:] >= numbers[:-1]).all():
        return rows
    return rows[torch.from_numpy(np.argsort(numbers, kind="stable"))]
