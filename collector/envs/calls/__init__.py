"""Calls and attributes of the environments of lanes, wherever these are."""
