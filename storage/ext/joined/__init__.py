"""Unions: the rows of many storages, read as one."""
