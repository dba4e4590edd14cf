"""Make environments from any kind of ``create_env_fn``, or raise an error with a workaround."""

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import gymnasium
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv
from torchrl.envs import Compose, EnvBase, RenameTransform, TransformedEnv
from torchrl.envs.batched_envs import BatchedEnvBase

from tallyroll.collector.compat import is_starting
from tallyroll.collector.envs import registry
from tallyroll.collector.envs.close import closing_on_error
from tallyroll.collector.envs.failures import death_of, env_code
from tallyroll.collector.envs.gymnasium import make as of_gymnasium
from tallyroll.collector.envs.gymnasium.system import GymnasiumSystem
from tallyroll.collector.envs.setup.instances import objects_of, require_own_objects
from tallyroll.collector.envs.setup.packages import VERSIONS, packages_of
from tallyroll.collector.envs.setup.traits import chain, system_of
from tallyroll.collector.envs.stepping.restarts import Make
from tallyroll.collector.envs.system import System
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused
from tallyroll.collector.options import Options
from tallyroll.collector.options.sharding import ShardOfRun
from tallyroll.collector.slab.info import Info
from tallyroll.collector.slab.names import NamedColumn, Rename, new_name, renamed, require_names
from tallyroll.storage.rows.keys import Key, as_key

CreateEnv: TypeAlias = str | EnvBase | VectorEnv | System | Callable[[], Any]


NOT_JSON = "kwargs_not_json"
"""Key in the description of an environment. Its value names arguments that JSON cannot hold."""
CLASSES = "_classes"
"""Key in the description of an environment. Its value lists the names of its classes."""
_LIBRARIES = (
    *("tallyroll.collector.", "torchrl.", "stable_baselines3."),
    *("gymnasium.core", "gymnasium.vector.", "gymnasium.wrappers."),
)
"""Module prefixes of classes that only wrap or hold environments."""


@dataclass(frozen=True)
class ReadyEnv:
    """An environment that a collector can drive."""

    env: EnvBase
    owned: bool
    """True if the collector made the environment and therefore closes it."""
    description: dict[str, Any]
    """Description of the environment for provenance, as JSON values.

    `VERSIONS` contains the versions of packages that compute it, `CLASSES` its class names."""
    instance: object = None
    """The object that the caller passed, or that a factory made."""


def require_no_env_kwargs(options: Options) -> None:
    """Raise if ``options`` contain arguments for an id although there is no id."""
    if options.env_kwargs:
        raise ArgumentError(
            "env_kwargs: expected the id of an environment as create_env_fn, got an environment or "
            "a factory. Pass these arguments inside the factory."
        )


def make_env(create: CreateEnv, options: Options) -> ReadyEnv:
    """Make, or accept, the environment that a collector drives.

    Raises:
        ArgumentError: the id is unknown, or arguments do not fit the kind of ``create``.
        EnvironmentRefused: the environment would lose or invent transitions.
    """
    with env_code("create_env_fn"):
        return _by_name(create, options) if isinstance(create, str) else _made_of(create, options)


def _made_of(create: Any, options: Options) -> ReadyEnv:
    require_no_env_kwargs(options)
    factory = _callable_alone(create, options.num_envs) if _is_factory(create) else None
    sized = False
    if factory is not None and options.num_envs is not None:
        sized = _takes_lanes(create)
    with processes_guarded():
        made: Any = create if factory is None else factory()
        if factory is not None and isinstance(made, gymnasium.Env) and registry.adopt(made) is None:
            made, factory = of_gymnasium.vector_of(made, factory, options.num_envs or 1)
            options = replace(options, num_envs=None)
    sized = sized and options.num_envs is not None
    with closing_on_error(None if factory is None else made):
        if options.num_envs is not None and not sized and not isinstance(made, gymnasium.Env):
            if options.part is not None:
                raise ArgumentError(_no_shard(made, factory, options.part))
            raise ArgumentError(
                f"num_envs={options.num_envs}: expected an id or a factory of a single Gymnasium "
                f"environment, got {'a factory of ' if factory else ''}{type(made).__name__}; "
                "leave num_envs out, because this environment already has its own lanes"
            )
        env = _driven(made, factory, options)
        base = system_of(env)
        if factory is None and base is not None and not isinstance(made, EnvBase):
            base.owns_system = False  # an attribute that callers set, too
        refuse(env)
        require_own_objects(env)
        if sized and env.batch_size.numel() != options.num_envs:
            raise ArgumentError(
                f"create_env_fn: expected {options.num_envs} lanes from a factory that was called "
                f"with num_envs={options.num_envs}, got {env.batch_size.numel()}. Make num_envs "
                "lanes in the factory."
            )
    classes = _classes_of(made) or _factories_of(made, create if factory else None)
    described = _describe(env) | {VERSIONS: packages_of(env), CLASSES: classes}
    return ReadyEnv(env, factory is not None, described, made)


@contextmanager
def processes_guarded() -> Iterator[None]:
    """Context manager that explains why an environment's processes failed to start.

    Raises:
        EnvironmentDied: a process of a vector ended.
        EnvironmentRefused: a process imported the main module and ran this code again.
    """
    try:
        yield
    except (EOFError, OSError) as error:
        text = (
            "the environment's own processes ended while it was made. If they import the main "
            'module, as those of AsyncVectorEnv do with context="spawn" or "forkserver", '
            f"{_GUARD}"
        )
        died = death_of(error)
        if died is not None:
            died.add_note(text)
            raise died from error
        if not isinstance(error, (EOFError, ConnectionError)):
            raise
        raise EnvironmentRefused(text) from error
    except RuntimeError as error:
        if not is_starting():
            raise
        raise EnvironmentRefused(
            f"a process that the environment started ran the code of the main module: {_GUARD}"
        ) from error


_GUARD = 'make environment and collector under `if __name__ == "__main__":`'


def _is_factory(create: Any) -> bool:
    return callable(create) and not isinstance(create, (EnvBase, VectorEnv, System))


def _no_shard(made: object, factory: object, part: ShardOfRun) -> str:
    """Return the error text for an environment that cannot be made for a shard."""
    what = f"a factory of {type(made).__name__}" if factory else f"an instance, {made}"
    return (
        f"shard={part}: expected an id, a factory of a single Gymnasium environment, or one with "
        f"an argument num_envs, to make {len(part.lanes)} of the {part.run_lanes} lanes, got "
        f"{what}. Lanes that are made together cannot be split into shards. Pass def "
        "make(num_envs): …"
    )


def _callable_alone(factory: Any, num_envs: int | None) -> Callable[..., Any]:
    """Return ``factory`` as a callable without required arguments.

    The callable passes ``num_envs`` if the factory has that argument and there is a value. It
    passes ``seeds=None`` if the factory requires seeds, because there are none yet.

    Raises:
        ArgumentError: the factory requires other arguments, as a policy does.
    """
    given: dict[str, Any] = {}
    if num_envs is not None and _takes_lanes(factory):
        given["num_envs"] = num_envs
    if lacking := [name for name in _needed_by(factory) if name not in given]:
        name = getattr(factory, "__qualname__", type(factory).__qualname__)
        raise ArgumentError(
            f"create_env_fn: expected a function without arguments that makes an environment, got "
            f"{name}, which needs {', '.join(lacking)}. Bind its arguments with functools.partial. "
            "If it is the policy, pass it as the second argument."
        )
    seeds = _seeds_of(factory)
    wanted = seeds is not None and seeds.default is inspect.Parameter.empty
    if wanted:
        given["seeds"] = None
    return partial(factory, **given) if given else factory


def _needed_by(factory: Callable[..., Any]) -> list[str]:
    """Return the names of required arguments of ``factory``, except ``seeds``."""
    called = factory.forward if isinstance(factory, torch.nn.Module) else factory
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return []
    several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind not in several and each.name != "seeds"
    ]


def _takes_lanes(factory: Any) -> bool:
    """Return True if ``factory`` has an argument ``num_envs`` that is not bound yet."""
    given = isinstance(factory, partial) and "num_envs" in factory.keywords
    return not given and _argument(factory, "num_envs") is not None


def _seeds_of(factory: Callable[..., Any]) -> inspect.Parameter | None:
    return _argument(factory, "seeds")


def _argument(factory: Callable[..., Any], name: str) -> inspect.Parameter | None:
    """Return the parameter ``name`` of a factory; None if it has none or no signature."""
    try:
        return inspect.signature(factory).parameters.get(name)
    except (TypeError, ValueError):
        return None


def _driven(made: Any, factory: Callable[..., Any] | None, options: Options) -> EnvBase:
    """Return the environment that a collector drives, given ``made`` and its ``factory``."""
    if isinstance(made, EnvBase):
        return _with_names(made, options.info_keys, options.rename)
    system = made if isinstance(made, System) else registry.adopt(made)
    if isinstance(made, VectorEnv) and (system is None or isinstance(system, GymnasiumSystem)):
        return of_gymnasium.over(made, factory, options)
    if system is not None:
        return _over(system, options, _with_seeds(factory))
    if isinstance(made, gymnasium.Env):
        raise ArgumentError(
            "create_env_fn: expected an id or a factory, got a single gymnasium environment, "
            f"{made}. Pass its id, or a function that makes one, and num_envs."
        )
    is_old = any(each.__module__.partition(".")[0] == "gym" for each in type(made).__mro__)
    way_out = ". Wrap it in shimmy.GymV21CompatibilityV0(env=env)." if is_old else ""
    raise ArgumentError(
        "create_env_fn: expected a Gymnasium id, a TorchRL EnvBase, a gymnasium VectorEnv or a "
        f"factory of one of them, got {'a factory of ' if factory else ''}{type(made).__name__}"
        f"{' of gym' if is_old else ''}{way_out}"
    )


def _with_seeds(factory: Callable[..., Any] | None) -> Make | None:
    """Return a function that makes a system from seeds with ``factory``, if it accepts seeds."""
    if factory is None or _seeds_of(factory) is None:
        return None

    def make(seeds: Sequence[int] | None) -> System:
        made = factory(seeds=seeds)
        system = made if isinstance(made, System) else registry.adopt(made)
        assert system is not None, "a factory makes the same kind each time"
        return system

    return make


def _by_name(name: str, options: Options) -> ReadyEnv:
    kwargs = dict(options.env_kwargs or {})
    found = registry.find(name)
    env: SystemEnv
    if found is None:
        env = of_gymnasium.from_id(name, options)
    else:
        kind, of_kind = found
        more: dict[str, Any] = {}
        if kind.names_contexts and options.resets.sampler is not None:
            more["context"] = sorted(options.resets.options_of(0))

        def make(seeds: Sequence[int] | None) -> Any:
            try:
                return kind.make(of_kind, options.num_envs or 1, seeds, **kwargs, **more)
            except TypeError as error:
                raise ArgumentError(f"cannot make {name!r} with {kwargs}: {error}") from error

        system = make(None)
        with closing_on_error(system):
            if isinstance(system, GymnasiumSystem):
                env = of_gymnasium.over(system.env, lambda: make(None).env, options)
            else:
                env = _over(system, options, make)
    with closing_on_error(env):
        require_own_objects(env)
    described = {"id": name, "kwargs": _json(kwargs), "type": env.kind}
    if changed := [each for each, value in kwargs.items() if not _is_json(value)]:
        described[NOT_JSON] = changed
    return ReadyEnv(env, True, described | {VERSIONS: packages_of(env)})


def _over(system: System, options: Options, make: Make | None) -> SystemEnv:
    """Return an environment over ``system``, with info columns. ``make`` makes the system again."""
    infos = options.info_keys
    keeps = bool(infos) and system.keep_infos(infos)

    def again(seeds: Sequence[int] | None) -> System:
        assert make is not None
        made = make(seeds)
        made.keep_infos(infos)
        return made

    env = SystemEnv(
        system,
        rename=options.rename,
        make=again if keeps and make else make,
        draws_later=options.resets.sampler is not None,
    )
    if not keeps:
        _with_names(env, infos, {})
    return env


def _with_names(env: EnvBase, info_keys: Sequence[Info], rename: Rename) -> EnvBase:
    """Rename columns of a TorchRL environment, and check that it has the columns ``info_keys``."""
    if rename and isinstance(env, SystemEnv):
        raise ArgumentError(
            "rename: expected an environment that the collector makes, got a "
            f"{type(env).__name__}. Pass rename to the constructor of that environment."
        )
    env = _renamed(env, rename)
    base = system_of(env)
    known = {as_key(key) for key in env.observation_spec.keys(True, True)}
    known |= set() if base is None else set(base.info_keys)
    names = [new_name(info.key, rename, known) for info in info_keys]
    if missing := ["/".join(name) for name in names if name not in known]:
        way_out = "Give the environment an info reader (env.set_info_dict_reader)."
        if base is not None:
            way_out = "Add them to the observations in a wrapper of the environment."
            if isinstance(base.system, GymnasiumSystem):
                way_out = "Pass info_keys to the constructor of GymnasiumVectorEnv."
        of = type(env).__name__ if base is None else f"{base.kind}, whose infos are not kept"
        raise ArgumentError(f"info_keys: {missing} are not columns of {of}. {way_out}")
    if any(info.dtype is not None for info in info_keys):
        raise ArgumentError(
            "info_keys: expected names, because a TorchRL environment declares dtypes itself, got "
            "an Info with a dtype. Pass names here, or Info to GymnasiumVectorEnv."
        )
    return env


def _renamed(env: EnvBase, rename: Rename) -> EnvBase:
    """Return ``env`` with observations renamed as in ``rename``.

    Raises:
        NameRefused: names collide.
    """
    if isinstance(env, SystemEnv):
        return env
    bare = _observations(env)
    keys = renamed(bare, rename)
    pairs = [(one.key, key) for one, key in zip(bare, keys, strict=True) if one.key != key]
    require_names_of(env, bare, keys)
    if not pairs:
        return env
    old, new = zip(*pairs, strict=True)
    # In two passes: in a single one, swapped names would overwrite each other.
    between = [(f"_renamed_{index}",) for index in range(len(pairs))]
    transform = Compose(RenameTransform(list(old), between), RenameTransform(between, list(new)))
    return TransformedEnv(env, transform, auto_unwrap=False)


def _observations(env: EnvBase) -> list[NamedColumn]:
    keys = map(as_key, env.observation_spec.keys(True, True))
    return [NamedColumn(key, key) for key in keys]


def require_names_of(
    env: EnvBase,
    observations: Sequence[NamedColumn] | None = None,
    given: Sequence[Key] | None = None,
    written: Iterable[Key] = (),
) -> None:
    """Raise if two columns, of ``env`` or written by a policy, have the same name.

    Raises:
        NameRefused: names collide. The message names them and a solution.
    """
    require_names(
        _observations(env) if observations is None else observations,
        [as_key(key) for key in env.full_action_spec.keys(True, True)],
        [as_key(key) for key in env.full_reward_spec.keys(True, True)],
        [as_key(key) for key in env.full_done_spec.keys(True, True)],
        written,
        given,
    )


def _is_json(value: Any) -> bool:
    """Return True if a manifest can store the value itself. A tuple becomes a list."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_json(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, bool | int | float | str)


def _json(value: Any) -> Any:
    """Return ``value`` as JSON values. Parts that JSON cannot hold become their repr."""
    return json.loads(json.dumps(value, default=repr))


def _describe(env: EnvBase) -> dict[str, Any]:
    bases = list(chain(env))
    base = bases[-1]
    if isinstance(base, SystemEnv):
        described = base.system.describe()
    else:
        described = {"id": base.__dict__.get("env_name"), "type": type(base).__name__}
    transforms = [type(each).__name__ for outer in bases[:-1] for each in _transforms(outer)]
    return described | ({"transforms": transforms} if transforms else {})


def _classes_of(made: object) -> list[str]:
    """Return the sorted classes of an environment and its lanes, without wrappers of libraries.

    Each is ``"module:qualname"``. The list is empty if the environments are in other processes.
    """
    found = {name_of(type(each)) for each in objects_of(made)}
    return sorted(name for name in found if not name.startswith(_LIBRARIES))


def _factories_of(made: Any, factory: object) -> list[str]:
    """Return the sorted names of functions and classes that make lanes in other processes.

    If there are none, return the name of ``factory``. Lambdas and nested functions are excluded,
    because their names are not informative.
    """
    makers: list[Any] = []
    for each in objects_of(made):
        if isinstance(each, AsyncVectorEnv):
            makers += each.env_fns
        elif isinstance(each, BatchedEnvBase):
            makers += each.create_env_fn
    for several in (makers, [factory]):
        if found := {name_of(each) for each in map(bare, several) if _has_stable_name(each)}:
            return sorted(found)
    return []


def bare(factory: Any) -> Any:
    """Return the function or class behind ``functools.partial``."""
    while isinstance(factory, partial):
        factory = factory.func
    return factory


def _has_stable_name(factory: object) -> bool:
    """Return True if the name of a factory is the same in another process."""
    if isinstance(factory, type):
        return True
    return inspect.isroutine(factory) and "<" not in factory.__qualname__


def name_of(named: Any) -> str:
    """Return the name of a class or function, as ``"module:qualname"``."""
    module = getattr(named, "__module__", None) or ""
    return f"{'__main__' if module == '__mp_main__' else module}:{named.__qualname__}"


def _transforms(env: TransformedEnv) -> list[Any]:
    transform = env.transform
    return list(transform) if isinstance(transform, Compose) else [transform]


def refuse(env: EnvBase) -> None:
    """Raise :class:`EnvironmentRefused` if driving ``env`` would falsify data."""
    if len(env.batch_size) > 1:
        raise EnvironmentRefused(
            f"expected a batch size [] or [lanes], got {list(env.batch_size)}; flatten the "
            "environment's batch"
        )
    if "done" not in env.done_spec.keys(True, True):
        raise EnvironmentRefused(
            "expected a root-level 'done' in addition to those of the agents, got "
            f"{sorted(str(key) for key in env.done_spec.keys(True, True))}. Without a root-level "
            "'done', the end of a lane's trajectory is undefined. (In PettingZoo, pass "
            "done_on_any=False.)"
        )
    *outer, base = chain(env)
    if outer and isinstance(base, SystemEnv) and base.stepper.declares.marks_transitions:
        raise EnvironmentRefused(
            f"{base.kind} ignores reset masks, so a TransformedEnv around it would count reset "
            "slots as transitions. Apply Gymnasium's vector wrappers to the vector instead, or use "
            "SyncVectorEnv."
        )
    _refuse_silent_vector(base)


def _refuse_silent_vector(env: EnvBase) -> None:
    """Raise for ``GymEnv(id, num_envs=N)``, whose final observations TorchRL zeroes."""
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
