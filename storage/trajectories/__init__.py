"""Assignment of rows to trajectories: ids, episodes, and the index of both."""
