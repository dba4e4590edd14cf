"""dm_control as a system."""

from tallyroll.collector.ext.systems.dm_control.system import DmControlSystem

__all__ = ["DmControlSystem"]
