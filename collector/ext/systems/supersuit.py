"""SuperSuit's vectors of PettingZoo environments: each agent of each environment is a lane."""

import sys
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from tallyroll.collector.envs.frame_skips import ticks_of_objects
from tallyroll.collector.envs.gymnasium.spaces import action_leaf, observation_leaves
from tallyroll.collector.envs.system import Array, Declares, Mask, Step, System
from tallyroll.collector.errors import EnvironmentRefused

FINAL = "terminal_observation"
_STEPPED_ON = (
    ", but SuperSuit's vectors would continue to step such agents. Pass the PettingZoo environment "
    "itself, without SuperSuit's vector, to the collector."
)


class SuperSuitSystem(System):
    """A vector of ``pettingzoo_env_to_vec_env_v1`` or ``concat_vec_envs_v1``.

    The vector begins the next episode within the step in which the last agent of an environment
    ends, and returns final observations in infos. SuperSuit keeps stepping an agent that ends
    before others, or is absent, with zeros, so the system refuses such a step when it happens. Pass
    the PettingZoo environment itself to the collector for groups of agents with masks. The first
    environment takes the first lane's seed, and each further environment takes the next integer.

    Args:
        env: the vector. The system closes it.
    """

    package = "supersuit"
    extra = "supersuit"
    about = "resets in the step of an end, finals kept; uneven ends refused"
    why_no_resets = (
        "it resets environments of several lanes within its step, without seeds or options"
    )

    def __init__(self, env: Any) -> None:
        self.env, lanes = env, int(env.num_envs)
        leaves = observation_leaves(env.observation_space, lanes)
        self._getters = [leaf.getter() for leaf in leaves]
        self._finals = [np.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
        self._lacking = [
            each for each in (env, *getattr(env, "vec_envs", ())) if getattr(each, "black_death", 0)
        ]
        """Environments that continue to step without absent agents. Other environments raise."""
        action = action_leaf(env.action_space, lanes)
        self.declares = Declares(
            lanes=lanes,
            observation={leaf.key: leaf.spec[0] for leaf in leaves},
            action={action.key: action.spec[0]},
            at_end="first",
            finals="extra",
            resets="all",
            seeds="shared",
        )

    def reset(
        self, lanes: Mask | None, seeds: Sequence[int] | None, **options: Any
    ) -> Sequence[Array]:
        """Reset all environments."""
        seed = None if seeds is None else int(seeds[0])
        observation, _ = self.env.reset(seed=seed, options=options.get("options"))
        return [take(observation) for take in self._getters]

    def step(self, action: Sequence[Array], lanes: Mask | None = None) -> Step:
        """Step all environments.

        Raises:
            EnvironmentRefused: an agent ended before others of its environment, or is absent.
        """
        for each in self._lacking:
            if absent := set(each.par_env.possible_agents).difference(each.par_env.agents):
                raise EnvironmentRefused(f"the agents {sorted(absent)} are absent{_STEPPED_ON}")
        observation, reward, terminated, truncated, infos = self.env.step(action[0])
        flags = np.asarray(terminated, np.bool_), np.asarray(truncated, np.bool_)
        final = None
        for lane in np.flatnonzero(flags[0] | flags[1]).tolist():
            if FINAL not in infos[lane]:
                raise EnvironmentRefused(
                    f"lane {self.first_lane + lane}: an agent ended before others of its "
                    f"environment{_STEPPED_ON}"
                )
            final = self._finals
            for array, take in zip(final, self._getters, strict=True):
                array[lane] = take(infos[lane][FINAL])
        return Step([take(observation) for take in self._getters], [reward], *flags, final)

    def close(self) -> None:
        """Close the vector."""
        self.env.close()

    @property
    def ticks(self) -> int | None:
        """Ticks of a transition, from the environments and their wrappers.

        None if the environments run in other processes.
        """
        if hasattr(self.env, "pipes"):
            return None
        return ticks_of_objects(getattr(self.env, "vec_envs", [self.env]))

    def describe(self) -> dict[str, Any]:
        """Return the name in the vector's metadata, and the kind of vector."""
        name = self.env.metadata.get("name")
        return {"id": None if name is None else str(name), "type": type(self.env).__name__}

    @classmethod
    def adopt(cls, made: object) -> Self | None:
        """Wrap SuperSuit's vectors for Gymnasium; return None for other objects."""
        module: Any = sys.modules.get("supersuit.vector")
        if module is None:
            return None
        kinds = (module.MarkovVectorEnv, module.ConcatVecEnv, module.ProcConcatVec)
        return cls(made) if isinstance(made, kinds) else None
