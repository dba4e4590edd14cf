"""gym3 environments such as Procgen, which reset themselves and lose final observations."""

import sys
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from tallyroll.collector.envs.close import closing_on_error
from tallyroll.collector.envs.extras import needs
from tallyroll.collector.envs.gymnasium.info_system import InfoSystem, vector_info
from tallyroll.collector.envs.gymnasium.spaces import action_leaf, observation_leaves
from tallyroll.collector.envs.system import Mask, Step
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused, MissingExtra


class ProcgenSystem(InfoSystem):
    """A ``gym3.Env``.

    When an episode ends, the environment returns the first observation of the next episode and
    never the final observation. It does not distinguish a time limit from a termination. It cannot
    be reset. All lanes share one seed, that of the first lane, which is set when the environment is
    made.

    Args:
        env: an environment that was not stepped yet. The system closes it.

    Raises:
        SpaceError: no column can hold a space.
    """

    package = "procgen"
    extra = "procgen"
    conflicts = (
        "gym3 and procgen-mirror ask for NumPy 1 and work with 2: pip install --no-deps gym3 "
        "procgen-mirror, after the extra. They bring the old gym, which changes what TorchRL "
        "refuses."
    )
    about = "finals are lost, and flagged in next_valid; seeds when made"
    why_no_resets = "a gym3 environment cannot be reset, and accepts one seed when it is made"

    def __init__(self, env: Any) -> None:
        self.env = env
        lanes = int(env.num)
        leaves = observation_leaves(_space(env.ob_space), lanes)
        self._getters = [leaf.getter() for leaf in leaves]
        action = action_leaf(_space(env.ac_space, acts=True), lanes)
        self._acts_in = np.dtype(env.ac_space.eltype.dtype_name)
        self._never = np.zeros(lanes, np.bool_)
        how = {"truncation": False, "resets": "none", "seeds": "make"}
        self._declare(leaves, action, lanes, at_end="first", finals="lost", **how)

    @classmethod
    def make(cls, name: str, lanes: int, seeds: Sequence[int] | None, **kwargs: Any) -> Self:
        """Make a Procgen game; ``kwargs`` are passed to ``ProcgenGym3Env``."""
        try:
            package = needs("procgen.env", "procgen")
        except MissingExtra as error:
            raise MissingExtra(
                f"{error}, and then: pip install --no-deps gym3 procgen-mirror (both require NumPy "
                "1, but work with NumPy 2)"
            ) from error
        if name not in package.ENV_NAMES:  # Procgen would terminate the process
            raise ArgumentError(f"procgen: expected one of {package.ENV_NAMES}, got {name!r}")
        seed = None if seeds is None else seeds[0]
        try:
            env = package.ProcgenGym3Env(lanes, name, **{"rand_seed": seed, **kwargs})
        except (AssertionError, TypeError, ValueError) as error:
            raise ArgumentError(f"procgen cannot make {name!r} with {kwargs}: {error}") from error
        with closing_on_error(env):
            return cls(env)

    @classmethod
    def adopt(cls, made: object) -> Self | None:
        """Wrap a ``gym3.Env``; return None for other objects."""
        package = sys.modules.get("gym3.env")
        return None if package is None or not isinstance(made, package.Env) else cls(made)

    def describe(self) -> dict[str, Any]:
        """Return the game, if it is a Procgen game, and the kind of environment."""
        base = self.env
        while hasattr(base, "env"):
            base = base.env
        game = getattr(base, "options", {}).get("env_name")
        return {"id": game, "type": type(base).__name__}

    def close(self) -> None:
        """Close the environment and those that it wraps, if they can be closed."""
        each = self.env
        while each is not None:
            if hasattr(each, "close"):
                each.close()
            each = getattr(each, "env", None)

    def reset(self, lanes: Mask | None, seeds: Sequence[int] | None, **options: Any) -> list[Any]:
        """Return the first observations.

        Raises:
            EnvironmentRefused: the environment was stepped already.
        """
        _, observation, first = self.env.observe()
        if not np.all(first):
            raise EnvironmentRefused(
                "a gym3 environment cannot be reset, and this one was stepped already. Pass a new "
                "environment, or a factory."
            )
        values = [get(observation) for get in self._getters]
        return [*values, *self._first_infos(self._present_infos(), None)] if self._looks else values

    def _present_infos(self) -> dict[str, Any]:
        """Return the infos of the current observation; the last step of an episode has none."""
        return vector_info(self.env.get_info(), self._read)

    def step(self, action: Sequence[NDArray[Any]], lanes: Mask | None = None) -> Step:
        """Step all lanes."""
        self.env.act(action[0].astype(self._acts_in))
        reward, observation, first = self.env.observe()
        values = [get(observation) for get in self._getters]
        if self._infos:
            told = self._present_infos()
            values += self._next_infos(told, told, first)
        return self._without_masks(Step(values, (reward,), first, self._never))


def _space(value_type: Any, acts: bool = False) -> spaces.Space[Any]:
    """Convert a gym3 type to a Gymnasium space."""
    if hasattr(value_type, "items"):
        return spaces.Dict({name: _space(part, acts) for name, part in value_type.items()})
    element, shape = value_type.eltype, tuple(value_type.shape)
    dtype = np.dtype(element.dtype_name)
    if not hasattr(element, "n"):
        return spaces.Box(-np.inf, np.inf, shape, dtype.type)
    if acts:
        counts = np.full(shape, element.n, np.int64)
        return spaces.MultiDiscrete(counts) if shape else spaces.Discrete(element.n)
    return spaces.Box(0, element.n - 1, shape, dtype.type)
