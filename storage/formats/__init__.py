"""File formats: where the rows are in files, and the metadata for other libraries."""

from tallyroll.storage.package.moved_paths import moved_names

__getattr__ = moved_names(
    __name__, "tallyroll.storage.storages", "FORMATS", "open_storage", "storage_class"
)
