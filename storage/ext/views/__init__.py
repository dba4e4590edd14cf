"""Views: the rows of selected trajectories, presented as a separate storage."""
