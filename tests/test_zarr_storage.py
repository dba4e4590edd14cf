"""The Zarr format: the contract, what other libraries see, and damaged files."""

from __future__ import annotations

from tallyroll.storage import ZarrStorage

from storage_contract import GrowingStorageContract


class TestZarrStorage(GrowingStorageContract):
    storage_class = ZarrStorage
    holds_bfloat16 = False
