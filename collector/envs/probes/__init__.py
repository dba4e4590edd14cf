"""Faults of environments that a look at a throwaway copy finds."""
