"""Replay stored trajectories from their seeds, and compare every value bit for bit.

``replay_plan`` decides where each trajectory starts, and ``comparison`` finds the differences; both
are pure. ``recovered_env`` makes environments from a manifest, ``stage`` steps them, and ``video``
writes videos and images.
"""
