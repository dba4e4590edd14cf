"""Packed rows: in trajectory order, compressed, observations and frames once."""
