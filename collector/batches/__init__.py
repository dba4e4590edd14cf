"""Batches: from a filled slab to rows, checked, numbered, stored and yielded."""
