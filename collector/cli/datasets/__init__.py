"""Commands that make storages of storages, and choose their rows."""
