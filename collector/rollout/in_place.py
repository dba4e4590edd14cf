"""Driving an environment that fills the slab itself."""

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from tallyroll.collector.counting.transitions import Mask, next_step_transitions
from tallyroll.collector.envs.gymnasium.vector import GymnasiumVectorEnv
from tallyroll.collector.policies.policy import no_tensordict
from tallyroll.collector.policies.random_actions import Ahead, all_drawn, lane_actions
from tallyroll.collector.rollout.driver import LocalDriver, changed
from tallyroll.collector.slab.slab import Array
from tallyroll.storage.rows.keys import RANDOM_VERSION


class InPlaceDriver(LocalDriver):
    """Drives an environment that fills the tensordict it is handed, a view of the slab."""

    env: GymnasiumVectorEnv

    def bind(self) -> None:
        """Build the views, once."""
        (self._action,) = self._actions
        self._cursor = self.slab.cursor(self._action, self.board)
        draws = None if self._random.masked else all_drawn(lane_actions(self.env), self.lanes)
        self._draw = None if draws is None else draws[self._action]
        looked_at = self.policy is not None or self._draw is None
        self._tds = self.slab.tensordicts(self._cursor) if looked_at else []
        self._pending = np.zeros(self.lanes, np.bool_)
        keys = (self._action, *self._extra)
        self._outputs = [(key, self.slab.columns[key].unbind(0)) for key in keys]

    def _begin(self, first: TensorDictBase) -> None:
        """The next slot begins every lane's trajectory."""
        self.slab.set_root(self.used, first)
        self._pending[:] = False

    def upcoming(self) -> NDArray[np.bool_]:
        """Lanes whose next slot will be a transition."""
        return ~self._pending

    def ended(self, start: int, stop: int) -> Mask:
        """``[time, lane]``, the environment reported an end in this slot."""
        cursor = self._cursor
        ended: Mask = cursor.terminated[start:stop] | cursor.truncated[start:stop]
        return ended

    def _transitions(self, start: int, stop: int) -> Mask:
        if not self.env.has_reset_slots:
            return np.ones((stop - start, self.lanes), np.bool_)
        ended = self.ended(start, stop)
        transitions = next_step_transitions(ended, self._pending)
        self._pending = ended[-1].copy()
        return transitions

    def random_steps(self, start: int, stop: int) -> None:
        """Fill slots ``[start, stop)`` with random actions."""
        if self._draw is None:
            self._masked_steps(start, stop)
            return
        self._cursor.action[start:stop] = self._draw(self.rng, stop - start)
        self._step(start, stop)

    def _masked_steps(self, start: int, stop: int) -> None:
        ahead = self._random.ahead(stop - start)
        for at in range(start, stop):
            self._act_at_random(at, ahead, at - start)
            self._step(at, at + 1)
            if self.stopping:
                break

    def given_steps(self, start: int, stop: int, lanes: int) -> None:
        """Fill slots ``[start, stop)``, whose actions are there; of one slot, perhaps a part."""
        if lanes < self.lanes:
            self._step_part(start, lanes)
        else:
            self._step(start, stop)

    def policy_steps(self, start: int, stop: int, random_lanes: Mask | None = None) -> None:
        """Fill slots ``[start, stop)``; lanes in ``random_lanes`` act at random."""
        for at in range(start, stop):
            if random_lanes is None:
                self._refresh(at, stop)
            self._act(at)
            if random_lanes is not None:
                self._randomise(at, random_lanes)
            self._step(at, at + 1)
            if self.stopping:
                break

    def part(self, at: int, lanes: int, random_lanes: Mask | None) -> None:
        """Fill one slot, stepping the first ``lanes`` lanes only."""
        if random_lanes is not None:
            self._act(at)
            self._randomise(at, random_lanes)
        elif self.policy is not None and self.slab.version[at, 0] != RANDOM_VERSION:
            self._act(at)
        elif self._draw is not None:
            self._cursor.action[at] = self._draw(self.rng, 1)[0]
        else:
            self._act_at_random(at, self._random.ahead(1), 0)
        if lanes < self.lanes:
            self._step_part(at, lanes)
        else:
            self._step(at, at + 1)

    def _act_at_random(self, at: int, ahead: Ahead, slot: int) -> None:
        # A clone of the keys alone, so that no action is left in what the policy sees.
        td = self._random.act(self._tds[at].clone(False), ahead, slot)
        self.slab.columns[self._action][at].copy_(td.get(self._action))

    def _act(self, at: int) -> None:
        assert self.policy is not None
        out = self.policy(self._tds[at])
        if not isinstance(out, TensorDictBase):
            raise no_tensordict(out)
        for key, views in self._outputs:
            value, row = out.get(key), views[at]
            if value is None or value.shape != row.shape or value.dtype != row.dtype:
                raise changed(key, value, row)
            row.copy_(value)

    def _randomise(self, at: int, lanes: Mask) -> None:
        columns = self.slab.columns
        if self.drawn is not None:
            drawn = torch.from_numpy(self.drawn[self._action])
        elif self._draw is not None:
            drawn = torch.from_numpy(self._draw(self.rng, 1)[0])
        else:
            drawn = self._random(self._tds[at].clone(False)).get(self._action)
        chosen = torch.from_numpy(lanes)
        columns[self._action][at][chosen] = drawn[chosen]
        for key in self._extra:
            columns[key][at][chosen] = 0

    def _step(self, start: int, stop: int) -> None:
        """Step through slots ``[start, stop)``, whose actions are there."""
        cursor = self._cursor
        try:
            self.env.step_block(cursor, start, stop)
        except BaseException as error:
            self._failed(error)
            raise

    def _step_part(self, at: int, lanes: int) -> None:
        self._cursor.at = at
        try:
            self.env.step_part(self._cursor, lanes)
        except BaseException as error:
            self._failed(error)
            raise

    def _failed(self, error: BaseException) -> None:
        actions: Array = self._cursor.action[self._cursor.at]
        error.add_note(f"tallyroll: raised by the step with the actions {actions.tolist()!r:.400}")
