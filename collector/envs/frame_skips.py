"""Simulator ticks of a transition, as environments and their wrappers report them.

An environment that skips frames, or a wrapper that repeats actions, has the number as an attribute.
Stacked ones multiply. A number that is drawn for each step, or that differs from lane to lane, is
not known.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import gymnasium
import gymnasium.wrappers
import numpy as np

from tallyroll.collector.envs.calls.env_call import CallOutcome, EnvCall, Way

_NAMES = (
    *("frame_skip", "_frame_skip", "frameskip", "_frameskip", "_n_sub_steps", "n_sub_steps"),
    *("action_repeat", "_action_repeat", "action_repeats", "_n_frames", "n_substeps", "_substeps"),
    "world_steps_per_env_step",
)
"""Names of the attribute in Gymnasium, ALE, MuJoCo, dm_control, Brax, Playground, VMAS and SMAX."""
_VERBS = ("skip", "repeat")
_OF_WRAPPERS = ("_skip", "num_repeats", "_num_repeats", "_repeat", "num_skip", *_VERBS)
"""Names in wrappers alone; of another environment they may mean anything."""
_SUSPECT = re.compile(
    r"(frame|action|step)s?_?(skip|repeat)|(skip|repeat)_?(frame|action|step|env)"
)
"""Names of classes that skip or repeat, lower case."""
_INNER = ("env", "_env", "_environment", "environment", "aec_env", "par_env", "base_env", "gym")
_WORLD = "world"
"""Attribute in which an environment of VMAS has the simulator."""
_MOST_LAYERS = 64

_KEEPING = {
    *(name for name in gymnasium.wrappers.__all__ if name != "AtariPreprocessing"),
    *("Monitor", "NoopResetEnv", "FireResetEnv", "EpisodicLifeEnv", "WarpFrame", "ClipRewardEnv"),
    *("StickyActionEnv", "AtariWrapper", "PassiveEnvChecker", "OrderEnforcing"),
}
"""Classes of wrappers of Gymnasium and Stable-Baselines3 that skip no frames themselves."""

Reached = Callable[[EnvCall, Sequence[int]], Iterable[CallOutcome]]


def ticks_of_objects(envs: Iterable[object]) -> int | None:
    """Return the ticks of a transition of each of ``envs``; None: unknown, or not all alike."""
    found = {product(map(ticks_of_layer, _layers(env))) for env in envs}
    return found.pop() if len(found) == 1 else None if found else 1


def ticks_by_reaching(reached: Reached, lanes: int) -> int | None:
    """Return the same of environments that are objects of other processes.

    Of several wrappers that have an attribute of the same name only the outermost is seen. The
    number is unknown if a wrapper that is not one of Gymnasium's or Stable-Baselines3's may hide
    another one in this way.
    """
    found = {_ticks_of_reached(reached, lane) for lane in range(lanes)}
    return found.pop() if len(found) == 1 else None


def _ticks_of_reached(reached: Reached, lane: int) -> int | None:
    def call(way: Way, name: str, *args: Any) -> CallOutcome:
        (outcome,) = reached(EnvCall(way, name, args), [lane])
        return outcome

    names = _classes(str(call("env_call", "__str__").value))
    wrappers = [name for name in names[:-1] if name not in _KEEPING]
    # Of these only their presence is asked: fetching an environment or a method would pickle it.
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
    """Return the classes of an environment that Gymnasium shows as `text`, outermost first.

    Gymnasium shows ``<TimeLimit<CartPoleEnv<CartPole-v1>>>``, or ``<CartPoleEnv instance>``.
    """
    *names, last = re.findall(r"<([^<>]+)", text) or [""]
    return [*names, last.removesuffix(" instance")] if last.endswith(" instance") else names


def product(counts: Iterable[int | None]) -> int | None:
    """Return the product of counts; None if one is unknown."""
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
        own = getattr(env, "__dict__", {})
        env = next((own[name] for name in (*_INNER, _WORLD) if own.get(name) is not None), None)


def ticks_of_layer(layer: object) -> int | None:
    """Return the ticks that one environment, or wrapper, makes of a step of the next one."""
    own, kind = getattr(layer, "__dict__", {}), type(layer)
    wraps = any(own.get(name) is not None for name in _INNER)
    for name in (*_NAMES, *_OF_WRAPPERS) if wraps else _NAMES:
        # Wrappers pass on what they lack: only what is the layer's own counts.
        if name in own:
            value = own[name]
        elif hasattr(kind, name) and not callable(getattr(kind, name)):
            value = getattr(layer, name)
        else:
            continue
        if value is not None:
            return _count(value)
    if (value := getattr(own.get("cfg"), "decimation", None)) is not None:  # Isaac Lab's
        return _count(value)
    return None if _SUSPECT.search(kind.__name__.lower()) else 1


def _count(value: Any) -> int | None:
    """Return an attribute as a number of ticks; None: it is drawn for each step, or no number."""
    if isinstance(value, (bool, np.bool_)):
        return 1  # a flag of something else
    if isinstance(value, (int, np.integer)):
        return max(1, int(value))
    if isinstance(value, float) and value.is_integer():
        return max(1, int(value))
    if isinstance(value, (tuple, list)) and len(value) == 2 and value[0] == value[1] - 1:
        return _count(value[0])  # ALE draws below the second
    return None
