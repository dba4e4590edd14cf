"""Rows of many storages, read as one."""
