"""The rows of each lane, found by rank and select, in blocks that take few bytes a row."""
