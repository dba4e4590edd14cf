"""Environments: the interface for systems, and the values that ``create_env_fn`` accepts."""

from tallyroll.collector.envs.gymnasium.vector import GymnasiumVectorEnv
from tallyroll.collector.envs.system import AgentFlags, Declares, Step, System
from tallyroll.collector.envs.system_env import SystemEnv

__all__ = ["AgentFlags", "Declares", "GymnasiumVectorEnv", "Step", "System", "SystemEnv"]
