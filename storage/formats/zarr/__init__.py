"""Zarr v3 format: a directory with a file for each chunk."""
