"""Policies and random generators, which choose actions."""
