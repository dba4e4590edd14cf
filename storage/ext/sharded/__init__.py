"""Rows that the workers of one run wrote, each to a storage of its own, read as one."""
