"""dm_control as a system."""

from tallyroll.collector.envs.systems.dm_control.system import DmControlSystem

__all__ = ["DmControlSystem"]
