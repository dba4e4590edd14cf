"""Blocks of transitions whose values are as declared, or the fault that says which one is not."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from tallyroll.collector.batches.checks.value_checks import RangeChecks, step_of
from tallyroll.collector.batches.state.run_state import RunState
from tallyroll.collector.counting.ledger import post
from tallyroll.collector.envs.exact import RoundedWarning, rounding_of
from tallyroll.collector.errors import ValueRefused
from tallyroll.collector.rollout.actor import raised_by_policy
from tallyroll.collector.rollout.source import Block, TransitionSource
from tallyroll.collector.slab.progress import ROUNDED, rounding_on
from tallyroll.collector.slab.slab import Slab
from tallyroll.storage.rows.keys import Key


class CheckedBlocks:
    """Takes blocks from a source, and refuses those with values that are not as declared.

    Args:
        run: counts the events of each block.
        rollout: the source.
        checks: of values.
        rewards: columns of rewards.
        in_place: whether the policy sees what is in a slab.
    """

    def __init__(
        self,
        run: RunState,
        rollout: TransitionSource,
        checks: RangeChecks,
        rewards: Sequence[Key],
        *,
        in_place: bool,
    ) -> None:
        self._run, self._rollout, self._checks, self._in_place = run, rollout, checks, in_place
        self._rewards, self._has_warned = rewards, False

    def take(self, want: int, raised: BaseException | None = None) -> Block:
        """Return the next block; ``raised`` is what a fill raised before, and is raised here.

        The fault of an action is raised in the place of what its step raised.
        """
        try:
            if raised is not None:
                raise raised
            return self._rollout.block(want)
        except Exception as error:
            culprit = self._culprit_of(error)
            if culprit is not None:
                raise culprit from error
            raise

    def check(self, block: Block) -> None:
        """Count the events of ``block``, and raise if its values are not as declared."""
        post(self._run.ledger, block.entry)
        bad = self._checks.first_violation(block.slab, block.used, self._run.lanes)
        if bad is not None:
            raise bad.error
        for board in getattr(self._rollout, "boards", ()):  # sources of other packages have none
            if board[ROUNDED] > 0:
                self._warn_of_rounding(block, board)

    def _warn_of_rounding(self, block: Block, board: Any) -> None:
        """Warn, once a run, of the reward on ``board``, if its row is in ``block``.

        The row may be one of a later block, or of none if it was discarded.
        """
        noted, slab = rounding_on(board), block.slab
        assert noted is not None
        lane, reward = noted
        stored = np.float32(reward)
        own = slab.first_lane + np.arange(slab.lanes) if slab.lane is None else slab.lane
        for key in () if self._has_warned else self._rewards:
            column = slab.array(key)[: block.used]
            same = (column == stored).reshape(*column.shape[:2], -1).any(axis=2)
            same &= block.taken & (own == lane)
            if same.any():
                slot, at = (int(index) for index in np.argwhere(same)[0])
                known = slab.lane is None
                step = step_of(slab, slot, at, self._run.lanes) if known else None
                warnings.warn(rounding_of(key, lane, step, reward), RoundedWarning, stacklevel=5)
                self._has_warned = True
                break
        if self._has_warned:
            board[ROUNDED] = -1
        elif not self._rollout.held:
            board[ROUNDED] = 0

    def sound(self, slab: Slab, used: int) -> int:
        """Return how many of the first ``used`` slots have values as declared."""
        bad = self._checks.first_violation(slab, used, self._run.lanes)
        return used if bad is None else bad.slot

    def _culprit_of(self, error: Exception) -> Exception | None:
        """Return the fault of the action or mask for which a step raised ``error``, if it had one.

        ``error`` gets the step of its trajectory, if it lacks that.
        """
        refused, lanes = self._rollout.refused(), self._run.lanes
        if refused and isinstance(error, ValueRefused):
            self._checks.place(error, *refused[:2], lanes)
        acted = not raised_by_policy(error)
        if not acted and not self._in_place:
            return None  # what the policy saw is not in the slab
        return self._checks.bad_action(*refused, lanes, acted=acted) if refused else None
