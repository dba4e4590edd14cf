"""Detection of environments whose reset overwrites the results of their last step.

Most ways of driving an environment copy the result of a step before they make another call. Two
cannot, because they step and reset in one call: a Gymnasium vector in SAME_STEP mode and TorchRL's
``ParallelEnv``. If an environment then returns the same arrays each time, its reset overwrites the
final observation. The probe therefore steps and resets one throwaway child of such an environment
beforehand.
"""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector.utils import batch_space, iterate
from tensordict import TensorDictBase
from torchrl.envs import EnvBase
from torchrl.envs.batched_envs import BatchedEnvBase

from tallyroll.collector.compat import step_mdp, steps_in_buffers
from tallyroll.collector.envs.gymnasium.spaces import drawn_from, mask_in
from tallyroll.collector.envs.probes.reuse import contents, overlap, places
from tallyroll.collector.envs.probes.trial_env import distinct, throwaway
from tallyroll.collector.envs.setup.traits import chain, loses_finals
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.errors import EnvironmentRefused
from tallyroll.collector.policies.random_actions import RandomActions
from tallyroll.collector.policies.slot_rng import SlotRng
from tallyroll.collector.policies.tensor_copies import own_tensors

MOST_STEPS = 32
MOST_SECONDS = 0.1
"""Limits in steps and in seconds of a probe in which no episode ends."""


class Call:
    """The values that a step or a reset returned, and a copy of them.

    Args:
        returned: all returned values.
        observation: the observation.
        rest: rewards, flags and infos. Some may be constants that are never written to.
        ended: True if an episode ended with this step.
    """

    def __init__(
        self, returned: Any, observation: Any, rest: Any = (), *, ended: bool = False
    ) -> None:
        self._returned = returned
        self._contents = contents(returned)
        self.ended = ended
        self.observed = contents(observation)
        self.observation, self.rest = places(observation), places(rest)

    @property
    def altered(self) -> bool:
        """True if the returned values have changed since the call."""
        return contents(self._returned) != self._contents


@dataclass(frozen=True)
class Child:
    """Reset and step functions of one environment, for a probe."""

    reset: Callable[[], Call]
    step: Callable[[], Call]


def overwrites(child: Child) -> bool:
    """Return True if a reset of ``child`` overwrites the results of its last step.

    If an observation of a step and an observation of a reset share memory, the result is True,
    whatever values are written. If rewards or flags share memory, the result is True if a reset
    altered them, or if no episode ended that could have altered them.
    """
    resets, steps = [child.reset()], []
    until = time.perf_counter() + MOST_SECONDS
    while True:
        last = child.step()
        steps.append(last)
        over = len(steps) >= MOST_STEPS or time.perf_counter() > until
        enough = len(steps) >= 2 and (last.ended or over)
        if last.ended or enough:
            resets.append(child.reset())
            if last.altered:
                return True
        if enough:
            break
    ended = any(step.ended for step in steps)
    for step in steps:
        for reset in resets:
            if overlap(step.observation, reset.observation):
                return True
            if not ended and overlap(step.rest, reset.rest):
                return True
    # Steps that share memory hide a reset that wrote the same values again.
    same = steps[-1].observed == resets[-1].observed
    return same and overlap(steps[-2].observation, steps[-1].observation)


# --- probed environments --------------------------------------------------------------------------


def refuse_reused(env: EnvBase) -> None:
    """Raise if ``env`` steps and resets in one call that overwrites its observations.

    Raises:
        EnvironmentRefused: final observations would be overwritten. The message says how to keep
            them.
    """
    base = list(chain(env))[-1]
    if isinstance(base, SystemEnv):
        base.system.require_finals()
    elif isinstance(base, BatchedEnvBase):
        in_one_call = steps_in_buffers(env)
        for index in distinct(base.create_env_fn, base.create_env_kwargs):
            make = partial(base.create_env_fn[index], **base.create_env_kwargs[index])
            with throwaway(make) as child:
                refuse_reused(child)
                if in_one_call and not loses_finals(child):
                    _refuse_parallel(child)


def _refuse_parallel(child: EnvBase) -> None:
    if overwrites_itself(lambda: child, torchrl, warn=True):
        raise EnvironmentRefused(
            f"the workers of ParallelEnv step and reset in one call, and {type(child).__name__} "
            "returns values in memory that its reset overwrites, so final observations would be "
            "lost. Return copies from the environment, or use SerialEnv, or TransformedEnv("
            "ParallelEnv(…)), which resets in a separate call."
        )


def overwrites_itself(
    make: Callable[[], Any], child: Callable[[Any], Child], *, warn: bool
) -> bool:
    """Return True if an environment of ``make``, driven through ``child``, reuses its memory.

    If the environment raises, the result is False, and a warning reports the error if ``warn`` is
    True.
    """
    try:
        with throwaway(make) as env:
            return overwrites(child(env))
    except Exception as error:  # noqa: BLE001  the run raises it if the environment is at fault
        if warn:
            warnings.warn(
                f"{error!r} was raised by a trial environment, made to check whether step and "
                "reset return the same memory. If they do, final observations are lost.",
                stacklevel=2,
            )
        return False


# --- adapters -------------------------------------------------------------------------------------


def single_env(env: Any, *, names: Sequence[str] = ()) -> Child:
    """Adapt a Gymnasium environment. ``names`` are the info entries that become columns."""
    drawn, alone = drawn_from(env.action_space, 1), batch_space(env.action_space, 1)
    info: Mapping[str, Any] = {}
    observation: Any = None

    def reset() -> Call:
        nonlocal info, observation
        observation, info = env.reset(seed=0)
        rest = tuple(info.get(name) for name in names)
        return Call((observation, rest), observation, rest)

    def step() -> Call:
        nonlocal info, observation
        mask = mask_in(observation, info)
        actions = drawn(None if mask is None else np.asarray(mask)[None])
        action = next(iter(iterate(alone, actions)))
        observation, reward, terminated, truncated, info = env.step(action)
        rest = (reward, terminated, truncated, *(info.get(name) for name in names))
        return Call((observation, rest), observation, rest, ended=bool(terminated or truncated))

    return Child(reset, step)


def torchrl(env: EnvBase) -> Child:
    """Adapt a TorchRL environment."""
    act = RandomActions(env, SlotRng(0))
    observed = list(env.observation_spec.keys(True, True))
    flags = list(env.done_spec.keys(True, True))
    td: TensorDictBase

    def call(got: TensorDictBase, ended: bool) -> Call:
        keys = list(got.keys(True, True))
        seen = tuple(got.get(key) for key in keys if key in observed)
        rest = tuple(got.get(key) for key in keys if key not in observed)
        return Call(got, seen, rest, ended=ended)

    def reset() -> Call:
        nonlocal td
        td = env.reset()
        return call(td, False)

    def step() -> Call:
        nonlocal td
        # Copied, because an input that the step passes on would otherwise look like reuse.
        stepped = env.step(act(own_tensors(td)))
        got = stepped.get("next")
        td = step_mdp(env, stepped)
        return call(got, any(bool(got.get(key).any()) for key in flags))

    return Child(reset, step)
