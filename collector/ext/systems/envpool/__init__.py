"""EnvPool as a system."""

from tallyroll.collector.ext.systems.envpool.system import EnvPoolSystem

__all__ = ["EnvPoolSystem"]
