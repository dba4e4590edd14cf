"""Isaac Lab as a system."""

from tallyroll.collector.ext.systems.isaaclab.system import IsaacLabSystem

__all__ = ["IsaacLabSystem"]
