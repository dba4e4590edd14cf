"""Commands that read storages without writing rows."""
