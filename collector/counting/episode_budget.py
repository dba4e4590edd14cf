"""An episode budget: which transitions belong to the first E episodes that were started. Pure."""

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.counting.transitions import Mask, starts


class EpisodeBudget:
    """Lets through exactly the ``total`` episodes that start first, whole.

    Episodes are ranked by (slot of their first transition, lane), so which ones are taken does
    not depend on how long they last: taking those that *end* first would favour short ones.
    """

    def __init__(self, total: int, lanes: int) -> None:
        self.total = total
        self.started = 0
        self.completed = 0
        self._fresh = np.ones(lanes, np.bool_)
        self._open: NDArray[np.bool_] = np.zeros(lanes, np.bool_)

    @property
    def finished(self) -> bool:
        """Every episode of the budget has ended."""
        return self.completed >= self.total

    def starting(self, lanes: NDArray[np.bool_]) -> int:
        """Number of ``lanes``, whose next slot is a transition, that begin an episode with it."""
        return int((lanes & self._fresh).sum())

    def upcoming(self, lanes: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Those of ``lanes`` whose next transition, now, belongs to the budget's episodes."""
        fresh = lanes & self._fresh
        admitted = fresh & (self.started + np.cumsum(fresh) <= self.total)
        upcoming: NDArray[np.bool_] = admitted | (lanes & ~self._fresh & self._open)
        return upcoming

    def wanted(self, transitions: Mask, ended: Mask) -> Mask:
        """Those of ``transitions`` ``[time, lane]`` that belong to the budget's episodes."""
        if not len(transitions):
            return transitions
        first = starts(transitions, ended, self._fresh)
        rank = self.started + np.cumsum(first).reshape(first.shape)
        admitted = first & (rank <= self.total)
        last_start = np.maximum.accumulate(
            np.where(first, np.arange(len(first))[:, None], -1), axis=0
        )
        lane = np.arange(first.shape[1])
        admitted_here = np.where(last_start >= 0, admitted[last_start, lane], self._open)
        wanted: Mask = transitions & admitted_here
        self.started = min(self.total, self.started + int(first.sum()))
        self.completed += int((wanted & ended).sum())
        self._open = admitted_here[-1]
        self._fresh = self._freshness(transitions, ended)
        return wanted

    def _freshness(self, transitions: Mask, ended: Mask) -> NDArray[np.bool_]:
        """Whether each lane's next transition opens an episode."""
        steps = np.arange(len(transitions))[:, None]
        last = np.where(transitions, steps, -1).max(axis=0)
        lane = np.arange(transitions.shape[1])
        return np.where(last >= 0, ended[last, lane], self._fresh)

    def cut(self, lanes: NDArray[np.bool_]) -> None:
        """The episodes under way in ``lanes`` were cut by a fault: others take their places."""
        self.started -= int((lanes & self._open & ~self._fresh).sum())
        self._fresh |= lanes
        self._open &= ~lanes

    def restart(self, delivered: int) -> None:
        """Every lane begins a new episode; all but the ``delivered`` whole ones are run again."""
        self.started = self.completed = delivered
        self._fresh[:] = True
        self._open[:] = False
