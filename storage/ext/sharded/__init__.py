"""Sharded storages: each worker of a run writes its own storage, and all are read as one."""
