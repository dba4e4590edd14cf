"""Choose actions, and write them to the slots of a slab."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase

from tallyroll.collector.counting.transitions import Mask
from tallyroll.collector.policies.direct_forward import DirectForward, traits_of
from tallyroll.collector.policies.policy import Policy
from tallyroll.collector.policies.random_actions import Ahead, RandomActions, action_keys
from tallyroll.collector.policies.several.policies import SeveralPolicies
from tallyroll.collector.policies.trial import no_tensordict
from tallyroll.collector.rollout.lanes import Lanes, changed_error
from tallyroll.collector.run_plan import acting
from tallyroll.collector.slab.slab import Array
from tallyroll.storage.rows.keys import POLICY_VERSIONS, RANDOM_VERSION, Key
from tallyroll.storage.rows.transfers import fetch


def value_at_random(key: Key) -> int:
    """Return the value that a column written by policies has in rows with random actions."""
    return RANDOM_VERSION if key[:2] == POLICY_VERSIONS else 0


WHILE_ACTING = "_tallyroll_while_acting"
"""The attribute by which `raised_by_policy` recognises a worker's error."""


def raised_by_policy(error: BaseException) -> bool:
    """Return True if ``error`` was raised while actions were chosen, so the slot has no actions."""
    if getattr(error, WHILE_ACTING, False):  # in a worker
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code not in _ACTING:
        trace = trace.tb_next
    return trace is not None


class Actor:
    """Writes the actions of a policy, or random actions, to slots.

    The caller sets the exploration type (`ActionContext`). With ``policy_placement="central"``,
    `CentralPolicy` calls the policy for all workers.

    Args:
        lanes: the lanes that act, bound to the slab that they fill.
        policy: chooses actions; None if all actions are random.
        extra: keys that the policy writes in addition to the action.
        random: the source of random actions.
    """

    drawn: Mapping[Key, Array] | None = None
    """Random actions ``[lane, ...]`` drawn elsewhere, for a slot in which some lanes use them."""

    def __init__(
        self, lanes: Lanes, policy: Policy | None, extra: Sequence[Key], random: RandomActions
    ) -> None:
        self._lanes, self._policy, self._slab, self.random = lanes, policy, lanes.slab, random
        self._extra = tuple(extra)
        actions = action_keys(lanes.env)
        self._outputs = [(key, lanes.rows(key)) for key in (*actions, *self._extra)]
        self._action_rows = dict(self._outputs[: len(actions)])
        traits = None if policy is None else traits_of(policy, actions, lanes.observation_rows)
        self.decision = acting(traits, fills_slab=lanes.fills_slab, extra=self._extra)
        """The decision about acting, `RunPlan.acts`."""
        self._bare: DirectForward | None = None
        if policy is not None and self.decision.way == "network":
            self._bare = DirectForward.of(policy, lanes.observation_rows)
        arrays, columns = self._slab.arrays, self._slab.columns
        self._fetches = self._slab.is_filled_from(lanes.env.device)
        self._targets: list[Any] = [arrays.get(key, columns[key]) for key in random.drawn_keys]
        """Memory ``[slot, lane, ...]`` of drawn actions: arrays, or tensors on other devices."""
        self._masks = random.masks_in(self._slab.arrays) if lanes.fills_slab else None

    def put_at_random(self, start: int, stop: int) -> None:
        """Write random actions to slots ``[start, stop)``."""
        for to, drawn in zip(self._targets, self.random.take(stop - start), strict=True):
            if type(to) is torch.Tensor:
                to[start:stop].copy_(torch.from_numpy(drawn.copy()))
            else:
                to[start:stop] = drawn

    def each_at_random(self, start: int, stop: int) -> Iterator[int]:
        """Yield slots ``[start, stop)``, each with random actions written to it."""
        if self._masks is not None:
            yield from self.random.put(self._slab.arrays, self._masks, start, stop)
            return
        ahead = self.random.draw_slots(stop - start)
        for at in range(start, stop):
            self.act_at_random(at, ahead, at - start)
            yield at

    def act_at_random(self, at: int, ahead: Ahead, slot: int) -> None:
        """Write to slot ``at`` the random actions that were drawn as slot ``slot`` of ``ahead``.

        ``ahead`` is a result of ``RandomActions.draw_slots``.
        """
        drawn = self.random.act(self._lanes.observations(at).clone(False), ahead, slot)
        for key, rows in self._action_rows.items():
            rows[at].copy_(drawn.get(key))

    def act(self, at: int) -> None:
        """Copy the policy's actions to slot ``at``."""
        assert self._policy is not None
        bare = self._bare
        network = None if bare is None else bare.network()
        if bare is not None and network is not None:
            out, row = bare(network, at), self._outputs[0][1][at]
            if type(out) is torch.Tensor and out.shape == row.shape and out.dtype == row.dtype:
                row.copy_(out)
            else:
                self.put_column(0, out, at)
            return
        out = self._called(self._lanes.observations(at), at)
        self._put(out, at)
        self._lanes.acted(out, self._policy.writes)

    def use_drawn(self, drawn: Mapping[Key, Array] | None) -> None:
        """Use random actions ``[lane, ...]`` that were drawn elsewhere; if None, draw them here."""
        self.drawn = drawn

    def act_mixed(self, at: int, random_lanes: Mask, some: bool = True) -> None:
        """Act at random in ``random_lanes``, and by the policy in the other lanes.

        The policy's states of ``random_lanes`` do not change.

        ``random_lanes`` is ``[lane]``, or ``[policy, lane]`` if each group of agents has a policy.
        """
        if self.drawn is None:
            ahead = self.random.draw_slots(1)
        else:
            drawn = {key: torch.from_numpy(each)[None] for key, each in self.drawn.items()}
            ahead = self.random.of_lanes(drawn)
        if not some:
            if isinstance(self._policy, SeveralPolicies):
                self._policy.passes()
            return
        lanes = partial(self._lanes_of, random_lanes)
        if random_lanes.all():
            self.act_at_random(at, ahead, 0)
        elif not random_lanes.any():
            self.act(at)
        else:
            assert self._policy is not None
            seen = self._lanes.observations(at)
            before = seen.clone(False)
            if isinstance(self._policy, SeveralPolicies):
                self._policy.leave_out(random_lanes)
            out = self._called(seen, at)
            self._put(out, at)
            at_random = self.random.act(before.clone(False), ahead, 0)
            for key in self._action_rows:
                row = self._slab.columns[key][at]  # has a lane axis even for a single lane
                drawn_there = at_random.get(key).reshape(row.shape)[lanes(key)]
                row[lanes(key)] = drawn_there.to(row.device)
            self._lanes.acted(out, self._policy.writes, before, lanes)
        for key in self._extra:
            self._slab.columns[key][at, lanes(key)] = value_at_random(key)

    def _lanes_of(self, random_lanes: Mask, key: Key) -> torch.Tensor:
        """Return the lanes of ``random_lanes`` in which a column gets random values."""
        if isinstance(self._policy, SeveralPolicies):
            random_lanes = self._policy.of_key(key, random_lanes)
        return torch.from_numpy(random_lanes)

    def _called(self, td: TensorDictBase, at: int) -> TensorDictBase:
        policy = self._policy
        assert policy is not None
        out = policy(td)
        if not isinstance(out, TensorDictBase):
            raise no_tensordict(out)
        if policy.is_elsewhere:  # only the remote policy knows its newest weights
            version = self._slab.version[at]
            version[version != RANDOM_VERSION] = policy.version
        return out

    def _put(self, out: TensorDictBase, at: int) -> None:
        values: TensorDictBase | Mapping[Key, Any] = out
        if self._fetches:
            values = fetch(out, [key for key, _ in self._outputs])
        for index, (key, _) in enumerate(self._outputs):
            self.put_column(index, values.get(key, None), at)

    def put_column(self, index: int, value: Any, at: int) -> None:
        """Write a column of the policy's output to slot ``at``."""
        key, rows = self._outputs[index]
        row = rows[at]
        is_tensor = isinstance(value, torch.Tensor)
        if not is_tensor or value.shape != row.shape or value.dtype != row.dtype:
            form = self._policy.forms.get(key) if self._policy is not None and is_tensor else None
            if form is None or not form.takes(value):
                raise changed_error(key, value, row)
            value = form(value)
        row.copy_(value)

    def refresh(self, start: int, stop: int) -> None:
        """Load newer weights, if there are any, for the actions of slots ``[start, stop)``."""
        if self._policy is not None and self._policy.refresh():
            self._slab.version[start:stop] = self._policy.row_version


_ACTING = {each.__code__ for each in (Actor.act, Actor.act_mixed)}
