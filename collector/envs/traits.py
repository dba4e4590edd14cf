"""Traits of an environment below its transforms, decided in one place."""

from collections.abc import Iterator
from functools import partial

from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.batched_envs import BatchedEnvBase
from torchrl.envs.transforms import AutoResetEnv

from tallyroll.collector.compat import resets_itself
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.envs.throwaway import throwaway


def chain(env: EnvBase) -> Iterator[EnvBase]:
    """``env`` and what it wraps, outermost first."""
    yield env
    while isinstance(env, TransformedEnv):
        env = env.base_env
        yield env


def system_of(env: EnvBase) -> SystemEnv | None:
    """The environment over a system that lies in ``env``; None where another one does."""
    base = list(chain(env))[-1]
    return base if isinstance(base, SystemEnv) else None


def fills_slabs(env: EnvBase) -> bool:
    """``env`` writes what a step returns to the slab itself."""
    return isinstance(env, SystemEnv) and env.fills


def runs_on_cpu(env: EnvBase) -> bool:
    """A system whose arrays are on the CPU, whatever device is asked for."""
    base = system_of(env)
    return base is not None and base.device.type == "cpu"


def loses_finals(env: EnvBase) -> bool:
    """The final observation of an episode is lost (TorchRL's ``auto_reset=True``)."""
    for each in chain(env):
        if isinstance(each, SystemEnv):
            return each.loses_finals
        if isinstance(each, AutoResetEnv) or resets_itself(each):
            return True
        if isinstance(each, BatchedEnvBase):
            # What its workers do can only be seen on one of them.
            with throwaway(partial(each.create_env_fn[0], **each.create_env_kwargs[0])) as worker:
                return loses_finals(worker)
    return False


def can_step_part(env: EnvBase) -> bool:
    """Some lanes can be stepped while the others wait."""
    if isinstance(env, SystemEnv):
        return env.can_step_part
    return isinstance(env, BatchedEnvBase) or env.batch_size.numel() == 1
