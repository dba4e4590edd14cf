"""Where the rows of each format lie, and what other libraries read of it."""

from tallyroll.storage.moved_paths import moved_names

__getattr__ = moved_names(
    __name__, "tallyroll.storage.storages", "FORMATS", "open_storage", "storage_class"
)
