"""Validate the values in blocks of transitions."""

import warnings
from collections.abc import Sequence
from functools import partial
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
    """Takes blocks from a source, and raises if a value is outside its declared space.

    Args:
        run: the state of the run, whose ledger counts the events of each block.
        rollout: the source of blocks.
        checks: the checks of values.
        rewards: keys of the reward columns.
        flags_and_rewards: keys of the columns that the run loop reads.
        in_place: True if the slab holds the policy's observations.
    """

    def __init__(
        self,
        run: RunState,
        rollout: TransitionSource,
        checks: RangeChecks,
        rewards: Sequence[Key],
        flags_and_rewards: Sequence[Key],
        *,
        in_place: bool,
    ) -> None:
        self._run, self._rollout, self._checks, self._in_place = run, rollout, checks, in_place
        self._rewards, self._flags_and_rewards, self._has_warned = rewards, flags_and_rewards, False

    def take(self, want: int, raised: BaseException | None = None) -> Block:
        """Return the next block, or raise ``raised``, the exception of an earlier fill.

        If a step raised because of a wrong action, raise the error that describes the action
        instead.
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
        """Count the events of ``block``, and raise if a value is outside its space."""
        post(self._run.ledger, block.entry)
        slab = block.slab
        # On a device, the extremes of columns come to the host together with the flags.
        fetch = None if slab.on_host else partial(block.fetch, self._flags_and_rewards)
        bad = self._checks.first_violation(slab, block.used, self._run.lanes, fetch)
        if bad is not None:
            raise bad.error
        for board in getattr(self._rollout, "boards", ()):  # third-party sources have none
            if board[ROUNDED] > 0:
                self._warn_of_rounding(block, board)

    def _warn_of_rounding(self, block: Block, board: Any) -> None:
        """Warn, once per run, of the rounded reward on ``board`` if its row is in ``block``.

        The row may be in a later block, or in none if it was discarded.
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
        elif not self._rollout.carried:
            board[ROUNDED] = 0

    def valid_slots(self, slab: Slab, used: int) -> int:
        """Return how many of the first ``used`` slots are valid."""
        bad = self._checks.first_violation(slab, used, self._run.lanes)
        return used if bad is None else bad.slot

    def _culprit_of(self, error: Exception) -> Exception | None:
        """Return the error of the wrong action or mask that made a step raise ``error``, or None.

        If ``error`` does not name the step of the trajectory, add it.
        """
        refused, lanes = self._rollout.refused(), self._run.lanes
        if refused and isinstance(error, ValueRefused):
            self._checks.place(error, *refused[:2], lanes)
        acted = not raised_by_policy(error)
        if not acted and not self._in_place:
            return None  # the slab does not hold the policy's observations
        return self._checks.bad_action(*refused, lanes, acted=acted) if refused else None
