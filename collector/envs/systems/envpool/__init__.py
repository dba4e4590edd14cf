"""EnvPool as a system."""

from tallyroll.collector.envs.systems.envpool.system import EnvPoolSystem

__all__ = ["EnvPoolSystem"]
