"""PettingZoo as a system."""

from tallyroll.collector.envs.systems.pettingzoo.system import PettingZooSystem

__all__ = ["PettingZooSystem"]
