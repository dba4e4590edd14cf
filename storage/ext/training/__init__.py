"""Rows as a dataset of PyTorch, in an order that can be gone on with, and as tables."""
