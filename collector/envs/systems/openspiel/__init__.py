"""OpenSpiel as a system."""

from tallyroll.collector.envs.systems.openspiel.system import OpenSpielSystem

__all__ = ["OpenSpielSystem"]
