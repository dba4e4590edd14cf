"""Who drives an environment instance: whoever drove it before is told when another takes it."""

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv
from torchrl.envs import EnvBase

from tallyroll.collector.envs.traits import chain, system_of

_drivers: dict[int, tuple[weakref.ref[Any], weakref.WeakMethod[Callable[[], None]]]] = {}
"""By the id of what is driven: that, and what tells its driver that another took it."""


def take_over(env: EnvBase, made: object, lost: Callable[[], None]) -> None:
    """Tell who drove any part of ``env``, and call the method ``lost`` when another takes it.

    Args:
        env: what is driven.
        made: the instance that it was made of.
        lost: a bound method; its object is not kept alive. It may raise, and nothing is taken.
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
    """What another collector may be given as well: instances that have a state."""
    bases = list(chain(env))
    base = system_of(env)
    inner = bases[-1].__dict__.get("_env") if base is None else getattr(base.system, "env", None)
    if isinstance(inner, (gymnasium.Env, VectorEnv)):
        inner = inner.unwrapped
    whole = made.unwrapped if isinstance(made, (gymnasium.Env, VectorEnv)) else made
    for each in (*bases, None if base is None else base.system, inner, whole):
        if getattr(type(each), "__weakrefoffset__", 0):
            yield each
