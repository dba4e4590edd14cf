"""Rows in the formats of other libraries: written, and read back into storages."""
