"""Zarr v3: a directory, with a file for each chunk."""
