"""MuJoCo Playground environments, with Brax's interface over MuJoCo's XLA pipeline."""

from collections.abc import Sequence
from typing import Any, Self

from tallyroll.collector.envs.extras import needs
from tallyroll.collector.ext.systems.brax import BraxSystem
from tallyroll.collector.ext.systems.kinds.functional_specs import made


class PlaygroundSystem(BraxSystem):
    """Lanes of a ``mujoco_playground.MjxEnv``; see `BraxSystem`.

    Contexts are fields of its ``mjx_model``, such as ``"opt.gravity"`` and ``"body_mass"``.
    """

    package, extra = "mujoco_playground", "playground"
    where = ("mujoco_playground._src.mjx_env", "MjxEnv")
    parameters = "mjx_model"
    names_contexts = False  # a factory can pass contexts

    @classmethod
    def make(cls, name: str, lanes: int, seeds: Sequence[int] | None, **kwargs: Any) -> Self:
        """Make the environment of ``playground:name``.

        ``kwargs`` override its configuration by name, such as ``"reward_config.scales.pose"``.
        ``episode_length`` sets the number of steps after which episodes are truncated.
        """
        registry = needs("mujoco_playground", cls.extra).registry
        config = made(name, {}, registry.get_default_config)
        length = kwargs.pop("episode_length", config.episode_length)
        env = made(name, {"config_overrides": kwargs} if kwargs else {}, registry.load)
        return cls(env, lanes, episode_length=length)
