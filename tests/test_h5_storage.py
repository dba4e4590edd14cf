"""The HDF5 format: the contract, what other libraries see, and damaged files."""

from __future__ import annotations

from tallyroll.storage import H5Storage

from storage_contract import StorageContract


class TestH5Storage(StorageContract):
    storage_class = H5Storage
    default_capacity = 400_000
    holds_bfloat16 = False
