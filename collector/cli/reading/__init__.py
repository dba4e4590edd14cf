"""Commands that read storages."""
