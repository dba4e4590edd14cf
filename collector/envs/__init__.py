"""Environments: adapters, one a file, and what ``create_env_fn`` may be."""

from tallyroll.collector.envs.gymnasium.vector import GymnasiumVectorEnv

__all__ = ["GymnasiumVectorEnv"]
