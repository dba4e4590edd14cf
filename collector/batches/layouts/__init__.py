"""Layouts of the batches that are yielded."""
