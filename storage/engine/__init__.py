"""Transfer of rows to and from mapped columns, common to all formats."""

from tallyroll.storage.package.moved_paths import moved_names

__getattr__ = moved_names(__name__, "tallyroll.storage.engine.commit_engine", "Durability")
