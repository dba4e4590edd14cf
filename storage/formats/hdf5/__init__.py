"""HDF5 format: one file, with the header in its user block."""
