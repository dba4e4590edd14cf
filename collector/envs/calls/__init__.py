"""Calls of methods and attributes of lanes' environments, in any process."""
