"""Wrappers around a `VecEnv` of Stable-Baselines3, and the space that it really has."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from tallyroll.collector.envs.gymnasium.spaces import Leaf
from tallyroll.collector.errors import TransitionError
from tallyroll.storage.rows.keys import spell


def true_space(env: Any) -> spaces.Space[Any]:
    """Return the true space of ``env``'s observations; two wrappers declare another.

    `VecNormalize` keeps bounds and dtype of the values that it normalizes, and `VecFrameStack`
    repeats each bound beside itself although it puts observations one after the other.
    """
    package = sys.modules["stable_baselines3.common.vec_env"]
    space: spaces.Space[Any] = env.observation_space
    kinds = (package.VecNormalize, package.VecFrameStack)
    layer = next((each for each in layers(env) if isinstance(each, kinds)), None)
    if layer is None or (isinstance(layer, package.VecNormalize) and not layer.norm_obs):
        return space
    names = getattr(layer, "norm_obs_keys", None) or ()
    normalizes = isinstance(layer, package.VecNormalize)

    def true(part: spaces.Space[Any], name: str | None = None) -> spaces.Space[Any]:
        dtype: Any = part.dtype
        if normalizes and (name is None or name in names):
            dtype = np.float32
        elif not isinstance(part, spaces.Box) or not np.issubdtype(dtype, np.floating):
            return part
        return spaces.Box(-np.inf, np.inf, part.shape, dtype)

    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: true(part, name) for name, part in space.items()})
    return true(space)


def takes_resets(env: Any, kind: Any) -> bool:
    """Return whether ``env`` calls each lane's ``reset`` as ``kind`` does, `DummyVecEnv`."""
    own = type(env)
    return isinstance(env, kind) and (own.step_wait, own.reset) == (kind.step_wait, kind.reset)


def layers(env: Any) -> Iterator[Any]:
    """Yield ``env``, and the environments that it wraps."""
    while env is not None:
        yield env
        env = vars(env).get("venv")


def finals_of(
    found: Mapping[int, Any],
    leaves: Sequence[Leaf],
    getters: Sequence[Callable[[Any], Any]],
    first_lane: int,
) -> list[NDArray[Any]]:
    """The final observations of lanes that ended, in arrays of all lanes."""
    rows = [np.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
    for lane, observation in found.items():
        for leaf, get, row in zip(leaves, getters, rows, strict=True):
            try:
                value = get(observation)
            except (KeyError, IndexError, TypeError) as error:
                raise TransitionError(
                    f"{spell(leaf.key)}: expected a terminal_observation with that part in lane "
                    f"{first_lane + lane}, got {type(observation).__name__} {observation!r:.80}; a "
                    "wrapper that changes observations has to change that too"
                ) from error
            if np.shape(value) != row.shape[1:]:
                raise TransitionError(
                    f"{spell(leaf.key)}: expected a terminal_observation of shape "
                    f"{list(row.shape[1:])}, got {list(np.shape(value))} in lane "
                    f"{first_lane + lane}; a wrapper that changes observations has to change that "
                    "too"
                )
            row[lane] = value
            if row.dtype.kind != "f" and not np.array_equal(row[lane], value):
                raise TransitionError(
                    f"{spell(leaf.key)}: the terminal_observation in lane {first_lane + lane} is "
                    f"no {row.dtype}, as the space declares; a wrapper that changes observations "
                    "has to change that too"
                )
    return rows
