"""The state of a run: its counts and flags, seeds, provenance, and what is saved of it."""
