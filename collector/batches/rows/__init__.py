"""Rows of a batch: gathered from a slab, or numbered in place."""
