"""Calls to environments that are Python objects of this process, one per lane."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import gymnasium

from tallyroll.collector.envs.calls.env_call import CallOutcome, EnvCall, NoAttribute, NoMethod

_INNER = ("base_env", "env", "_env", "aec_env")
"""Attributes in which wrappers of several libraries store the wrapped environment."""


def reach_objects(
    envs: Sequence[Any], asked: EnvCall, lanes: Sequence[int]
) -> Iterator[CallOutcome]:
    """Yield the outcome of ``asked`` in each of ``lanes``, whose environments are in ``envs``.

    In Gymnasium environments, ``get_wrapper_attr`` looks up a name from the outermost wrapper
    inwards, and an attribute is set where it is found. Other libraries are handled the same way.
    """
    for place, lane in enumerate(lanes):
        yield CallOutcome.of(partial(_reach, envs[lane], asked, place))


def objects_of(reached: Any) -> Sequence[Any] | None:
    """Return the environments of ``reached`` if it is a partial of `reach_objects`, else None."""
    calls_objects = isinstance(reached, partial) and reached.func is reach_objects
    return reached.args[0] if calls_objects else None


def own_attribute(owner: object, name: str) -> Any:
    """Return an attribute of ``owner`` itself, not of its class; None if it has none.

    The function avoids ``__dict__``. CPython 3.11 and 3.12 create a dictionary when it is accessed,
    and reading the attributes of this object takes longer from then on.
    """
    if hasattr(type(owner), name):
        return getattr(owner, "__dict__", {}).get(name)
    try:
        # Unlike `getattr`, this does not call a `__getattr__` that forwards to another object.
        return object.__getattribute__(owner, name)
    except AttributeError:
        return None


def _reach(env: Any, asked: EnvCall, place: int) -> Any:
    if asked.way == "env_set":
        return _set(env, asked.name, asked.values[place])
    found = _get(env, asked.name)
    if asked.way == "env_get":
        return found
    return require_callable(found, asked.name)(*asked.args, **asked.kwargs)


def require_callable(found: Any, name: str) -> Any:
    """Return ``found``, the attribute ``name``. Raise NoMethod if it is not callable."""
    if not callable(found):
        raise NoMethod(
            f"{name!r}: expected a method, got {found!r:.200}. Read the attribute with env_get."
        )
    return found


def no_attribute(env: str, name: str) -> NoAttribute:
    """Return the error for an attribute that an environment lacks."""
    return NoAttribute(
        f"expected an attribute of {env} or of an environment that it wraps, got {name!r}. Name an "
        "attribute that the environment has as soon as it is made."
    )


def _get(env: Any, name: str) -> Any:
    for each in _layers(env):
        if isinstance(each, gymnasium.Env):
            if each.has_wrapper_attr(name):
                return each.get_wrapper_attr(name)
        elif _has(each, name):
            return getattr(each, name)
    if hasattr(env, name):  # through the environment's own __getattr__
        return getattr(env, name)
    raise no_attribute(type(env).__name__, name)


def _set(env: Any, name: str, value: Any) -> None:
    for each in _layers(env):
        if isinstance(each, gymnasium.Env):
            if each.set_wrapper_attr(name, value, force=False):
                return
        elif _has(each, name):
            setattr(each, name, value)
            return
    raise no_attribute(type(env).__name__, name)


def _layers(env: Any) -> Iterator[Any]:
    """Yield ``env`` and the environments that it wraps, down to the first Gymnasium environment.

    Gymnasium looks up the names of its own layers. Other wrappers forward unknown names, so they
    seem to have attributes that only an inner environment has.
    """
    seen: set[int] = set()
    while env is not None and id(env) not in seen:
        seen.add(id(env))
        yield env
        if isinstance(env, gymnasium.Env):
            return
        own = {**getattr(env, "__dict__", {}), **getattr(env, "_modules", {})}
        env = next((own[name] for name in _INNER if name in own), None)


def _has(env: Any, name: str) -> bool:
    """Return True if ``env`` itself, not only an environment inside it, has the attribute."""
    return name in getattr(env, "__dict__", {}) or hasattr(type(env), name)
