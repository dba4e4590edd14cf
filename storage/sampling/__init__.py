"""Drawing for learners: slices of trajectories, targets over n steps."""
