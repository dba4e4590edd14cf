"""The storage or replay buffer that a run writes to."""
