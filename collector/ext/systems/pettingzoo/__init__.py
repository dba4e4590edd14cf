"""PettingZoo as a system."""

from tallyroll.collector.ext.systems.pettingzoo.system import PettingZooSystem

__all__ = ["PettingZooSystem"]
