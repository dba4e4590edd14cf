"""Simulator ticks per transition, as environments and their wrappers report them.

An environment that skips frames, or a wrapper that repeats actions, stores the number in an
attribute. The numbers of nested layers multiply. The result is unknown if the number is drawn for
each step or differs between lanes.

`DeliveredCounts` (`collector/batches/delivered_counts.py`) multiplies the number by the
transitions. The ledger calls the result ``ticks``.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import gymnasium
import gymnasium.wrappers
import numpy as np

from tallyroll.collector.envs.calls.env_call import CallOutcome, EnvCall, Way
from tallyroll.collector.envs.calls.objects import own_attribute

_NAMES = (
    *("frame_skip", "_frame_skip", "frameskip", "_frameskip", "_n_sub_steps", "n_sub_steps"),
    *("action_repeat", "_action_repeat", "action_repeats", "_n_frames", "n_substeps", "_substeps"),
    "world_steps_per_env_step",
)
"""Names of the attribute in Gymnasium, ALE, MuJoCo, dm_control, Brax, Playground, VMAS and SMAX."""
_VERBS = ("skip", "repeat")
_OF_WRAPPERS = ("_skip", "num_repeats", "_num_repeats", "_repeat", "num_skip", *_VERBS)
"""Names that count in wrappers only. In other environments they may mean anything."""
_SUSPECT = re.compile(
    r"(frame|action|step)s?_?(skip|repeat)|(skip|repeat)_?(frame|action|step|env)"
)
"""Pattern for lower-case names of classes that skip or repeat."""
_INNER = ("env", "_env", "_environment", "environment", "aec_env", "par_env", "base_env", "gym")
_WORLD = "world"
"""Attribute in which a VMAS environment stores its simulator."""
_MOST_LAYERS = 64

_KEEPING = {
    *(name for name in gymnasium.wrappers.__all__ if name != "AtariPreprocessing"),
    *("Monitor", "NoopResetEnv", "FireResetEnv", "EpisodicLifeEnv", "WarpFrame", "ClipRewardEnv"),
    *("StickyActionEnv", "AtariWrapper", "PassiveEnvChecker", "OrderEnforcing"),
}
"""Wrapper classes of Gymnasium and Stable-Baselines3 that skip no frames themselves."""

Reached = Callable[[EnvCall, Sequence[int]], Iterable[CallOutcome]]


def ticks_of_objects(envs: Iterable[object]) -> int | None:
    """Return the ticks per transition of ``envs``; None if unknown or not equal in all of them."""
    found = {product(map(ticks_of_layer, _layers(env))) for env in envs}
    return found.pop() if len(found) == 1 else None if found else 1


def ticks_by_reaching(reached: Reached, lanes: int) -> int | None:
    """Return the ticks per transition of environments that are objects of other processes.

    If several wrappers have an attribute of the same name, only the outermost one is visible. The
    result is None if a wrapper that is not part of Gymnasium or Stable-Baselines3 may hide another
    one in this way.
    """
    found = {_ticks_of_reached(reached, lane) for lane in range(lanes)}
    return found.pop() if len(found) == 1 else None


def _ticks_of_reached(reached: Reached, lane: int) -> int | None:
    def call(way: Way, name: str, *args: Any) -> CallOutcome:
        (outcome,) = reached(EnvCall(way, name, args), [lane])
        return outcome

    names = _classes(str(call("env_call", "__str__").value))
    wrappers = [name for name in names[:-1] if name not in _KEEPING]
    # Only test whether these exist: fetching an environment or a method would pickle it.
    unseen = (*_INNER[1:], *(_VERBS if wrappers else ()))
    if not names or any(call("env_call", "has_wrapper_attr", name).value for name in unseen):
        return None
    counts: dict[str, int | None] = {}
    for name in (*_NAMES, *(set(_OF_WRAPPERS) - {*_VERBS} if wrappers else ())):
        outcome = call("env_get", name)
        if outcome.error is None:
            counts[name] = _count(outcome.value)
        elif outcome.changed:
            return None
    if not counts:
        return None if any(_SUSPECT.search(name.lower()) for name in names) else 1
    of_base = 1 if any(name in _NAMES for name in counts) else 0
    return product(counts.values()) if len(wrappers) <= len(counts) - of_base else None


def _classes(text: str) -> list[str]:
    """Return the classes of an environment with the repr ``text``, outermost first.

    Gymnasium's repr is ``<TimeLimit<CartPoleEnv<CartPole-v1>>>`` or ``<CartPoleEnv instance>``.
    """
    *names, last = re.findall(r"<([^<>]+)", text) or [""]
    return [*names, last.removesuffix(" instance")] if last.endswith(" instance") else names


def product(counts: Iterable[int | None]) -> int | None:
    """Return the product of ``counts``; None if one of them is unknown."""
    total = 1
    for count in counts:
        if count is None:
            return None
        total *= count
    return total


def _layers(env: object) -> Iterator[object]:
    seen: set[int] = set()
    while env is not None and id(env) not in seen and len(seen) < _MOST_LAYERS:
        seen.add(id(env))
        yield env
        values = (own_attribute(env, name) for name in (*_INNER, _WORLD))
        env = next((value for value in values if value is not None), None)


def ticks_of_layer(layer: object) -> int | None:
    """Return the factor by which one environment or wrapper multiplies ticks; None if unknown."""
    kind = type(layer)
    wraps = any(own_attribute(layer, name) is not None for name in _INNER)
    for name in (*_NAMES, *_OF_WRAPPERS) if wraps else _NAMES:
        value = own_attribute(layer, name)
        if value is None and hasattr(kind, name) and not callable(getattr(kind, name)):
            value = getattr(layer, name)
        if value is not None:
            return _count(value)
    if (value := getattr(own_attribute(layer, "cfg"), "decimation", None)) is not None:  # Isaac Lab
        return _count(value)
    return None if _SUSPECT.search(kind.__name__.lower()) else 1


def _count(value: Any) -> int | None:
    """Return an attribute as a number of ticks; None if it is random per step or not a number."""
    if isinstance(value, (bool, np.bool_)):
        return 1  # an unrelated flag
    if isinstance(value, (int, np.integer)):
        return max(1, int(value))
    if isinstance(value, float) and value.is_integer():
        return max(1, int(value))
    if isinstance(value, (tuple, list)) and len(value) == 2 and value[0] == value[1] - 1:
        return _count(value[0])  # ALE excludes the upper bound
    return None
