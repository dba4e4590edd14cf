"""Make an environment of any kind of ``create_env_fn``, or refuse it with the way out."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeAlias

import gymnasium
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from torch import nn
from torchrl.envs import (
    Compose,
    EnvBase,
    InitTracker,
    RenameTransform,
    StepCounter,
    TransformedEnv,
)
from torchrl.envs.batched_envs import BatchedEnvBase
from torchrl.envs.transforms import AutoResetEnv

from tallyroll.collector.compat import resets_itself
from tallyroll.collector.envs.gymnasium.infos import discovered
from tallyroll.collector.envs.gymnasium.vector import GymnasiumVectorEnv
from tallyroll.collector.envs.throwaway import close, throwaway
from tallyroll.collector.errors import (
    ArgumentError,
    EnvironmentRefused,
    MissingExtra,
    NameRefused,
)
from tallyroll.collector.options import Options
from tallyroll.collector.slab.info import Info
from tallyroll.collector.slab.names import Named, Rename, new_name, renamed, require_names
from tallyroll.storage.rows.keys import Key, as_key

CreateEnv: TypeAlias = str | EnvBase | VectorEnv | Callable[[], EnvBase | VectorEnv]


@dataclass(frozen=True)
class Made:
    """An environment ready to be driven."""

    env: EnvBase
    owned: bool
    """It was made here, so it is closed here."""
    description: dict[str, Any]
    """What it is, as provenance: JSON values."""


def require_id_options(options: Options) -> None:
    """Raise where ``options`` are given that only a Gymnasium id can have."""
    if options.num_envs is not None or options.env_kwargs:
        raise ArgumentError(
            "num_envs and env_kwargs go with a Gymnasium id; make the environment as you want it "
            "in the factory"
        )


def make_env(create: CreateEnv, options: Options) -> Made:
    """Make, or accept, the environment that a collector drives.

    Raises:
        ArgumentError: an unknown id, or arguments that do not fit the kind of ``create``.
        EnvironmentRefused: an environment that would lose or invent transitions.
    """
    if isinstance(create, str):
        return _from_id(create, options)
    require_id_options(options)
    made = callable(create) and not isinstance(create, (EnvBase, VectorEnv))
    env: Any = create() if made else create  # type: ignore[operator]
    try:
        if isinstance(env, VectorEnv):
            env = _driven(env, create if made else None, options)
        elif isinstance(env, EnvBase):
            env = _with_names(env, options.info_keys, options.rename)
        elif isinstance(env, gymnasium.Env):
            raise ArgumentError(
                f"got a single gymnasium environment, {env}; pass its id, or "
                "GymnasiumVectorEnv(SyncVectorEnv([make] * num_envs))"
            )
        else:
            raise ArgumentError(
                "create_env_fn: expected a Gymnasium id, a TorchRL EnvBase, a gymnasium VectorEnv "
                f"or a factory of one of them, got {'a factory of ' if made else ''}"
                f"{type(env).__name__}"
            )
        refuse(env)
    except BaseException:
        if made and isinstance(env, (VectorEnv, EnvBase, gymnasium.Env)):
            close(env)
        raise
    return Made(env, made, _describe(env))


def _driven(env: VectorEnv, create: Any, options: Options) -> GymnasiumVectorEnv:
    """``env`` with its infos declared by another one of ``create``, where that is a factory."""
    infos = options.info_keys
    if create is not None:
        infos = discovered(infos, create, env)
    return GymnasiumVectorEnv(
        env, reset_slots=options.reset_slots, info_keys=infos, rename=options.rename
    )


def _with_names(env: EnvBase, info_keys: Sequence[Info], rename: Rename) -> EnvBase:
    """A TorchRL environment, its columns renamed; what ``info_keys`` name are columns of it."""
    if rename and isinstance(env, GymnasiumVectorEnv):
        raise ArgumentError("rename: pass it to GymnasiumVectorEnv, which you made yourself")
    env = _renamed(env, rename)
    base = list(chain(env))[-1]
    known = {as_key(key) for key in env.observation_spec.keys(True, True)}
    known |= set(base.info_keys) if isinstance(base, GymnasiumVectorEnv) else set()
    names = [new_name(info.key, rename, known) for info in info_keys]
    if missing := ["/".join(name) for name in names if name not in known]:
        raise ArgumentError(
            f"info_keys: {missing} are no columns of the environment; give a TorchRL environment "
            "an info reader (env.set_info_dict_reader), or pass info_keys to GymnasiumVectorEnv"
        )
    if any(info.dtype is not None for info in info_keys):
        raise ArgumentError(
            "info_keys: a TorchRL environment declares dtypes itself; pass names here, and Info to "
            "GymnasiumVectorEnv"
        )
    return env


def _renamed(env: EnvBase, rename: Rename) -> EnvBase:
    """``env`` whose observations have the names that ``rename`` gives them.

    Raises:
        NameRefused: names collide.
    """
    if isinstance(env, GymnasiumVectorEnv):
        return env
    bare = _observations(env)
    keys = renamed(bare, rename)
    pairs = [(one.key, key) for one, key in zip(bare, keys, strict=True) if one.key != key]
    require_names_of(env, bare, keys)
    if not pairs:
        return env
    old, new = zip(*pairs, strict=True)
    # One after the other: in a single pass names that are swapped would overwrite each other.
    between = [(f"_renamed_{index}",) for index in range(len(pairs))]
    transform = Compose(RenameTransform(list(old), between), RenameTransform(between, list(new)))
    return TransformedEnv(env, transform, auto_unwrap=False)


def _observations(env: EnvBase) -> list[Named]:
    keys = map(as_key, env.observation_spec.keys(True, True))
    return [Named(key, key) for key in keys]


def require_names_of(
    env: EnvBase,
    observations: Sequence[Named] | None = None,
    given: Sequence[Key] | None = None,
    written: Iterable[Key] = (),
) -> None:
    """Raise where two columns of ``env``, or of what a policy writes, have one name.

    Raises:
        NameRefused: says which, and how it is settled.
    """
    require_names(
        _observations(env) if observations is None else observations,
        [as_key(key) for key in env.full_action_spec.keys(True, True)],
        [as_key(key) for key in env.full_reward_spec.keys(True, True)],
        [as_key(key) for key in env.full_done_spec.keys(True, True)],
        written,
        given,
    )


def _from_id(env_id: str, options: Options) -> Made:
    kwargs = options.env_kwargs or {}
    try:
        if env_id.startswith("ALE/") and find_spec("ale_py") is not None:
            import_module("ale_py")  # registers the ids

        def make() -> gymnasium.Env[Any, Any]:
            return gymnasium.make(env_id, **kwargs)

        # Observations are copied into the slab, so that the vector need not copy them before.
        vector = SyncVectorEnv(
            [make] * (options.num_envs or 1), copy=False, autoreset_mode=AutoresetMode.DISABLED
        )
    except (gymnasium.error.Error, ImportError) as error:
        _name_the_extra(env_id, error)
        raise ArgumentError(f"gymnasium cannot make {env_id!r}: {error}") from error
    except TypeError as error:
        raise ArgumentError(f"gymnasium cannot make {env_id!r} with {kwargs}: {error}") from error

    def look() -> VectorEnv:
        return SyncVectorEnv([make], autoreset_mode=AutoresetMode.DISABLED)

    try:
        env = _driven(vector, look, options)
    except BaseException:
        vector.close()
        raise
    return Made(env, True, {"id": env_id, "kwargs": _json(kwargs), "type": "SyncVectorEnv"})


def _json(value: Any) -> Any:
    """``value`` as a manifest can hold it; what JSON cannot say is there as its repr."""
    return json.loads(json.dumps(value, default=repr))


def _name_the_extra(env_id: str, error: Exception) -> None:
    """Raise :class:`MissingExtra` where one of tallyroll's extras would have helped."""
    extra = None
    if env_id.startswith("ALE/") and find_spec("ale_py") is None:
        extra = "atari"
    elif isinstance(error, gymnasium.error.DependencyNotInstalled) and "mujoco" in str(error):
        extra = "mujoco"
    if extra is not None:
        raise MissingExtra(
            f"{env_id} needs a package that is not installed: pip install 'tallyroll[{extra}]'"
        ) from error


def _describe(env: EnvBase) -> dict[str, Any]:
    bases = list(chain(env))
    base = bases[-1]
    if isinstance(base, GymnasiumVectorEnv):
        spec = base.vector_env.spec
        name = type(base.vector_env.unwrapped).__name__
        described: dict[str, Any] = {"id": spec.id if spec else None, "type": name}
    else:
        described = {"id": base.__dict__.get("env_name"), "type": type(base).__name__}
    transforms = [type(each).__name__ for outer in bases[:-1] for each in _transforms(outer)]
    return described | ({"transforms": transforms} if transforms else {})


def _transforms(env: TransformedEnv) -> list[Any]:
    transform = env.transform
    return list(transform) if isinstance(transform, Compose) else [transform]


def chain(env: EnvBase) -> Iterator[EnvBase]:
    """``env`` and what it wraps, outermost first."""
    yield env
    while isinstance(env, TransformedEnv):
        env = env.base_env
        yield env


def refuse(env: EnvBase) -> None:
    """Raise :class:`EnvironmentRefused` where driving ``env`` would falsify data."""
    if len(env.batch_size) > 1:
        raise EnvironmentRefused(
            f"expected a batch size [] or [lanes], got {list(env.batch_size)}; flatten the "
            "environment's batch"
        )
    if "done" not in env.done_spec.keys(True, True):
        raise EnvironmentRefused(
            "expected a root-level 'done' beside the per-agent ones, got "
            f"{sorted(str(key) for key in env.done_spec.keys(True, True))}; without it the end of "
            "a lane's trajectory is undefined (PettingZoo: done_on_any=False gives one)"
        )
    *outer, base = chain(env)
    if outer and isinstance(base, GymnasiumVectorEnv) and base.marks_transitions:
        raise EnvironmentRefused(
            f"{type(base.vector_env.unwrapped).__name__} ignores reset masks, so a TransformedEnv "
            "around it would count its reset slots as transitions; apply Gymnasium's vector "
            "wrappers underneath, or use SyncVectorEnv"
        )
    _refuse_silent_vector(base)


def _refuse_silent_vector(env: EnvBase) -> None:
    """``GymEnv(id, num_envs=N)`` builds a vector whose final observations TorchRL zeroes."""
    inner = env.__dict__.get("_env")
    if not isinstance(inner, VectorEnv):
        return
    mode = getattr(inner.unwrapped, "autoreset_mode", None)
    if mode is not AutoresetMode.DISABLED:
        raise EnvironmentRefused(
            f"{type(env).__name__} over a gymnasium vector in {mode} mode zeroes or loses final "
            "observations and counts reset slots as transitions; pass the id and num_envs to the "
            "collector, or GymnasiumVectorEnv(gymnasium.make_vec(id, num_envs=N))"
        )


def runs_on_cpu(env: EnvBase) -> bool:
    """A Gymnasium environment, which steps on the CPU whatever device is asked for."""
    return isinstance(list(chain(env))[-1], GymnasiumVectorEnv)


def loses_finals(env: EnvBase) -> bool:
    """The final observation of an episode is lost (TorchRL's ``auto_reset=True``)."""
    for each in chain(env):
        if isinstance(each, AutoResetEnv) or resets_itself(each):
            return True
        if isinstance(each, BatchedEnvBase):
            # What its workers do can only be seen on one of them.
            with throwaway(partial(each.create_env_fn[0], **each.create_env_kwargs[0])) as worker:
                return loses_finals(worker)
    return False


def with_time_limit(env: EnvBase, frames: int) -> EnvBase:
    """``env`` whose trajectories are truncated after ``frames`` transitions."""
    base = list(chain(env))[-1]
    declared_later = isinstance(base, GymnasiumVectorEnv) and ("step_count",) in base.info_keys
    if declared_later or _counts_otherwise(env):
        raise NameRefused(
            "max_frames_per_traj counts in a column 'step_count', which the environment has "
            'already: rename={"step_count": "own_step_count"}'
        )
    if isinstance(base, GymnasiumVectorEnv) and not base.resets_by_mask:
        raise EnvironmentRefused(
            f"max_frames_per_traj resets lanes by mask, which "
            f"{type(base.vector_env.unwrapped).__name__} ignores; pass max_episode_steps to "
            "gymnasium.make_vec, or use SyncVectorEnv"
        )
    return TransformedEnv(env, StepCounter(max_steps=frames))


def _counts_otherwise(env: EnvBase) -> bool:
    """A column has the name that a StepCounter writes to, and another spec than it declares."""
    spec = env.observation_spec.get("step_count", None)
    if spec is None:
        return False
    low, high = getattr(spec, "low", None), getattr(spec, "high", None)
    if spec.dtype is not torch.int64 or low is None or high is None:
        return True
    most = torch.iinfo(torch.int64).max
    return not (bool(torch.all(low == 0)) and bool(torch.all(high == most)))


def with_recurrent_states(env: EnvBase, policy: Any) -> EnvBase:
    """``env`` with the states that a recurrent policy reads, where it lacks them."""
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
    base = list(chain(env))[-1]
    if isinstance(base, GymnasiumVectorEnv) and base.marks_transitions:
        raise EnvironmentRefused(
            "a recurrent policy's states are reset lane by lane through TransformedEnv, which "
            f"{type(base.vector_env.unwrapped).__name__} does not allow (it ignores reset masks); "
            "use SyncVectorEnv"
        )
    tracker = [] if ("is_init",) in have else [InitTracker()]
    return TransformedEnv(env, Compose(*tracker, *missing))


def can_step_part(env: EnvBase) -> bool:
    """Some lanes can be stepped while the others wait."""
    if isinstance(env, GymnasiumVectorEnv):
        return env.can_step_part
    return isinstance(env, BatchedEnvBase) or env.batch_size.numel() == 1
