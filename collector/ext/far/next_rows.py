"""Transfer of next observations, which are sent only if no other slot has them.

Unless an episode ended, the following slot begins with the same bits.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.run_plan import Decision, sending
from tallyroll.storage.ext.packed.stacks import same_bits
from tallyroll.storage.rows.keys import NEXT, Key

Rows = dict[Key, NDArray[Any]]
"""Rows of a slab by key, from some slot on, ``[slot, lane, ...]``."""


class Others(NamedTuple):
    """Next observations of one key that the following slot does not contain."""

    at: NDArray[np.bool_]
    """Mask of the places of the observations, ``[slot, lane]``."""
    rows: NDArray[Any]


def decide(plan: SlabPlan) -> tuple[Decision, Collection[Key]]:
    """Return how next observations are sent, and the keys that `pop_next_rows` removes."""
    made = {
        key: _sent(plan, column.dtype.itemsize * math.prod(column.shape))
        for key, column in plan.layout.items()
        if key[0] == NEXT and plan.layout.get(key[1:]) == column
    }
    once = [key for key, decision in made.items() if decision.way == "once"]
    of_all = next(iter(made[key] for key in (*once, *made)), _sent(plan, 0))
    return of_all, [] if plan.shared else once


def _sent(plan: SlabPlan, nbytes: int) -> Decision:
    return sending(one_memory=plan.shared, arrivals=plan.arrivals > 0, nbytes=nbytes)


def pop_next_rows(rows: Rows, keys: Collection[Key]) -> dict[Key, Others]:
    """Remove next observations from ``rows``; return those that no other slot has."""
    found = {}
    for key in keys:
        after, begins = rows.pop(key), rows[key[1:]]
        slots, lanes, *shape = after.shape
        known = max(0, min(slots, len(begins) - 1))  # slots whose following slot is available
        others = np.ones((slots, lanes), np.bool_)
        flat = (known * lanes, *shape)
        same = same_bits(after[:known].reshape(flat), begins[1 : known + 1].reshape(flat))
        others[:known] = ~same.reshape(known, lanes)
        found[key] = Others(others, after[others])
    return found


def put_back(memory: Rows, first: int, others: Mapping[Key, Others]) -> None:
    """Restore the next observations of slots from ``first`` on.

    All other rows must already be in ``memory``.
    """
    for key, (at, rows) in others.items():
        after = memory[key][first : first + len(at)]
        begins = memory[key[1:]][first + 1 : first + 1 + len(at)]
        after[: len(begins)] = begins
        after[at] = rows
