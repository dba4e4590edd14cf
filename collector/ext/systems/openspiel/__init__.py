"""OpenSpiel as a system."""

from tallyroll.collector.ext.systems.openspiel.system import OpenSpielSystem

__all__ = ["OpenSpielSystem"]
