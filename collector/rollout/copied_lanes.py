"""Lanes of any TorchRL environment, whose results are copied."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from tallyroll.collector.counting.transitions import Mask
from tallyroll.collector.envs.failures import explain
from tallyroll.collector.envs.setup.step_then_reset import way_of
from tallyroll.collector.envs.setup.traits import system_of
from tallyroll.collector.policies.random_actions import action_keys
from tallyroll.collector.rollout.lanes import Lanes, LanesOfKey, changed_error, stopped
from tallyroll.collector.rollout.reset_columns import ResetColumns
from tallyroll.collector.slab.progress import FILLED, HALT
from tallyroll.collector.slab.slab import Slab
from tallyroll.collector.user_code import ENDS
from tallyroll.storage.rows.keys import NEXT, VALID, Key, as_key, next_valid_keys
from tallyroll.storage.rows.transfers import fetch

Views = Sequence[tuple[Key, Key, Sequence[torch.Tensor]]]
"""For each value, its key in a result, the key of its column, and the slots of the column."""


class CopiedLanes(Lanes):
    """Lanes of any TorchRL environment; results are copied before they may be overwritten.

    Rows contain the results of the outermost environment. With a `TransformedEnv`, these are the
    observations after its transforms. The raw ones are stored only if the transforms write to other
    keys.

    Args:
        env: the environment.
        slab: the memory to fill.
        extra: keys that the policy writes in addition to the action.
        board: words that report progress; see :mod:`tallyroll.collector.slab.progress`.
    """

    def __init__(self, env: EnvBase, slab: Slab, extra: Sequence[Key], board: memoryview) -> None:
        super().__init__(env, slab)
        self._board = board
        if (base := system_of(env)) is not None:
            base.stepper.report_to(board)
        self._squeeze = not env.batch_size
        self._lane = slab.first_lane if slab.lanes == 1 else None
        self._views = {
            key: (column[:, 0] if self._squeeze else column).unbind(0)
            for key, column in slab.columns.items()
        }
        self._resets = ResetColumns.of(env, slab)
        valid = next_valid_keys(self._views)
        own = {*valid} if self._resets is None else {*valid, *self._resets.keys}
        self._actions = action_keys(env)
        items = [(key, key, v) for key, v in self._views.items() if key not in self._actions]
        items = [item for item in items if item[0] not in extra and item[0] not in own]
        self._before = [item for item in items if item[0][0] != NEXT]
        self._after = [item for item in items if item[0][0] == NEXT]
        self._after += [((NEXT, *key), key, self._views[key]) for key in valid]
        self._way = way_of(env)
        self._has_valid = VALID in map(as_key, env.observation_spec.keys(True, True))
        self.all_are_transitions = not self._has_valid
        self._td: TensorDictBase | None = None
        self._copy = _fetch if slab.is_filled_from(env.device) else _copy

    def rows(self, key: Key) -> Sequence[torch.Tensor]:
        """Return the slots of a column, without a lane axis if the environment has none."""
        return self._views[key]

    def begin(self, at: int, first: TensorDictBase) -> None:
        """Begin every lane's trajectory in the next slot."""
        self._td = self._way.begin(first)

    def observations(self, at: int) -> TensorDictBase:
        """Return the environment's TensorDict, with the values that the policy keeps in it."""
        assert self._td is not None
        return self._td

    def acted(
        self,
        out: TensorDictBase,
        writes: Sequence[Key],
        before: TensorDictBase | None = None,
        lanes: LanesOfKey | None = None,
    ) -> None:
        """Carry the policy's outputs to the next step as copies: the policy may change them."""
        assert self._td is not None
        for key in writes:
            value = None if key in self._actions else out.get(key, None)
            if value is None:
                continue
            value = value.clone()
            if before is not None and lanes is not None:
                last = before.get(key[1:] if key[0] == NEXT else key, None)
                kept = last is not None and last.shape == value.shape
                mask = lanes(key)[0] if self._squeeze else lanes(key)
                value[mask] = last[mask] if kept else 0
            self._td.set(key, value)

    def step_part(self, at: int, lanes: int) -> None:
        """Step the first ``lanes`` lanes only, in one slot."""
        assert self._td is not None
        if not lanes:
            self._board[FILLED] = at + 1
            return
        self._td.set("_step", torch.arange(self.lanes) < lanes)
        try:
            self.step(at, at + 1)
        finally:
            self._td.pop("_step", None)

    def step(self, start: int, stop: int) -> None:
        """Step through slots ``[start, stop)``, whose actions were chosen before."""
        td, device = self._td, self.env.device
        assert td is not None
        for at in range(start, stop):
            for key in self._actions:
                # A copy: an environment that changes its action must not change a column.
                action = self._views[key][at].clone()
                td.set(key, action if device is None else action.to(device))
            # A step may write its results to the memory of its input, and a reset may write to the
            # memory of the step's results, so copy each before it can be overwritten.
            self._copy(td, self._before, at)
            if self._resets is not None:
                self._resets.put(at)
            try:
                td, following = self._way(td, partial(self._copy, views=self._after, at=at))
            except BaseException as error:
                found = stopped(error) if isinstance(error, ENDS) else explain(error, self._lane)
                raised = found or error
                raised.add_note(f"tallyroll: raised by step call {at} of the block being collected")
                if raised is error:
                    raise
                raise raised from error
            if self._has_valid:
                self.slab.transitions[at] = td.get((NEXT, *VALID)).reshape(-1).cpu().numpy()
            self._td = td = following
            self._board[FILLED] = at + 1
            if self._board[HALT]:
                break

    def transitions(self, start: int, stop: int, stepped: int) -> Mask:
        """Return marks of all slots, or of the slots that the environment marks as transitions."""
        if not self._has_valid:
            return np.ones((stop - start, self.lanes), np.bool_)
        return self.slab.transitions[start:stop].copy()


def _fetch(td: TensorDictBase, views: Views, at: int) -> None:
    """Copy the values of ``td`` from a device to slot ``at`` on the host, in one copy."""
    _copy(fetch(td, [source for source, _, _ in views]), views, at)


def _copy(td: TensorDictBase | Mapping[Key, Any], views: Views, at: int) -> None:
    """Copy the values of ``td`` to slot ``at``."""
    for source, key, rows in views:
        value, row = td.get(source), rows[at]
        if value is None or value.shape != row.shape or value.dtype != row.dtype:
            raise changed_error(key, value, row)
        row.copy_(value)
