"""Replay storage on disk: exact counts, one commit a batch, safe from kill -9.

Conditions that are not named here are in `tallyroll.storage.errors`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tallyroll.storage.errors import (
    CorruptStorage,
    RowsMismatch,
    SchemaMismatch,
    StorageError,
    StorageExists,
    StorageFull,
    StorageLocked,
    StorageMissing,
)
from tallyroll.storage.moved_paths import moved_modules

if TYPE_CHECKING:
    from tallyroll.storage.n_steps import n_step
    from tallyroll.storage.rows.schema import Schema
    from tallyroll.storage.samplers import TrajectorySliceSampler
    from tallyroll.storage.storages import H5Storage, MemmapStorage, ZarrStorage, open_storage
    from tallyroll.storage.verification.findings import Finding, Report
    from tallyroll.storage.verification.storage_checks import verify

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

_HOMES = {
    "Finding": "verification.findings",
    "H5Storage": "storages",
    "MemmapStorage": "storages",
    "Report": "verification.findings",
    "Schema": "rows.schema",
    "TrajectorySliceSampler": "samplers",
    "ZarrStorage": "storages",
    "n_step": "n_steps",
    "open_storage": "storages",
    "verify": "verification.storage_checks",
}

_MOVED = {
    "base": "tallyroll.storage.storages",
    "checkpoint": "tallyroll.storage.replay.checkpoint",
    "findings": "tallyroll.storage.verification.findings",
    "hdf5": "tallyroll.storage.storages",
    "keys": "tallyroll.storage.rows.keys",
    "manifest": "tallyroll.storage.files.manifest",
    "memmap": "tallyroll.storage.storages",
    "schema": "tallyroll.storage.rows.schema",
    "row_store": "tallyroll.storage.stores.row_store",
    "store": "tallyroll.storage.stores.row_store",
    "torchrl_face": "tallyroll.storage.replay.buffers",
    "zarr_store": "tallyroll.storage.storages",
}
moved_modules(__name__, _MOVED)


def __getattr__(name: str) -> Any:
    # Importing torch and TorchRL takes seconds, which `tallyroll --help` need not wait for.
    if name in _MOVED:  # all were attributes as soon as the package was imported
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
