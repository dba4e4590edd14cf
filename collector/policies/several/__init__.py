"""Several policies of one run: by lane, or by group of agents."""
