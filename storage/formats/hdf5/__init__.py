"""HDF5: one file, with the header in its user block."""
