"""Integration with TorchRL's replay buffers: cursors, checkpoints and loaders."""
