"""Replay storage on disk, with exact row counts and batches that survive a kill at any time."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tallyroll.storage.package.moved_paths import moved_modules
from tallyroll.storage.package.public_names import homes_of_names

if __name__ != "tallyroll.storage":  # imported from the root of a checkout
    raise ImportError(
        f"expected the name tallyroll.storage, got {__name__}; import tallyroll.storage"
    )

_homes = homes_of_names(__file__)
__all__ = [*_homes]

_MOVED = {
    "base": "tallyroll.storage.storages",
    "checkpoint": "tallyroll.storage.replay.checkpoint",
    "datasets": "tallyroll.storage.ext",
    "datasets.exchange.door": "tallyroll.storage.ext.exchange.base",
    "datasets.exchange.following": "tallyroll.storage.ext.exchange.followed_export",
    "datasets.exchange.formats": "tallyroll.storage.ext.exchange",
    "findings": "tallyroll.storage.ext.verification.findings",
    "hdf5": "tallyroll.storage.storages",
    "keys": "tallyroll.storage.rows.keys",
    "manifest": "tallyroll.storage.files.manifest",
    "memmap": "tallyroll.storage.storages",
    "n_steps": "tallyroll.storage.sampling.n_steps",
    "overlays": "tallyroll.storage.ext.overlays",
    "row_store": "tallyroll.storage.stores.row_store",
    "sampling": "tallyroll.storage.ext.sampling",
    "samplers": "tallyroll.storage.sampling.trajectory_slices",
    "schema": "tallyroll.storage.rows.schema",
    "store": "tallyroll.storage.stores.row_store",
    "torchrl_face": "tallyroll.storage.replay.buffers",
    "verification": "tallyroll.storage.ext.verification",
    "verification.soundness": "tallyroll.storage.ext.dataset_checks",
    "verification.soundness.repairing": "tallyroll.storage.ext.repair",
    "zarr_store": "tallyroll.storage.storages",
}
moved_modules(__name__, _MOVED)


def __getattr__(name: str) -> Any:
    if name in _MOVED:  # these were attributes of the package as soon as it was imported
        return import_module(f"{__name__}.{name}")
    if name not in _homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_homes[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
