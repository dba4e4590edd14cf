"""The packages themselves: their public names, names that moved, and versions."""
