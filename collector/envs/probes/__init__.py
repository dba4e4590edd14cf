"""Checks that detect faults of an environment, mostly on a throwaway copy."""
