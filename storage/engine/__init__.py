"""Rows in and out of mapped columns, the same for every format."""

from tallyroll.storage.package.moved_paths import moved_names

__getattr__ = moved_names(__name__, "tallyroll.storage.engine.commit_engine", "Durability")
