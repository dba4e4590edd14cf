"""Readers of rows: what everything that reads asks, and nothing behind it."""
