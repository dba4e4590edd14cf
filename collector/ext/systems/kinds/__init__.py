"""Helpers of systems of one kind: pure functions, agents, and lanes side by side."""
