"""Sharded storages: each worker of a run writes a storage of its own, and all are read as one."""
