"""Driving any TorchRL environment, and copying what it returns."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from tensordict import TensorDictBase

from tallyroll.collector.counting.transitions import Mask
from tallyroll.collector.envs.step_then_reset import way_of
from tallyroll.collector.policies.policy import PolicyFn, no_tensordict
from tallyroll.collector.policies.random_actions import Ahead
from tallyroll.collector.rollout.driver import LocalDriver, changed
from tallyroll.storage.rows.keys import NEXT, RANDOM_VERSION, VALID, Key, as_key

Views = Sequence[tuple[Key, Sequence[torch.Tensor]]]


class CopyDriver(LocalDriver):
    """Drives any TorchRL environment, and copies what it returns before it may be overwritten."""

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
        items = views.items()
        self._before = [view for view in items if view[0][0] != NEXT]
        self._after = [view for view in items if view[0][0] == NEXT]
        self._way = way_of(self.env)
        self._has_valid = VALID in map(as_key, self.env.observation_spec.keys(True, True))
        self._td: TensorDictBase | None = None

    def _begin(self, first: TensorDictBase) -> None:
        """The next slot begins every lane's trajectory."""
        self._td = self._way.begin(first)

    def _transitions(self, start: int, stop: int) -> Mask:
        if not self._has_valid:
            return np.ones((stop - start, self.lanes), np.bool_)
        return self.slab.transitions[start:stop].copy()

    def random_steps(self, start: int, stop: int) -> None:
        """Fill slots ``[start, stop)`` with random actions."""
        self._steps(start, stop, self._at_random(self._random.ahead(stop - start)), random=True)

    def given_steps(self, start: int, stop: int, lanes: int) -> None:
        """Fill slots ``[start, stop)``, whose actions are there; of one slot, perhaps a part."""
        # Copies: what an environment does to its action must not reach a column.
        given = {key: self.slab.columns[key][start:stop].clone() for key in self._actions}
        with self._only(lanes) as some:
            if some:
                act = self._at_random(self._random.of_lanes(given))
                self._steps(start, stop, act, random=True)
            else:
                self.used = stop

    def policy_steps(self, start: int, stop: int, random_lanes: Mask | None = None) -> None:
        """Fill slots ``[start, stop)``; lanes in ``random_lanes`` act at random."""
        assert self.policy is not None
        if random_lanes is None:
            self._steps(start, stop, self.policy)
        else:
            self._both(start, random_lanes)

    def part(self, at: int, lanes: int, random_lanes: Mask | None) -> None:
        """Fill one slot, stepping the first ``lanes`` lanes only."""
        with self._only(lanes) as some:
            if random_lanes is not None:
                self._both(at, random_lanes, some)
            elif self.policy is None or self.slab.version[at, 0] == RANDOM_VERSION:
                ahead = self._random.ahead(1)  # also where no lane is stepped: others draw too
                if some:
                    self._steps(at, at + 1, self._at_random(ahead), random=True)
            elif some:
                self._steps(at, at + 1, self.policy)
            if not some:
                self.used = at + 1

    @contextmanager
    def _only(self, lanes: int) -> Iterator[bool]:
        """Steps made inside are of the first ``lanes`` lanes; whether there are any."""
        if lanes < self.lanes:
            assert self._td is not None
            self._td.set("_step", torch.arange(self.lanes) < lanes)
        try:
            yield lanes > 0
        finally:
            if lanes < self.lanes and self._td is not None:
                self._td.pop("_step", None)

    def _at_random(self, ahead: Ahead) -> PolicyFn:
        """Random actions that were drawn for the slots to come, one slot a call."""
        slot = itertools.count()
        return lambda td: self._random.act(td, ahead, next(slot))

    def _both(self, at: int, random_lanes: Mask, some: bool = True) -> None:
        """Fill a slot in which ``random_lanes`` act at random, and the policy in the others."""
        if self.drawn is None:
            ahead = self._random.ahead(1)
        else:
            drawn = {key: torch.from_numpy(each)[None] for key, each in self.drawn.items()}
            ahead = self._random.of_lanes(drawn)
        if not some:
            return
        assert self.policy is not None
        act = self._at_random(ahead)
        if random_lanes.all():
            self._steps(at, at + 1, act, random=True)
        elif random_lanes.any():
            self._steps(at, at + 1, self._mixed(act, random_lanes))
        else:
            self._steps(at, at + 1, self.policy)
        for key in self._extra:
            self.slab.columns[key][at, torch.from_numpy(random_lanes)] = 0

    def _mixed(self, at_random: PolicyFn, random_lanes: Mask) -> PolicyFn:
        """The policy, with random actions in some lanes, whose states stay as they were."""
        policy, lanes = self.policy, torch.from_numpy(random_lanes)
        assert policy is not None

        def mixed(td: TensorDictBase) -> TensorDictBase:
            given = td.clone(False)
            drawn = at_random(td.clone(False))
            out = policy(td)
            if not isinstance(out, TensorDictBase):
                raise no_tensordict(out)
            for key in dict.fromkeys((*self._actions, *policy.writes, *self._extra)):
                value = out.get(key, None)
                if value is None:
                    raise changed(key, None)
                source = drawn if key in self._actions else given
                before = source.get(key[1:] if key[0] == NEXT else key, None)
                value = value.clone()
                kept = before is not None and before.shape == value.shape
                value[lanes] = before[lanes] if kept else 0
                out.set(key, value)
            return out

        return mixed

    def _acted(self, td: TensorDictBase, act: PolicyFn, at: int, random: bool) -> TensorDictBase:
        """Write what ``act`` chose to slot ``at`` and, copied, to ``td``, which is returned.

        So a policy that writes later to what it returned, and an environment that writes to its
        action, change no row: it is the action that was chosen.
        """
        out = act(td)
        if not isinstance(out, TensorDictBase):
            raise no_tensordict(out)
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

    def _steps(self, start: int, stop: int, act: PolicyFn, random: bool = False) -> None:
        """Fill slots ``[start, stop)`` with what ``act`` chooses; ``random``: not by the policy."""
        td = self._td
        assert td is not None
        for at in range(start, stop):
            if act is self.policy:
                self._refresh(at, stop)
            acted = self._acted(td, act, at, random)
            # A step may write what it returns to the memory of what it was given, and a reset
            # to the memory of what the step returned: each is copied before.
            _copy(acted, self._before, at)
            try:
                td, following = self._way(acted, partial(_copy, views=self._after, at=at))
            except BaseException as error:
                error.add_note(f"tallyroll: raised by step call {at} of the block being collected")
                raise
            if self._has_valid:
                self.slab.transitions[at] = td.get((NEXT, *VALID)).reshape(-1).cpu().numpy()
            self._td = td = following
            self.used = at + 1
            if self.stopping:
                break


def _copy(td: TensorDictBase, views: Views, at: int) -> None:
    """Copy what ``td`` holds to slot ``at``."""
    for key, rows in views:
        value, row = td.get(key), rows[at]
        if value is None or value.shape != row.shape or value.dtype != row.dtype:
            raise changed(key, value, row)
        row.copy_(value)
