"""Checkpoints, which save and load all state that a run needs to continue."""
