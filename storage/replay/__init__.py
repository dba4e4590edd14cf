"""TorchRL's replay buffers over a storage: kept in step with it, and its checkpoints."""
