"""An episode budget: the transitions of the first E episodes that start. Pure."""

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.counting.transitions import Mask, lane_major
from tallyroll.storage.trajectories.lane_stretches import LaneOrder


class EpisodeBudget:
    """Selects exactly the first ``total`` episodes to start, and all of their transitions.

    Episodes are ranked by (slot of their first transition, lane), so the choice does not depend on
    their length: choosing the first ones to *end* would favour short episodes.
    """

    def __init__(self, total: int, lanes: int) -> None:
        self.total, self.lanes = total, lanes
        self.started = 0
        self.completed = 0
        self._fresh = np.ones(lanes, np.bool_)
        self._open: NDArray[np.bool_] = np.zeros(lanes, np.bool_)

    @property
    def finished(self) -> bool:
        """True if every episode of the budget has ended."""
        return self.completed >= self.total

    def starting(self, lanes: NDArray[np.bool_]) -> int:
        """Return how many ``lanes``, whose next slot is a transition, begin an episode with it."""
        return int((lanes & self._fresh).sum())

    def upcoming(self, lanes: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the ``lanes`` whose next transition belongs to the budget's episodes."""
        fresh = lanes & self._fresh
        admitted = fresh & (self.started + np.cumsum(fresh) <= self.total)
        upcoming: NDArray[np.bool_] = admitted | (lanes & ~self._fresh & self._open)
        return upcoming

    def wanted(self, transitions: Mask, ended: Mask) -> Mask:
        """Return the ``transitions`` ``[time, lane]`` that belong to the budget's episodes."""
        index, lane = lane_major(transitions)
        if not len(index):
            return transitions
        order, over = LaneOrder.of(index, lane), ended.take(index)
        # An episode begins after the transition that ended the one before it in its lane.
        begins = order.carry(over, self._fresh)
        rank = self.started + np.cumsum(_at(index, begins, transitions.shape))
        admitted = order.since(~begins, rank.take(index) <= self.total, self._open)
        order.keep(admitted, self._open)
        self.started = min(self.total, int(rank[-1]))
        self.completed += int((admitted & over).sum())
        return _at(index, admitted, transitions.shape)

    def cut(self, lanes: NDArray[np.bool_]) -> None:
        """Replace the open episodes of ``lanes``, which a fault cut, by others."""
        self.started -= int((lanes & self._open & ~self._fresh).sum())
        self._fresh |= lanes
        self._open &= ~lanes

    def restart(self, delivered: int) -> None:
        """Begin a new episode in every lane; all but the ``delivered`` complete ones run again."""
        self.started = self.completed = delivered
        self._fresh[:] = True
        self._open[:] = False


def _at(index: NDArray[np.intp], flags: NDArray[np.bool_], shape: tuple[int, ...]) -> Mask:
    """``[time, lane]``, the flags of the slots ``index``, and False elsewhere."""
    slots = np.zeros(shape, np.bool_)
    slots.put(index, flags)
    return slots
