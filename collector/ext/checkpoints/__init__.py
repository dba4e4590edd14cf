"""Checkpoints: all that a run goes on from, saved together and loaded together."""
