"""Commands that make storages from other storages or datasets, and select their rows."""
