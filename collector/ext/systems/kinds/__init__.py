"""Helpers shared by systems: pure functions, agents, and single-lane environments."""
