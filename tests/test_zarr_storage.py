"""The Zarr format: the contract, what other libraries see, and damaged files."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from tallyroll.storage import StorageFull, ZarrStorage, open_storage
from tallyroll.storage.base import DiskStorage
from tallyroll.storage.commit import HEADER_NBYTES

from storage_contract import GrowingStorageContract, arrays, assert_rows, rows
from storage_damage import DamageContract


def fill_with_large_chunks(kind: type[DiskStorage], place: Path) -> None:
    """Zarr's files have the size of a chunk, which is chosen when the storage is made."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (HEADER_NBYTES, resource.RLIM_INFINITY))
    with kind(place) as storage:
        with pytest.raises(StorageFull, match=r"needs \d+ more bytes, .*File too large"):
            storage.extend(rows(0, 5))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
        storage.extend(arrays(0, 100_000))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, resource.RLIM_INFINITY))
    with open_storage(place, "append") as storage:
        assert_rows(storage, 100_000)
        with pytest.raises(StorageFull, match="File too large"):
            storage.extend(arrays(100_000, 500_000))
        assert_rows(storage, 100_000)


class TestZarrStorage(GrowingStorageContract, DamageContract):
    storage_class = ZarrStorage
    holds_bfloat16 = False
    fill_files = staticmethod(fill_with_large_chunks)
