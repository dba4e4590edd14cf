"""EnvPool, synchronous: lanes reset themselves in the step after an end, in either of its APIs."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.envs.extras import needs
from tallyroll.collector.envs.gymnasium.infos import RESET_SLOT
from tallyroll.collector.envs.gymnasium.spaces import action_leaf, observation_leaves
from tallyroll.collector.envs.gymnasium.told import TellingSystem
from tallyroll.collector.envs.system import Mask, Step
from tallyroll.collector.envs.systems.envpool_infos import in_lanes, infos_of
from tallyroll.collector.envs.systems.envpool_spaces import cast, dm_getter, is_pool, true_space
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused, MissingExtra, SpaceError

_OF_RUN = {"num_envs", "batch_size", "seed", "env_seed"}


class EnvPoolSystem(TellingSystem):
    """An environment of EnvPool, of its gymnasium or of its dm API.

    Its dm API does not tell a time limit from a termination (the discount is 0 at both, but for
    dm_control's tasks), so steps are counted here, and both APIs give the same rows.

    Args:
        env: closed with this.

    Raises:
        EnvironmentRefused: an asynchronous one, or one of several players.
        SpaceError: a space that no column can hold.
    """

    package = "envpool"
    extra = "envpool"
    about = "an end is followed by a reset slot, which is no row; seeds when made"

    def __init__(self, env: Any) -> None:
        self.env = env
        lanes = int(env.config["num_envs"])
        if env.config["batch_size"] not in (0, lanes):
            raise EnvironmentRefused(
                f"EnvPool with batch_size={env.config['batch_size']} of num_envs={lanes} is "
                "asynchronous: its lanes come back in any order; leave batch_size out"
            )
        if (players := env.config.get("max_num_players", 1)) != 1:
            raise EnvironmentRefused(f"expected one player a lane, got {players}")
        self._is_dm = hasattr(env, "observation_spec")
        action = env.spec.gymnasium_action_space
        if isinstance(action, dict):
            raise SpaceError(f"expected one action a lane, got those of {sorted(action)}")
        leaves = observation_leaves(true_space(env.spec.gymnasium_observation_space), lanes)
        self._getters = [
            (dm_getter(leaf, env) if self._is_dm else leaf.getter()) for leaf in leaves
        ]
        self._dtypes = [leaf.dtype for leaf in leaves]
        self._limit = int(env.config.get("max_episode_steps", 0)) or np.iinfo(np.int64).max
        self._steps = np.zeros(lanes, np.int64)
        taken = action_leaf(action, lanes)
        self._declare(leaves, taken, lanes, at_end="reset_slot", seeds="make")

    @classmethod
    def make(cls, name: str, lanes: int, seeds: Sequence[int] | None, **kwargs: Any) -> Self:
        """A task of EnvPool; ``kwargs`` are those of ``envpool.make``.

        ``env_type`` among them is ``"gymnasium"``, the default, or ``"dm"``.
        """
        if wrong := sorted(_OF_RUN & kwargs.keys()):
            raise ArgumentError(f"env_kwargs: {wrong} are the collector's (num_envs, seed)")
        package = needs("envpool", "envpool")
        api = kwargs.pop("env_type", "gymnasium")
        more = kwargs if seeds is None else {**kwargs, "seed": list(seeds)}
        try:
            env = package.make(name, api, num_envs=lanes, **more)
        except ImportError as error:
            raise MissingExtra(f"envpool cannot make {name!r}: {error}") from error
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            said = str(error).partition("\n")[0]
            raise ArgumentError(
                f"envpool cannot make {name!r} with {kwargs} by its {api} API: {said}"
            ) from error
        try:
            return cls(env)
        except BaseException:
            env.close()
            raise

    @classmethod
    def adopt(cls, made: object) -> Self | None:
        """A system over an environment of EnvPool."""
        return cls(made) if is_pool(made) else None

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def describe(self) -> dict[str, Any]:
        """The kind of environment; EnvPool's do not say their names."""
        return {"id": None, "type": type(self.env).__name__}

    def reset(self, lanes: Mask | None, seeds: Sequence[int] | None, **options: Any) -> list[Any]:
        """Reset all lanes, or those of a mask."""
        if options:
            raise ArgumentError(f"reset: EnvPool takes no options, got {sorted(options)}")
        self._steps[... if lanes is None else lanes] = 0
        ids = None if lanes is None else np.flatnonzero(lanes).astype(np.int32)
        made = self.env.reset(ids)
        found = self._values(made.observation if self._is_dm else made[0])
        if lanes is None or ids is None:
            return [*found, *self._told_first(infos_of(made, self._is_dm), None)]
        rows = [np.zeros((len(lanes), *each.shape[1:]), each.dtype) for each in found]
        for row, value in zip(rows, found, strict=True):
            row[ids] = value
        infos = in_lanes(infos_of(made, self._is_dm), ids, len(lanes)) if self._infos else {}
        return [*rows, *self._told_first(infos, lanes)]

    def _values(self, observation: Any) -> list[Any]:
        pairs = zip(self._getters, self._dtypes, strict=True)
        return [cast(get(observation), dtype) for get, dtype in pairs]

    def step(self, action: Sequence[NDArray[Any]], lanes: Mask | None = None) -> Step:
        """Step all lanes; those whose episode ended are reset."""
        made = self.env.step(action[0])
        step = self._dm_step(made) if self._is_dm else self._step(*made)
        if not self._infos:
            return step
        rows = self._infos.new_rows()
        self._infos.write(rows, infos_of(made, self._is_dm))
        self._infos.count(step.terminated | step.truncated, RESET_SLOT)
        return step._replace(obs=[*step.obs, *rows])

    def _step(self, obs: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> Step:
        skipped = info["elapsed_step"] == 0
        return Step(self._values(obs), (reward,), terminated, truncated, skipped=skipped)

    def _dm_step(self, made: Any) -> Step:
        first, last = made.step_type == 0, made.step_type == 2
        self._steps += 1
        self._steps[first] = 0
        truncated = last & (self._steps >= self._limit)
        values = self._values(made.observation)
        return Step(values, (made.reward,), last & ~truncated, truncated, skipped=first)
