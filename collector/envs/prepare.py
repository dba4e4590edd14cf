"""An environment as the collector drives it: moved, limited in time, primed, and seeded."""

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from tallyroll.collector.counting.numbering import lane_seeds
from tallyroll.collector.envs.gymnasium.vector import GymnasiumVectorEnv
from tallyroll.collector.envs.known_faults import refuse_known_faults
from tallyroll.collector.envs.make import (
    can_step_part,
    chain,
    runs_on_cpu,
    with_recurrent_states,
    with_time_limit,
)
from tallyroll.collector.envs.probe import refuse_reused
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.options import Options


def prepare_env(env: EnvBase, policy: Any, options: Options) -> EnvBase:
    """``env`` on its device, with a time limit and a recurrent policy's states where needed.

    Raises:
        ArgumentError, EnvironmentRefused: it cannot be driven as ``options`` want it.
    """
    refuse_known_faults(env, options.max_frames_per_traj, options.finals == "lost")
    device = options.env_device or (None if runs_on_cpu(env) else options.device)
    if device is not None:
        if device.type != "cpu" and runs_on_cpu(env):
            raise ArgumentError(
                f"env_device: a Gymnasium environment steps on the CPU, got {device}; "
                "leave it out, and pass policy_device or storing_device"
            )
        env = env.to(device)
    env = with_recurrent_states(env, policy)
    if options.max_frames_per_traj is not None:
        env = with_time_limit(env, options.max_frames_per_traj)
    if options.surplus == "never_step" and not can_step_part(env):
        raise ArgumentError(
            'surplus="never_step" needs an environment that can step some of its lanes '
            "(a Gymnasium id, SyncVectorEnv with autoreset disabled, SerialEnv, ParallelEnv); "
            f'got {env}; use surplus="carry" or "discard"'
        )
    if options.finals != "lost":
        refuse_reused(env)
    return env


def first_reset(env: EnvBase) -> TensorDictBase:
    """Reset ``env``; where that declares infos, what wraps it looks at their specs again."""
    first: TensorDictBase = env.reset()
    for each in chain(env):
        each.empty_cache()
    return first


def seed_env(env: EnvBase, seed: int, incarnation: int, lanes: Sequence[int] = ()) -> list[int]:
    """Seed the next reset of every lane; returns their seeds, none where TorchRL chooses some.

    ``lanes`` are their numbers in the run; by default they are all there are.
    """
    lanes = lanes or range(env.batch_size.numel())
    of_all = lane_seeds(seed, max(lanes) + 1, incarnation)
    seeds = [of_all[lane] for lane in lanes]
    base = list(chain(env))[-1]
    if isinstance(base, GymnasiumVectorEnv):
        base.seed_lanes(seeds)
        base.first_lane = lanes[0]
        return seeds
    env.set_seed(seeds[0])
    return seeds if len(seeds) == 1 else []
