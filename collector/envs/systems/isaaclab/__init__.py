"""Isaac Lab as a system."""

from tallyroll.collector.envs.systems.isaaclab.system import IsaacLabSystem

__all__ = ["IsaacLabSystem"]
