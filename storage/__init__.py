"""Replay storage on disk: exact counts, one commit a batch, safe from kill -9.

Conditions that are not named here are in `tallyroll.storage.errors`.
"""

from __future__ import annotations

from .errors import (
    CorruptStorage,
    RowsMismatch,
    SchemaMismatch,
    StorageError,
    StorageExists,
    StorageFull,
    StorageLocked,
    StorageMissing,
)
from .formats import open_storage
from .memmap import MemmapStorage
from .schema import Schema

__all__ = [
    "CorruptStorage",
    "MemmapStorage",
    "RowsMismatch",
    "Schema",
    "SchemaMismatch",
    "StorageError",
    "StorageExists",
    "StorageFull",
    "StorageLocked",
    "StorageMissing",
    "open_storage",
]
