"""Calls to lanes of Gymnasium and Stable-Baselines3 vectors, which may be in other processes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from tallyroll.collector.compat import call_lane, ended_process
from tallyroll.collector.envs.calls.env_call import CallOutcome, EnvCall
from tallyroll.collector.envs.calls.objects import no_attribute, reach_objects

Call = Callable[..., Any]
"""Function that calls a method of one lane. Arguments: lane, name, arguments of the method."""


def reached_vector(env: VectorEnv) -> Callable[..., Iterable[CallOutcome]] | None:
    """Return the callable for `System.reached` over a Gymnasium vector.

    Return None if the environments of the vector are not known to be Python objects.
    """
    base = env.unwrapped
    if isinstance(base, SyncVectorEnv):
        return partial(reach_objects, base.envs)
    if isinstance(base, AsyncVectorEnv):
        return partial(reach_one_by_one, partial(call_lane, base))
    return None


def reached_sb3(env: Any) -> Callable[..., Iterable[CallOutcome]]:
    """Return the callable for `System.reached` over a Stable-Baselines3 ``VecEnv``."""
    return partial(reach_one_by_one, partial(_call_sb3, env))


def _call_sb3(env: Any, lane: int, name: str, /, *args: Any, **kwargs: Any) -> Any:
    try:
        return env.env_method(name, *args, indices=lane, **kwargs)[0]
    except (EOFError, ConnectionError) as error:
        raise ended_process(error) from error


def reach_one_by_one(call: Call, asked: EnvCall, lanes: Sequence[int]) -> Iterator[CallOutcome]:
    """Yield the outcome of ``asked`` in each of ``lanes``, which are Gymnasium environments.

    ``call`` calls a method of one lane. The process of a lane ends if a call in it raises, so this
    function first asks whether the name exists.
    """
    for place, lane in enumerate(lanes):
        yield CallOutcome.of(partial(_reach, partial(call, lane), asked, place))


def _reach(call: Call, asked: EnvCall, place: int) -> Any:
    if not call("has_wrapper_attr", asked.name):
        raise no_attribute("the environment", asked.name)
    if asked.way == "env_call":
        return call(asked.name, *asked.args, **asked.kwargs)
    if asked.way == "env_get":
        return call("get_wrapper_attr", asked.name)
    if not call("set_wrapper_attr", asked.name, asked.values[place], force=False):
        raise no_attribute("the environment", asked.name)
    return None
