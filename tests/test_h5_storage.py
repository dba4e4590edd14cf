"""The HDF5 format: the contract, what other libraries see, and damaged files."""

from __future__ import annotations

from pathlib import Path

from tallyroll.storage import H5Storage
from tallyroll.storage.user_block import newest_manifest, write_manifest

from storage_contract import StorageContract
from storage_damage import DamageContract


class TestH5Storage(StorageContract, DamageContract):
    storage_class = H5Storage
    default_capacity = 10_000
    holds_bfloat16 = False

    def manifest_bytes(self, path: Path) -> bytes:
        with open(path, "rb") as file:
            found = newest_manifest(file.fileno())
        assert found is not None
        return found

    def replace_manifest(self, path: Path, content: bytes) -> None:
        with open(path, "r+b") as file:
            write_manifest(file.fileno(), content)
