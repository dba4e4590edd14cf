"""Stable-Baselines3's `VecEnv`: it resets lanes in its step, and hands out final observations."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self

import gymnasium
import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.compat import seed_next_reset
from tallyroll.collector.envs.extras import needs
from tallyroll.collector.envs.gymnasium.make import making
from tallyroll.collector.envs.gymnasium.spaces import action_leaf, observation_leaves
from tallyroll.collector.envs.system import Declares, Mask, Step, System
from tallyroll.collector.envs.systems.sb3_wrappers import layers, true_space
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused, TransitionError
from tallyroll.storage.rows.keys import spell

_FINAL, _CUT = "terminal_observation", "TimeLimit.truncated"


class Sb3System(System):
    """A ``VecEnv`` as a system, its wrappers included.

    An end that Stable-Baselines3 marks ``TimeLimit.truncated`` is truncated, any other terminated:
    where an environment says both, that library says terminated.

    Args:
        env: closed with this.

    Raises:
        EnvironmentRefused: SuperSuit's vectors, where agents die unevenly.
        SpaceError: a space that no column can hold.
    """

    package = "stable_baselines3"
    extra = "sb3"
    about = "resets in the step of an end, finals kept in infos; seeds at a reset of all"

    def __init__(self, env: Any) -> None:
        if any(type(each).__module__.startswith("supersuit") for each in layers(env)):
            raise EnvironmentRefused(
                "SuperSuit's vectors are wrong where agents die unevenly; pass the PettingZoo "
                "environment itself"
            )
        self.env = env
        spec = env.get_attr("spec", 0)[0] if env.has_attr("spec") else None
        self._id = getattr(spec, "id", None)
        lanes = int(env.num_envs)
        self._leaves = observation_leaves(true_space(env), lanes)
        self._getters = [leaf.getter() for leaf in self._leaves]
        action = action_leaf(env.action_space, lanes)
        self._never = np.zeros(lanes, np.bool_)
        self.declares = Declares(
            lanes=lanes,
            observation={leaf.key: leaf.spec[0] for leaf in self._leaves},
            action={action.key: action.spec[0]},
            at_end="first",
            finals="extra",
            resets="all",
        )

    @classmethod
    def make(cls, name: str, lanes: int, seeds: Sequence[int] | None, **kwargs: Any) -> Self:
        """A ``DummyVecEnv`` of a Gymnasium id; ``kwargs`` are those of ``gymnasium.make``."""
        kind = needs("stable_baselines3.common.vec_env", "sb3").DummyVecEnv
        with ExitStack() as half_made:
            with making(name, kwargs):
                envs = []
                for _ in range(lanes):
                    envs.append(gymnasium.make(name, **kwargs))
                    half_made.callback(envs[-1].close)
            system = cls(kind([lambda env=env: env for env in envs]))
            half_made.pop_all()
        return system

    @classmethod
    def adopt(cls, made: object) -> Self | None:
        """A system over a ``VecEnv``."""
        package = sys.modules.get("stable_baselines3.common.vec_env.base_vec_env")
        return None if package is None or not isinstance(made, package.VecEnv) else cls(made)

    def describe(self) -> dict[str, Any]:
        """The id of the first lane, the kind of vector, and what is around it."""
        *outer, inner = [type(each).__name__ for each in layers(self.env)]
        return {"id": self._id, "type": inner} | ({"wrappers": outer} if outer else {})

    def close(self) -> None:
        """Close the vector."""
        self.env.close()

    def reset(self, lanes: Mask | None, seeds: Sequence[int] | None, **options: Any) -> list[Any]:
        """Reset all lanes."""
        if options:
            raise ArgumentError(
                f"reset: a VecEnv takes its options by set_options, got {sorted(options)}"
            )
        if seeds is not None:
            seed_next_reset(self.env, seeds)
        obs = self.env.reset()
        return [get(obs) for get in self._getters]

    def step(self, action: Sequence[NDArray[Any]], lanes: Mask | None = None) -> Step:
        """Step all lanes."""
        obs, reward, done, infos = self.env.step(action[0])
        values = [get(obs) for get in self._getters]
        if not np.count_nonzero(done):
            return Step(values, (reward,), done, self._never)
        ended = np.flatnonzero(done).tolist()
        truncated = self._never.copy()
        truncated[ended] = [bool(infos[lane].get(_CUT)) for lane in ended]
        final = None
        if all(_FINAL in infos[lane] for lane in ended):
            final = self._finals({lane: infos[lane][_FINAL] for lane in ended})
        return Step(values, (reward,), done & ~truncated, truncated, final)

    def _finals(self, found: dict[int, Any]) -> list[NDArray[Any]]:
        """The final observations of lanes that ended, in arrays of all lanes."""
        rows = [np.zeros(leaf.shape, leaf.dtype) for leaf in self._leaves]
        for lane, observation in found.items():
            for leaf, get, row in zip(self._leaves, self._getters, rows, strict=True):
                value = get(observation)
                if np.shape(value) != row.shape[1:]:
                    raise TransitionError(
                        f"{spell(leaf.key)}: expected a terminal_observation of shape "
                        f"{list(row.shape[1:])}, got {list(np.shape(value))} in lane "
                        f"{self.first_lane + lane}; a wrapper that changes observations has to "
                        "change that too"
                    )
                row[lane] = value
                if row.dtype.kind != "f" and not np.array_equal(row[lane], value):
                    raise TransitionError(
                        f"{spell(leaf.key)}: the terminal_observation in lane "
                        f"{self.first_lane + lane} is no {row.dtype}, as the space declares; a "
                        "wrapper that changes observations has to change that too"
                    )
        return rows
