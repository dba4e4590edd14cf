"""Compact blocks of the rows of each lane, which are found by rank and select."""
