"""TorchRL environments that are known to return wrong ends, recognised by their types' names."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torchrl.envs import EnvBase, StepCounter, TransformedEnv
from torchrl.envs.batched_envs import BatchedEnvBase
from torchrl.envs.transforms import Compose, Transform

from tallyroll.collector.envs.probes.trial_env import distinct, throwaway
from tallyroll.collector.errors import EnvironmentRefused

Fault = Callable[[EnvBase, int | None, bool], str | None]
"""Finds a fault of an environment; None: there is none.

The arguments are the environment, the transitions after which a trajectory is truncated from
outside (None: it is not), and whether final observations are declared as lost.
"""


def refuse_known_faults(env: EnvBase, frames_per_traj: int | None, finals_lost: bool) -> None:
    """Raise where ``env`` has a :func:`known_fault`.

    Raises:
        EnvironmentRefused: the message names the way out.
    """
    if said := known_fault(env, frames_per_traj, finals_lost):
        raise EnvironmentRefused(said)


def known_fault(env: EnvBase, frames_per_traj: int | None, finals_lost: bool) -> str | None:
    """Return how ``env``, or one within it, falsifies ends of episodes; None: no known way.

    Args:
        env: may be a `TransformedEnv`, a `SerialEnv` or a `ParallelEnv`, of which one environment
            of every different factory is made and closed again.
        frames_per_traj: the collector truncates trajectories after so many transitions.
        finals_lost: ``finals="lost"`` was passed.
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
    """Transitions after which a transform truncates a trajectory."""
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
        f"{type(env).__name__}: Procgen resets itself within step, and what TorchRL returns as an "
        'episode\'s final observation is the first one of the next; pass finals="lost", which '
        "stores collector/next_valid False at ends (Procgen does not tell time limits from "
        "termination either), or collect Procgen's environments of EnvPool, which keep them, as "
        "'envpool:CoinrunEasy-v0'"
    )


def _vmas(env: EnvBase, limit: int | None, finals_lost: bool) -> str | None:
    steps = getattr(env.__dict__.get("_env"), "max_steps", None)
    return _terminates(env, "max_steps", steps, limit, "without max_steps")


def _jumanji(env: EnvBase, limit: int | None, finals_lost: bool) -> str | None:
    inner = env.__dict__.get("_env")
    steps = getattr(getattr(inner, "unwrapped", inner), "time_limit", None)
    how = "as JumanjiWrapper(jumanji.make(id, time_limit=T)) with T larger than that"
    return _terminates(env, "time_limit", steps, limit, how)


def _terminates(env: EnvBase, name: str, steps: Any, limit: int | None, how: str) -> str | None:
    """The fault of environments whose own time limit can be reached."""
    if steps is None or (limit is not None and limit < steps):
        return None
    return (
        f"{type(env).__name__} has {name}={steps}, and TorchRL returns the end of this time limit "
        "as terminated, so that learners would not bootstrap there; pass max_frames_per_traj below "
        f"{steps} to the collector, which truncates, or make the environment {how}"
    )


FAULTS: dict[tuple[str, str], Fault] = {
    ("torchrl.envs.libs.procgen", "ProcgenWrapper"): _procgen,
    ("torchrl.envs.libs.procgen", "ProcgenEnv"): _procgen,
    ("torchrl.envs.libs.vmas", "VmasWrapper"): _vmas,
    ("torchrl.envs.libs.vmas", "VmasEnv"): _vmas,
    ("torchrl.envs.libs.jumanji", "JumanjiWrapper"): _jumanji,
    ("torchrl.envs.libs.jumanji", "JumanjiEnv"): _jumanji,
}
"""Faults by module and name of the class or of one that it inherits from."""
