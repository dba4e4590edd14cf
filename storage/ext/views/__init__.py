"""Views: rows of chosen trajectories, read as a storage of their own."""
