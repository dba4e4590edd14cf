"""The driver of each environment instance, notified when another collector takes it."""

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv
from torchrl.envs import EnvBase

from tallyroll.collector.envs.driven.traits import chain, system_of

_drivers: dict[int, tuple[weakref.ref[Any], weakref.WeakMethod[Callable[[], None]]]] = {}
"""By the id of an instance: the instance, and the method that notifies its driver of a loss."""


def take_over(env: EnvBase, made: object, lost: Callable[[], None]) -> None:
    """Notify the earlier drivers of ``env``; call ``lost`` when another driver takes a part.

    Args:
        env: the environment to drive.
        made: the instance that it was made of.
        lost: a bound method; its object is not kept alive. If it raises, nothing is taken.
    """
    parts = list(_parts(env, made))
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
    """Yield the instances with a state, which another collector may be given as well."""
    bases = list(chain(env))
    base = system_of(env)
    inner = bases[-1].__dict__.get("_env") if base is None else getattr(base.system, "env", None)
    if isinstance(inner, (gymnasium.Env, VectorEnv)):
        inner = inner.unwrapped
    whole = made.unwrapped if isinstance(made, (gymnasium.Env, VectorEnv)) else made
    for each in (*bases, None if base is None else base.system, inner, whole):
        if getattr(type(each), "__weakrefoffset__", 0):
            yield each
