"""Properties of an environment below its transforms."""

from collections.abc import Iterator
from functools import partial

from torchrl.envs import Compose, EnvBase, FrameSkipTransform, TransformedEnv
from torchrl.envs.batched_envs import BatchedEnvBase
from torchrl.envs.transforms import AutoResetEnv

from tallyroll.collector.compat import resets_itself
from tallyroll.collector.envs.frame_skips import product, ticks_of_layer, ticks_of_objects
from tallyroll.collector.envs.probes.trial_env import throwaway
from tallyroll.collector.envs.system_env import SystemEnv


def chain(env: EnvBase) -> Iterator[EnvBase]:
    """Yield ``env`` and the environments that it wraps, outermost first."""
    yield env
    while isinstance(env, TransformedEnv):
        env = env.base_env
        yield env


def system_of(env: EnvBase) -> SystemEnv | None:
    """Return the `SystemEnv` that ``env`` wraps; None if the base is of another kind."""
    base = list(chain(env))[-1]
    return base if isinstance(base, SystemEnv) else None


def fills_slabs(env: EnvBase) -> bool:
    """Return True if ``env`` writes the results of a step to the slab itself."""
    return isinstance(env, SystemEnv) and env.stepper.fills


def runs_on_cpu(env: EnvBase) -> bool:
    """Return True if ``env`` is over a system whose arrays are on the CPU."""
    base = system_of(env)
    return base is not None and base.device.type == "cpu"


def ticks_of(env: EnvBase) -> int | None:
    """Return the simulator ticks per transition; None if unknown, as in other processes."""
    *outer, base = chain(env)
    skips = [
        part
        for each in outer
        if isinstance(each, TransformedEnv)
        for part in (each.transform if isinstance(each.transform, Compose) else [each.transform])
    ]
    found = [ticks_of_layer(part) for part in skips if isinstance(part, FrameSkipTransform)]
    if isinstance(base, SystemEnv):
        found.append(base.system.ticks)
    elif isinstance(base, BatchedEnvBase):
        envs = vars(base).get("_envs")
        each = {ticks_of(one) for one in envs} if envs else {None}
        found.append(each.pop() if len(each) == 1 else None)
    else:
        found.append(int(getattr(base, "wrapper_frame_skip", 1) or 1))
        if (wrapped := vars(base).get("_env")) is not None:
            found.append(ticks_of_objects([wrapped]))
    return product(found)


def loses_finals(env: EnvBase) -> bool:
    """Return True if final observations are lost (TorchRL's ``auto_reset=True``)."""
    for each in chain(env):
        if isinstance(each, SystemEnv):
            return each.stepper.declares.loses_finals
        if isinstance(each, AutoResetEnv) or resets_itself(each):
            return True
        if isinstance(each, BatchedEnvBase):
            # Inspect a worker: the base environment does not show how its workers behave.
            with throwaway(partial(each.create_env_fn[0], **each.create_env_kwargs[0])) as worker:
                return loses_finals(worker)
    return False


def can_step_part(env: EnvBase) -> bool:
    """Return True if some lanes can be stepped while the others wait.

    A `SystemEnv` whose arrays are tensors always steps all lanes together.
    """
    if env.batch_size.numel() == 1:
        return not isinstance(env, SystemEnv) or env.stepper.declares.can_step_part
    if isinstance(env, SystemEnv):
        return env.stepper.fills and env.stepper.declares.can_step_part
    return isinstance(env, BatchedEnvBase)
