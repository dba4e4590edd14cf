"""Stable-Baselines3 as a system."""

from tallyroll.collector.ext.systems.sb3.system import Sb3System

__all__ = ["Sb3System"]
