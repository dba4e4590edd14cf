"""TorchRL environments that are known to report ends of episodes wrongly, by class name."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torchrl.envs import EnvBase, StepCounter, TransformedEnv
from torchrl.envs.batched_envs import BatchedEnvBase
from torchrl.envs.transforms import Compose, Transform

from tallyroll.collector.envs.probes.trial_env import distinct, throwaway
from tallyroll.collector.errors import EnvironmentRefused

Fault = Callable[[EnvBase, int | None, bool], str | None]
"""Function that returns the description of a fault of an environment, or None if there is none.

The arguments are the environment, the number of transitions after which a trajectory is truncated
from outside (None if it is not), and whether the caller declares final observations as lost.
"""


def refuse_known_faults(env: EnvBase, frames_per_traj: int | None, finals_lost: bool) -> None:
    """Raise if ``env`` has a :func:`known_fault`.

    Raises:
        EnvironmentRefused: ``env`` has a known fault. The message names a workaround.
    """
    if said := known_fault(env, frames_per_traj, finals_lost):
        raise EnvironmentRefused(said)


def known_fault(env: EnvBase, frames_per_traj: int | None, finals_lost: bool) -> str | None:
    """Return how ``env``, or an environment within it, falsifies ends of episodes.

    Return None if no fault is known.

    Args:
        env: the environment. It may be a `TransformedEnv`, a `SerialEnv` or a `ParallelEnv`. For
            the latter two, the function makes one environment of each distinct factory and closes
            it again.
        frames_per_traj: number of transitions after which the collector truncates trajectories.
        finals_lost: True if ``finals="lost"`` was passed.
    """
    limit = frames_per_traj
    while isinstance(env, TransformedEnv):
        limit = _lower(limit, _step_limit(env.transform))
        env = env.base_env
    if isinstance(env, BatchedEnvBase):
        for index in distinct(env.create_env_fn, env.create_env_kwargs):
            make = partial(env.create_env_fn[index], **env.create_env_kwargs[index])
            with throwaway(make) as inner:
                if said := known_fault(inner, limit, finals_lost):
                    return said
        return None
    for kind in type(env).__mro__:
        fault = FAULTS.get((kind.__module__, kind.__qualname__))
        if said := fault and fault(env, limit, finals_lost):
            return said
    return None


def _lower(one: int | None, other: int | None) -> int | None:
    limits = [limit for limit in (one, other) if limit is not None]
    return min(limits, default=None)


def _step_limit(transform: Transform | None) -> int | None:
    """Return the number of transitions after which a transform truncates a trajectory, if any."""
    if isinstance(transform, Compose):
        limit = None
        for each in transform:
            limit = _lower(limit, _step_limit(each))
        return limit
    return transform.max_steps if isinstance(transform, StepCounter) else None


def _procgen(env: EnvBase, limit: int | None, finals_lost: bool) -> str | None:
    if finals_lost:
        return None
    return (
        f"{type(env).__name__}: Procgen resets itself within step, so the final observation that "
        "TorchRL returns is the first one of the next episode (and Procgen does not distinguish "
        'time limits from termination). Pass finals="lost", which stores collector/next_valid '
        "False at ends, or use EnvPool's Procgen environments, which return final observations, "
        "such as 'envpool:CoinrunEasy-v0'."
    )


def _vmas(env: EnvBase, limit: int | None, finals_lost: bool) -> str | None:
    steps = getattr(env.__dict__.get("_env"), "max_steps", None)
    return _terminates(env, "max_steps", steps, limit, "without max_steps")


def _jumanji(env: EnvBase, limit: int | None, finals_lost: bool) -> str | None:
    inner = env.__dict__.get("_env")
    steps = getattr(getattr(inner, "unwrapped", inner), "time_limit", None)
    how = "as JumanjiWrapper(jumanji.make(id, time_limit=T)) with T above max_frames_per_traj"
    return _terminates(env, "time_limit", steps, limit, how)


def _terminates(env: EnvBase, name: str, steps: Any, limit: int | None, how: str) -> str | None:
    """Return the fault of an environment that can reach its own time limit."""
    if steps is None or (limit is not None and limit < steps):
        return None
    return (
        f"{type(env).__name__} has {name}={steps}, and TorchRL reports the end of this time limit "
        "as terminated, so learners would not bootstrap there. Pass max_frames_per_traj below "
        f"{steps} to the collector, which truncates, or make the environment {how}."
    )


FAULTS: dict[tuple[str, str], Fault] = {
    ("torchrl.envs.libs.procgen", "ProcgenWrapper"): _procgen,
    ("torchrl.envs.libs.procgen", "ProcgenEnv"): _procgen,
    ("torchrl.envs.libs.vmas", "VmasWrapper"): _vmas,
    ("torchrl.envs.libs.vmas", "VmasEnv"): _vmas,
    ("torchrl.envs.libs.jumanji", "JumanjiWrapper"): _jumanji,
    ("torchrl.envs.libs.jumanji", "JumanjiEnv"): _jumanji,
}
"""Faults by module and name of a class. Subclasses inherit them."""
