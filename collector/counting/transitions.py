"""Distinguish transitions from reset slots, and find the first N transitions. Pure functions.

Axes are always ``[time, lane]``: one row per batched step call, one column per lane.

===========  ==============================  ===========================================
autoreset    where the final observation is  which slots are transitions
===========  ==============================  ===========================================
DISABLED     returned by the step            all; the driver resets by mask afterwards
SAME_STEP    ``info["final_obs"]``           all
NEXT_STEP    returned by the step            all but the one after an end (a reset slot)
===========  ==============================  ===========================================

`put_finals` (`collector/envs/stepping/ends.py`) writes a final observation to its row. The
docstring of that module names the other places.

`next_step_transitions` is the rule for NEXT_STEP. These apply it on their own:
`ArrivingLanes._receive` for lanes that return in any order, `SystemEnv._step` for TorchRL's steps,
and `is_pending` in ``native/_store.c`` for small batches. `CopiedLanes` reads the marks of
`SystemEnv._step`.

The semantics are those of Gymnasium's ``AutoresetMode``. The project's design notes list the
measured behaviour of each system.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]


def next_step_transitions(ended: Mask, pending: Mask) -> Mask:
    """Return a mask of the slots of a NEXT_STEP source that are transitions.

    Args:
        ended: marks ``[time, lane]`` of slots that reported terminated or truncated.
        pending: marks ``[lane]`` of lanes whose episode ended in the slot before the first slot.

    Returns:
        Marks ``[time, lane]``, False in reset slots, which follow an end.
    """
    transitions = np.empty_like(ended)
    if len(ended):
        np.logical_not(pending, out=transitions[0])
        np.logical_not(ended[:-1], out=transitions[1:])
    return transitions


def first_in_slot_order(transitions: Mask, count: int) -> Mask:
    """Return a mask of the first ``count`` transitions: earlier slot first, then lower lane.

    Args:
        transitions: marks of transitions ``[time, lane]``.
        count: the number of transitions to take; if there are fewer, all are taken.

    Returns:
        Marks ``[time, lane]`` with ``min(count, transitions.sum())`` True entries.
    """
    if count >= np.count_nonzero(transitions):
        return transitions
    per_slot = np.cumsum(transitions.sum(axis=1))
    taken = transitions.copy()
    boundary = int(np.searchsorted(per_slot, count, side="left"))
    before = int(per_slot[boundary - 1]) if boundary else 0
    taken[boundary] &= np.cumsum(transitions[boundary]) <= count - before
    taken[boundary + 1 :] = False
    return taken


def lane_major(taken: Mask) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
    """Return rows in layout order: lane by lane, and by time within a lane.

    Args:
        taken: marks ``[time, lane]`` of the slots that are rows.

    Returns:
        ``index`` into the flattened ``[time * lane]`` slots, and the ``lane`` of each row (int32).
    """
    slots, lanes = taken.shape
    if slots == 1:
        index = np.flatnonzero(taken)
        return index, index.astype(np.int32)
    lane = np.repeat(np.arange(lanes, dtype=np.int32), taken.sum(axis=0))
    flat = np.flatnonzero(taken.T)  # lane * slots + time
    index = (flat - lane * slots) * lanes + lane
    return index, lane


def whole_slots(slots: int, lanes: int) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
    """Return the result of :func:`lane_major` for slots that are all taken.

    Other callers may share the index: do not write to it.
    """
    index, lane = (_few_slots if slots * lanes <= _FEW else _slots)(slots, lanes)
    return index, lane.copy()


def _slots(slots: int, lanes: int) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
    index = np.arange(slots * lanes).reshape(slots, lanes).T.reshape(-1)
    return index, np.repeat(np.arange(lanes, dtype=np.int32), slots)


_FEW = 4096
_few_slots = lru_cache(maxsize=64)(_slots)


# --- slots whose columns are lanes in any order ---------------------------------------------------


def by_lane(taken: Mask, lane: NDArray[np.int32]) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
    """Return the result of :func:`lane_major` if ``lane`` ``[time, column]`` has the lane of each
    entry.
    """
    index = np.flatnonzero(taken)
    lanes = lane.reshape(-1)[index]
    order = np.argsort(lanes, kind="stable")
    return index[order], lanes[order]


def in_lanes(flags: Mask, lane: NDArray[np.int32], lanes: int) -> Mask:
    """Return ``flags`` ``[time, column]`` as ``[time, lane]``; a slot has each lane once."""
    found = np.zeros((len(flags), lanes), np.bool_)
    at, column = np.nonzero(flags)
    found[at, lane[at, column]] = True
    return found


def in_columns(flags: Mask, lane: NDArray[np.int32]) -> Mask:
    """Return ``flags`` ``[time, lane]`` as ``[time, column]``."""
    return np.take_along_axis(flags, lane.astype(np.intp), axis=1)
