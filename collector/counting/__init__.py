"""Counts and numbers of slots, transitions, episodes. Pure: no environment, no file."""
