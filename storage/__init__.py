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
from .hdf5 import H5Storage
from .memmap import MemmapStorage
from .n_steps import n_step
from .samplers import TrajectorySliceSampler
from .schema import Schema
from .verification import verify
from .zarr_store import ZarrStorage

__all__ = [
    "CorruptStorage",
    "Finding",
    "H5Storage",
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
    "TrajectorySliceSampler",
    "ZarrStorage",
    "n_step",
    "open_storage",
    "verify",
]
