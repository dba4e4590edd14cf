"""Environment objects of lanes: no two lanes share one, and each has one driver at a time."""

import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from threading import Lock
from typing import Any

import gymnasium
from gymnasium.vector import SyncVectorEnv, VectorEnv, VectorWrapper
from torchrl.envs import EnvBase, SerialEnv

from tallyroll.collector.compat import serial_envs
from tallyroll.collector.envs.setup.traits import chain, system_of
from tallyroll.collector.envs.system import System
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.errors import EnvironmentRefused

_ELSEWHERE = (
    ("stable_baselines3.common.vec_env.base_vec_env", "VecEnv"),
    ("pettingzoo.utils.env", "AECEnv"),
    ("pettingzoo.utils.env", "ParallelEnv"),
    ("dm_env", "Environment"),
    ("gym", "Env"),
)
"""Base classes of stateful environments in libraries that may not be installed.

JAX environments are not listed. Their objects are functions, and many lanes may call the same one.
"""
_MOST = 4096
"""Maximum number of entries of a dictionary that is searched for environments."""

_drivers: dict[int, tuple[weakref.ref[Any], weakref.WeakMethod[Callable[[], None]]]] = {}
"""Each driven instance, and the method that notifies its driver of a loss, by the instance's id."""
_taking = Lock()


def take_over(env: EnvBase, made: object, lost: Callable[[], None]) -> None:
    """Notify earlier drivers of ``env``. ``lost`` is called when a later driver takes it over.

    Args:
        env: the environment to drive.
        made: the instance from which ``env`` was made.
        lost: a bound method, whose object is not kept alive. If it raises, the other driver takes
            nothing.
    """
    parts = list(_parts(env, made))
    with _taking:  # workers in threads may receive the same instance
        for part in parts:
            instance, before = _drivers.get(id(part), (None, None))
            told = before() if before is not None else None
            if instance is not None and instance() is part and told is not None and told != lost:
                told()
        for part in parts:
            gone = partial(_forget, id(part))
            _drivers[id(part)] = weakref.ref(part, gone), weakref.WeakMethod(lost)


def _forget(number: int, _: object) -> None:
    _drivers.pop(number, None)


def _parts(env: EnvBase, made: object) -> Iterator[Any]:
    """Yield the stateful instances, which another collector may also receive."""
    base = system_of(env)
    found = [*chain(env), *([] if base is None else [base.system])]
    found += objects_of(env)
    if not any(made is each for each in found):
        found += objects_of(made)
    for each in found:
        if getattr(type(each), "__weakrefoffset__", 0):
            yield each


# --- objects within an environment ----------------------------------------------------------------


def objects_of(env: Any, most: int | None = None) -> list[Any]:
    """Return ``env`` and all environments that it wraps or holds, each once, outermost first.

    Environments in other processes, and in objects that are not environments, are not found.

    Args:
        env: an environment of any library, or a system.
        most: maximum number of lanes. Objects with more lanes are skipped, with everything in
            them. None selects the number of lanes of ``env``.
    """
    most = lanes_of(env) if most is None else most
    found, numbers, left = list[Any](), set[int](), [env]
    while left:
        each = left.pop(0)
        if id(each) in numbers or lanes_of(each) > most:
            continue
        numbers.add(id(each))
        found.append(each)
        left += _lane_objects(each)
        for value in values_of(each):
            left += [value] if is_environment(value.__class__) else _environments_in(value)
    return found


def require_own_objects(env: EnvBase) -> None:
    """Raise if lanes share an environment, because each of them would step and reset it.

    Raises:
        EnvironmentRefused: two lanes share an environment. The message names them.
    """
    *_, base = chain(env)
    if isinstance(base, SerialEnv):
        serial_envs(base)  # starts it, which makes its environments
    for each in objects_of(env):
        for group in groups_of(each):
            _refuse_shared(group)


def _refuse_shared(group: Sequence[Any]) -> None:
    owners = dict[int, int]()
    first = 0
    for item in group:
        for each in objects_of(item):
            owner = owners.setdefault(id(each), first)
            if owner != first:
                raise EnvironmentRefused(
                    f"lanes {owner} and {first}: expected a separate environment for each lane, "
                    f"got the same {type(each).__name__} in both. Make a new environment, and new "
                    "objects inside it, in each call of the factory."
                )
        first += lanes_of(item)


def groups_of(env: Any) -> Iterator[Sequence[Any]]:
    """Yield the lists in which ``env`` itself stores the environments of its lanes."""
    lanes = lanes_of(env)
    if lanes < 2:
        return
    if own := _lane_objects(env):
        yield own
    for value in values_of(env):
        held = _environments_in(value)
        if len(held) > 1 and sum(map(lanes_of, held)) == lanes:
            yield held


def _lane_objects(env: Any) -> Sequence[Any]:
    """Return the lanes' environments if their classes derive from no library's; otherwise ()."""
    own = getattr(env, "envs", None) if isinstance(env, (SyncVectorEnv, System)) else None
    if isinstance(own, (list, tuple)) and len(own) == lanes_of(env) and not _environments_in(own):
        return own
    return ()


def _environments_in(value: Any) -> Sequence[Any]:
    """Return the environments in a list, a tuple or a dictionary; empty for other values."""
    if type(value) is dict and len(value) <= _MOST:
        return [each for each in value.values() if is_environment(each.__class__)]
    if isinstance(value, (list, tuple)) and value and is_environment(value[0].__class__):
        return value
    return ()


def values_of(env: Any) -> Iterator[Any]:
    """Yield the values of the attributes of ``env``, and its ``unwrapped``.

    The function avoids ``__dict__``. CPython 3.11 and 3.12 create a dictionary when it is accessed,
    and each step of a small environment then takes up to three times as long.
    """
    for value in gc.get_referents(env):
        if type(value) is dict and len(value) <= _MOST:  # perhaps its attributes
            yield from list(value.values())
        yield value
    if isinstance(env, SystemEnv):
        yield env.system
    if isinstance(env, (gymnasium.Env, VectorEnv)):
        try:
            yield env.unwrapped
        except Exception:  # noqa: BLE001  fall back to its attributes
            return


@lru_cache(maxsize=4096)
def is_environment(kind: type) -> bool:
    """Return True if ``kind`` is an environment class of any imported library."""
    modules = ((sys.modules.get(module), name) for module, name in _ELSEWHERE)
    others = [getattr(module, name, None) for module, name in modules]
    return issubclass(kind, (gymnasium.Env, VectorEnv, EnvBase, System, *filter(None, others)))


def inner_of(env: Any) -> Any:
    """Return the environment that ``env`` wraps; None if it wraps none or holds several."""
    if isinstance(env, (gymnasium.Wrapper, VectorWrapper)):
        return env.env
    found = dict[int, Any]()
    for value in values_of(env):
        inner = value.values() if type(value) is dict and len(value) <= _MOST else (value,)
        found |= {id(each): each for each in inner if is_environment(each.__class__)}
    found.pop(id(env), None)
    return next(iter(found.values())) if len(found) == 1 else None


def lanes_of(env: Any) -> int:
    """Return the number of lanes of an environment of any library."""
    if isinstance(env, EnvBase):
        return int(env.batch_size.numel())
    if isinstance(env, System):
        return env.declares.lanes
    try:
        lanes = getattr(env, "num_envs", 1)
    except Exception:  # noqa: BLE001  an attribute that raises gives no number
        return 1
    return lanes if isinstance(lanes, int) else 1
