"""Training from stored rows: PyTorch datasets with resumable order, and tables."""
