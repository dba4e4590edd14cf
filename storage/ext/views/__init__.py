"""Views: the rows of selected trajectories, read as a storage of their own."""
