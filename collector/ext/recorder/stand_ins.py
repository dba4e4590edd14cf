"""Stand-ins for environments that the user's loop steps.

The ``step`` and ``reset`` of a stand-in return the results that the environment returned to the
loop. A recorder drives the stand-in as collectors drive environments, so the same code converts the
results to columns.
"""

from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv

from tallyroll.collector.envs.gymnasium.vector_rules import autoreset_mode

_FINALS = ("final_obs", "_final_obs")


class EnvStandIn(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Stand-in for a single Gymnasium environment."""

    returned: Any = None
    """The last result of the environment's ``step`` or ``reset``."""

    @property
    def spec(self) -> Any:  # type: ignore[override]
        """The spec of the environment itself."""
        return self.env.spec

    def step(self, action: Any) -> Any:
        """Return the last result of the environment."""
        return self.returned

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Return the last result of the environment."""
        return self.returned

    def close(self) -> None:
        """Do nothing: the loop owns the environment."""


class VectorStandIn(VectorEnv[Any, Any, Any]):
    """Stand-in for a Gymnasium vector.

    It is not a wrapper of ``env``. Otherwise the system would find a `SyncVectorEnv` inside it, and
    step the lanes of that.
    """

    returned: Any = None
    """The last result of the vector's ``step`` or ``reset``."""

    loses_finals = False
    """True if ``step`` returns no final observations, because the vector may lose them."""

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        self.num_envs, self.spec, self.metadata = env.num_envs, env.spec, env.metadata
        self.single_observation_space = env.single_observation_space
        self.single_action_space = env.single_action_space
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.autoreset_mode = autoreset_mode(env)
        if (space := getattr(env.unwrapped, "reward_space", None)) is not None:
            self.reward_space = space

    def step(self, actions: Any) -> Any:
        """Return the last result of the vector."""
        if not self.loses_finals:
            return self.returned
        *results, info = self.returned
        return *results, {name: value for name, value in info.items() if name not in _FINALS}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Return the last result of the vector."""
        return self.returned
