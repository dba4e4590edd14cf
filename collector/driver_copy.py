"""Driving any TorchRL environment, and copying what it returns."""

import numpy as np
import torch
from tensordict import TensorDictBase

from tallyroll.collector.driver import LocalDriver, changed
from tallyroll.collector.keys import NEXT, RANDOM_VERSION, VALID, as_key
from tallyroll.collector.policy import PolicyFn, no_tensordict
from tallyroll.collector.slots import Mask


class CopyDriver(LocalDriver):
    """Drives any TorchRL environment through ``step_and_maybe_reset`` and copies the result."""

    def bind(self) -> None:
        """Find out what is copied where, once."""
        self._squeeze = not self.env.batch_size
        views = {
            key: (column[:, 0] if self._squeeze else column).unbind(0)
            for key, column in self.slab.columns.items()
        }
        chosen = (*self._actions, *self._extra)
        self._chosen = [(key, views.pop(key)) for key in chosen]
        """Views of what is chosen, a list of slots for each column."""
        self._views = list(views.items())
        self._has_valid = VALID in map(as_key, self.env.observation_spec.keys(True, True))
        self._td: TensorDictBase | None = None

    def _begin(self, first: TensorDictBase) -> None:
        """The next slot begins every lane's trajectory."""
        self._td = first

    def _transitions(self, start: int, stop: int) -> Mask:
        if not self._has_valid:
            return np.ones((stop - start, self.lanes), np.bool_)
        return self.slab.transitions[start:stop].copy()

    def random_steps(self, start: int, stop: int) -> None:
        """Fill slots ``[start, stop)`` with random actions."""
        self._steps(start, stop, self._random)

    def policy_steps(self, start: int, stop: int, random_lanes: Mask | None = None) -> None:
        """Fill slots ``[start, stop)``; lanes in ``random_lanes`` act at random."""
        assert self.policy is not None
        self._steps(start, stop, self.policy if random_lanes is None else self._both(random_lanes))

    def _both(self, random_lanes: Mask) -> PolicyFn:
        """The policy, with random actions in some lanes."""
        policy, lanes = self.policy, torch.from_numpy(random_lanes)
        assert policy is not None
        if self._squeeze:  # one lane is never divided
            return policy

        def both(td: TensorDictBase) -> TensorDictBase:
            drawn = self._random(td.clone(False))
            out = policy(td)
            for key in (*self._actions, *self._extra):
                value = out.get(key).clone()
                value[lanes] = drawn.get(key)[lanes] if key in self._actions else 0
                out.set(key, value)
            return out

        return both

    def part(self, at: int, lanes: int, random_lanes: Mask | None) -> None:
        """Fill one slot, stepping the first ``lanes`` lanes only."""
        assert self._td is not None
        if not lanes:
            self.used = at + 1
            return
        mask = torch.zeros(self.lanes, dtype=torch.bool)
        mask[:lanes] = True
        self._td.set("_step", mask)
        act: PolicyFn = self._random
        if random_lanes is not None:
            act = self._both(random_lanes)
        elif self.policy is not None and self.slab.version[at, 0] != RANDOM_VERSION:
            act = self.policy
        try:
            self._steps(at, at + 1, act)
        finally:
            self._td.pop("_step", None)

    def _acted(self, td: TensorDictBase, act: PolicyFn, at: int) -> TensorDictBase:
        """Write what ``act`` chose to slot ``at`` and, copied, to ``td``, which is returned.

        So a policy that writes later to what it returned, and an environment that writes to its
        action, change no row: it is the action that was chosen.
        """
        out = act(td)
        if not isinstance(out, TensorDictBase):
            raise no_tensordict(out)
        random = act is self._random
        for key, rows in self._chosen:
            if random and key in self._extra:
                continue
            value, row = out.get(key, None), rows[at]
            if value is None or value.shape != row.shape or value.dtype != row.dtype:
                raise changed(key, value, row)
            row.copy_(value)
        if not random and self.policy is not None:
            for key in self.policy.writes:
                value = out.get(key, None)
                if value is not None:
                    td.set(key, value.clone())
        return td

    def _steps(self, start: int, stop: int, act: PolicyFn) -> None:
        td = self._td
        assert td is not None
        step = self.env.step_and_maybe_reset
        for at in range(start, stop):
            if act is self.policy:
                self._refresh(at, stop)
            acted = self._acted(td, act, at)
            try:
                td, following = step(acted)
            except BaseException as error:
                error.add_note(f"tallyroll: raised by step call {at} of the block being collected")
                raise
            for key, rows in self._views:
                value, row = td.get(key), rows[at]
                if value is None or value.shape != row.shape or value.dtype != row.dtype:
                    raise changed(key, value, row)
                row.copy_(value)
            if self._has_valid:
                self.slab.transitions[at] = td.get((NEXT, *VALID)).reshape(-1).cpu().numpy()
            self._td = td = following
            self.used = at + 1
            if self.stopping:
                break
