"""Preparation of an environment for a collector: device, time limit, primers and seeds."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.envs import Compose, EnvBase, InitTracker, ParallelEnv, StepCounter, TransformedEnv
from torchrl.envs.batched_envs import BatchedEnvBase
from torchrl.modules import set_exploration_modules_spec_from_env

from tallyroll.collector.counting.numbering import lane_seeds
from tallyroll.collector.envs.failures import env_code
from tallyroll.collector.envs.probes.known_faults import refuse_known_faults
from tallyroll.collector.envs.probes.probe import refuse_reused
from tallyroll.collector.envs.setup.traits import can_step_part, chain, runs_on_cpu, system_of
from tallyroll.collector.envs.stepping.reset_draws import ResetDraws
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused, NameRefused, ValueRefused
from tallyroll.collector.options import Options
from tallyroll.collector.options.resets import Resets
from tallyroll.collector.policies.several.joint import Joint
from tallyroll.storage.rows.keys import NEXT, as_key


def _why_not(env: EnvBase) -> str:
    """Return why a TorchRL environment accepts no seeds or options at resets of its lanes."""
    *_, base = chain(env)
    if isinstance(base, ParallelEnv):
        return "whose processes reset their lanes without seeds or options"
    if isinstance(base, BatchedEnvBase) or base.batch_size.numel() > 1:
        return "whose reset accepts one seed and the same options for all lanes"
    return "whose set_seed may reset it or not, depending on its class"


def give_resets(env: EnvBase, resets: Resets) -> None:
    """Give resets of ``env`` the seeds, options or contexts that ``resets`` draw, if any.

    Raises:
        EnvironmentRefused: the resets of ``env`` accept no seeds or no options. The message
            explains why and names an alternative.
        ArgumentError: the names of the options are reserved, or differ from the declared contexts.
    """
    base = system_of(env)
    if base is not None:
        base.stepper.contexts.leave(base.system)
    if not resets.draws:
        return
    if base is None:
        raise EnvironmentRefused(
            f"resets: {type(env).__name__} is a TorchRL environment, {_why_not(env)}. Pass the id, "
            "or a factory of the Gymnasium environment, with num_envs."
        )
    system, d = base.system, base.stepper.declares
    if resets.seeds and not d.reset_seeds:
        raise EnvironmentRefused(
            f"resets: {base.kind} accepts no seed at the reset of a lane ({system.why_no_resets}). "
            "Leave seeds (--reset-seeds) out, or pass the id of a Gymnasium environment."
        )
    if resets.sampler is not None and not (d.context or d.options):
        raise EnvironmentRefused(
            f"resets: {base.kind} accepts no options at the reset of a lane "
            f"({system.why_no_resets}), and declares no context. Leave the sampler (--reset) out, "
            "or pass the id of a Gymnasium environment."
        )
    if kept := sorted(system.kept_options & {*resets.options_of(0)}):
        raise ArgumentError(
            f"reset_sampler: expected names of options other than {kept}, which {base.kind} "
            "reserves"
        )
    base.stepper.contexts.take(ResetDraws(resets, system))
    base.stepper.track_reset_slots()


def prepare_env(env: EnvBase, policy: Any, options: Options) -> EnvBase:
    """Return ``env`` on its device, with a time limit and recurrent states if needed.

    Raises:
        ArgumentError: ``options`` do not fit the environment.
        EnvironmentRefused: the environment cannot be driven with ``options``.
        NameRefused: the time limit needs the column ``step_count``, which already exists.
    """
    give_resets(env, options.resets)
    _give_reward_dtype(env, options.columns.reward_dtype)
    if options.layout.name != "torchrl":  # that layout reproduces TorchRL's behavior
        refuse_known_faults(env, options.max_frames_per_traj, options.checks.finals == "lost")
        _require_observed_agents(env)
    env, base = _on_device(env, options), system_of(env)
    if options.reset_at_each_iter and base is not None and base.system.forgets_resets:
        raise EnvironmentRefused(
            f"reset_at_each_iter: {base.kind} may reset a lane again in the step after a reset, "
            "and ignore its action, if the lane's episode had ended. Make the vector with "
            "autoreset disabled, or with shared_memory=True."
        )
    if base is not None and (options.init_random_frames or _draws(policy)):
        base.stepper.look_for_masks()
    env = with_recurrent_states(env, policy)
    if isinstance(policy, nn.Module):
        # Set the range of actions in exploration modules that need one and have none.
        set_exploration_modules_spec_from_env(policy, env)
    if options.max_frames_per_traj is not None:
        env = with_time_limit(env, options.max_frames_per_traj)
    if options.surplus == "never_step" and not can_step_part(env):
        raise ArgumentError(
            'surplus="never_step" needs an environment that can step some of its lanes '
            "(a Gymnasium id, SyncVectorEnv with autoreset disabled, SerialEnv, ParallelEnv), "
            f'got {env}. Use surplus="carry" or "discard".'
        )
    if base is not None:
        base.stepper.mark_lost_finals(options.checks.finals == "lost")
    if options.checks.finals != "lost":
        refuse_reused(env)
    return env


def _on_device(env: EnvBase, options: Options) -> EnvBase:
    """Return ``env`` on the device that ``options`` select for it, if any.

    Raises:
        ArgumentError: ``env_device`` is a device on which the environment does not compute.
    """
    device, base = options.env_device or options.device, system_of(env)
    if device is None:
        return env
    moves = device.type != "cpu" and runs_on_cpu(env)
    if moves and base is not None and not base.stepper.keep_on(device):
        if options.env_device is None:
            return env
        raise ArgumentError(
            f"env_device: expected the CPU, to which {base.kind} returns its arrays, got {device}. "
            "Leave env_device out, and pass policy_device or storing_device."
        )
    return env.to(device)


def _draws(policy: Any) -> bool:
    """Return True if a policy, in a collector's form, leaves some actions to random draws."""
    if not isinstance(policy, Joint):
        return policy is None
    return any(part.policy is None or part.opening for part in policy.parts)


def _require_observed_agents(env: EnvBase) -> None:
    """Make TorchRL's PettingZoo wrapper raise if it would store zeros for an agent's end."""
    base: Any = list(chain(env))[-1]
    if type(base).__module__ == "torchrl.envs.libs.pettingzoo" and base.parallel:
        vars(base)["_step_parallel"] = partial(_step_observed, base)


def _step_observed(env: Any, tensordict: TensorDictBase) -> Any:
    """Step TorchRL's wrapper ``env`` of a parallel environment.

    Raises:
        ValueRefused: the step returned no observation of an agent that acted.
    """
    acting = list(env._env.agents)  # noqa: SLF001
    returned = type(env)._step_parallel(env, tensordict)  # noqa: SLF001
    for group, agents in env.group_map.items():
        for agent in agents:
            if agent in acting and agent not in returned[0]:
                error = ValueRefused(
                    (NEXT, group, "observation"),
                    f"the observation of agent {agent}, which acted",
                    "none (TorchRL stores zeros for the observation and the reward)",
                    "return the observation from step, or pass the PettingZoo environment itself, "
                    "whose rows mark lost observations",
                )
                raise error.locate(lane=0)
    return returned


def _give_reward_dtype(env: EnvBase, dtype: Any) -> None:
    """Make ``env`` return rewards of ``dtype``; None keeps the declared dtype.

    Raises:
        ArgumentError: a TorchRL environment declares another dtype.
    """
    base = system_of(env)
    if base is not None:
        base.store_rewards_as(dtype)
        for each in chain(env):
            each.empty_cache()
        return
    found = {spec.dtype for spec in env.full_reward_spec.values(True, True)}
    if dtype is not None and found != {dtype}:
        raise ArgumentError(
            f"reward_dtype: expected {', '.join(map(str, found))}, as the reward_spec of {env} "
            f"declares, got {dtype}. Change that spec, or pass the environment that TorchRL wraps"
        )


def first_reset(env: EnvBase, first_lane: int = 0) -> TensorDictBase:
    """Reset ``env``, and refresh the specs of its wrappers, because a reset may declare infos.

    ``first_lane`` is the number of its first lane in the run.
    """
    lane = first_lane if env.batch_size.numel() == 1 else None
    with env_code("the first reset of the environment", lane):
        first: TensorDictBase = env.reset()
        for each in chain(env):
            each.empty_cache()
    return first


def seed_env(
    env: EnvBase, seed: int, incarnation: int, lanes: Sequence[int] = (), *, asked: bool = True
) -> list[int]:
    """Seed the next reset of every lane.

    ``lanes`` are the lane numbers in the run (default: all lanes). ``asked`` is True if the caller
    requires this very seed.

    Return the seeds of the lanes, or an empty list if the environment chooses some of them itself.

    Raises:
        ArgumentError: the system accepts seeds only when it is made, and cannot be made again.
    """
    lanes = lanes or range(env.batch_size.numel())
    of_all = lane_seeds(seed, max(lanes) + 1, incarnation)
    seeds = [of_all[lane] for lane in lanes]
    base = system_of(env)
    if base is not None:
        base.system.first_lane = lanes[0]
        resets = base.stepper.contexts.resets
        first = [] if resets is None else resets.seed(seed, incarnation, lanes)
        if first:
            return first
        if base.stepper.takes_seeds:
            base.seed_lanes(seeds)
            shared = base.system.declares.seeds == "shared"
            return [] if shared and len(seeds) > 1 else seeds
        if asked and base.system.declares.seeds == "make":
            raise ArgumentError(
                f"seed: {base.kind} accepts seeds only when it is made. Pass a factory that "
                "accepts seeds (def make(seeds): …), or leave seed and resume out."
            )
        return []
    with env_code("set_seed of the environment", lanes[0] if len(lanes) == 1 else None):
        env.set_seed(seeds[0])
    return seeds if len(seeds) == 1 else []


def with_time_limit(env: EnvBase, frames: int) -> EnvBase:
    """Return ``env`` with trajectories that are truncated after ``frames`` transitions.

    `CopiedLanes` copies the flag to the rows.
    """
    base = system_of(env)
    declared_later = base is not None and ("step_count",) in base.info_keys
    if declared_later or _counts_otherwise(env):
        raise NameRefused(
            "max_frames_per_traj counts in a column 'step_count', which the environment already "
            'has. Rename that column: rename={"step_count": "own_step_count"}'
        )
    if base is not None and not base.stepper.declares.resets_by_mask:
        raise EnvironmentRefused(
            f"max_frames_per_traj resets lanes by mask, but {base.kind} ignores masks. Limit "
            "episodes when the vector is made (gymnasium.make_vec: max_episode_steps), or use "
            "SyncVectorEnv."
        )
    return TransformedEnv(env, StepCounter(max_steps=frames), auto_unwrap=True)


def _counts_otherwise(env: EnvBase) -> bool:
    """Return True if ``env`` has a column ``step_count`` with a spec unlike a StepCounter's."""
    spec = env.observation_spec.get("step_count", None)
    if spec is None:
        return False
    low, high = getattr(spec, "low", None), getattr(spec, "high", None)
    if spec.dtype is not torch.int64 or low is None or high is None:
        return True
    most = torch.iinfo(torch.int64).max
    return not (bool(torch.all(low == 0)) and bool(torch.all(high == most)))


def with_recurrent_states(env: EnvBase, policy: Any) -> EnvBase:
    """Return ``env`` with the states that a recurrent policy reads, added if missing."""
    if not isinstance(policy, nn.Module):
        return env
    primers = [
        module.make_tensordict_primer()  # type: ignore[operator]
        for module in policy.modules()
        if hasattr(module, "make_tensordict_primer")
    ]
    have = {as_key(key) for key in env.observation_spec.keys(True, True)}
    missing = [p for p in primers if not {as_key(key) for key in p.primers.keys(True)} <= have]
    if not missing:
        return env
    base = system_of(env)
    if base is not None and base.stepper.declares.marks_transitions:
        raise EnvironmentRefused(
            "the states of a recurrent policy are reset lane by lane through TransformedEnv, but "
            f"{base.kind} ignores reset masks. Use SyncVectorEnv."
        )
    tracker = [] if ("is_init",) in have else [InitTracker()]
    return TransformedEnv(env, Compose(*tracker, *missing), auto_unwrap=True)
