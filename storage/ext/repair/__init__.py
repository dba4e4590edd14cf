"""Repair: save the readable rows of a damaged or unfinished dataset in a new storage."""
