"""Stepping of a system's lanes: slots, ends of episodes, resets, seeds and contexts."""
