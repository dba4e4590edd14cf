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
from .findings import Finding, Report
from .formats import open_storage
from .memmap import MemmapStorage
from .schema import Schema
from .verification import verify

__all__ = [
    "CorruptStorage",
    "Finding",
    "MemmapStorage",
    "Report",
    "RowsMismatch",
    "Schema",
    "SchemaMismatch",
    "StorageError",
    "StorageExists",
    "StorageFull",
    "StorageLocked",
    "StorageMissing",
    "open_storage",
    "verify",
]
