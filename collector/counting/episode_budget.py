"""Episode budget: the transitions of the first E episodes that start. Pure functions of counts."""

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.counting.transitions import Mask, lane_major
from tallyroll.storage.trajectories.lane_stretches import LaneOrder


class EpisodeBudget:
    """Selects exactly the first ``total`` episodes to start, and all of their transitions.

    Episodes are ranked by the slot of their first transition, then by lane. So the choice does not
    depend on their length. Choosing the first episodes to *end* would favour short ones.
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
        """Return how many of ``lanes``, whose next slot is a transition, begin an episode in it."""
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
        # An episode begins after the transition that ended the previous episode in its lane.
        begins = order.carry(over, self._fresh)
        rank = self.started + np.cumsum(_at(index, begins, transitions.shape))
        admitted = order.since(~begins, rank.take(index) <= self.total, self._open)
        order.keep(admitted, self._open)
        self.started = min(self.total, int(rank[-1]))
        self.completed += int((admitted & over).sum())
        return _at(index, admitted, transitions.shape)

    def grant(self, episodes: int) -> None:
        """Add episodes to the budget."""
        self.total += episodes

    def cut(self, lanes: NDArray[np.bool_]) -> None:
        """Replace the open episodes of ``lanes``, which a fault has cut, by later episodes."""
        self.started -= int((lanes & self._open & ~self._fresh).sum())
        self._fresh |= lanes
        self._open &= ~lanes

    def revoke(self) -> None:
        """Begin a budget without episodes, to which :meth:`grant` adds some."""
        self.total = 0
        self.restart(0)

    def restart(self, delivered: int) -> None:
        """Begin a new episode in every lane; only the ``delivered`` complete ones still count."""
        self.started = self.completed = delivered
        self._fresh[:] = True
        self._open[:] = False


def _at(index: NDArray[np.intp], flags: NDArray[np.bool_], shape: tuple[int, ...]) -> Mask:
    """Return ``[time, lane]`` with ``flags`` at the slots ``index``, and False elsewhere."""
    slots = np.zeros(shape, np.bool_)
    slots.put(index, flags)
    return slots
