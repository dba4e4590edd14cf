"""Readers of rows: the interface through which all other code reads rows."""
