"""Environments whose resets are given seeds, options and contexts; others are refused, with why."""

from torchrl.envs import EnvBase, ParallelEnv
from torchrl.envs.batched_envs import BatchedEnvBase

from tallyroll.collector.envs.driven.traits import chain, system_of
from tallyroll.collector.envs.stepping.reset_draws import ResetDraws
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused
from tallyroll.collector.options.resets import Resets


def _why_not(env: EnvBase) -> str:
    """Return why an environment of TorchRL's takes nothing at resets of its lanes."""
    *_, base = chain(env)
    if isinstance(base, ParallelEnv):
        return "whose processes reset their lanes, and are given nothing for them"
    if isinstance(base, BatchedEnvBase) or base.batch_size.numel() > 1:
        return "whose reset has one seed and the same options for all lanes"
    return "whose set_seed begins an episode of its own, or not, by its class"


def give_resets(env: EnvBase, resets: Resets) -> None:
    """Let resets of ``env`` be given what ``resets`` draw, if these draw anything.

    Raises:
        EnvironmentRefused: its resets take no such thing; says why, and the way out.
        ArgumentError: it takes other contexts.
    """
    base = system_of(env)
    if base is not None:
        base.stepper.contexts.leave(base.system)
    if not resets.draws:
        return
    if base is None:
        raise EnvironmentRefused(
            f"resets: {type(env).__name__} is an environment of TorchRL's, {_why_not(env)}; pass "
            "the id, or a factory of the Gymnasium environment, with num_envs"
        )
    system, d = base.system, base.stepper.declares
    if resets.seeds and not d.reset_seeds:
        raise EnvironmentRefused(
            f"resets: {base.kind} takes no seed at the reset of a lane ({system.why_no_resets}); "
            "leave seeds (--reset-seeds) out, or use an environment of Gymnasium by its id"
        )
    if resets.sampler is not None and not (d.context or d.options):
        raise EnvironmentRefused(
            f"resets: {base.kind} takes no options at the reset of a lane "
            f"({system.why_no_resets}), and declares no context; leave the sampler (--reset) out, "
            "or use an environment of Gymnasium by its id"
        )
    if kept := sorted(system.kept_options & {*resets.options_of(0)}):
        raise ArgumentError(
            f"reset_sampler: expected other names than {kept}, which {base.kind} needs for itself"
        )
    base.stepper.contexts.take(ResetDraws(resets, system))
    base.stepper.follow_resets()
