"""Samplers of trajectory slices, and n-step targets."""
