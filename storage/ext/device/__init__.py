"""Storage in the memory of a device: a ring of columns that a run writes to."""
