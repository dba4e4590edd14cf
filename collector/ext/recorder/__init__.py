"""Recorder that stores the transitions of a user's own training loop."""
