"""The HDF5 format: the contract, what other libraries see, and damaged files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import h5py
import numpy as np
from tensordict import PersistentTensorDict

from tallyroll.storage import H5Storage
from tallyroll.storage.rows import Key
from tallyroll.storage.user_block import newest_manifest, write_manifest

from storage_contract import StorageContract
from storage_damage import DamageContract
from storage_outsiders import Outsider, OutsiderContract


def h5(path: Path, keys: Iterable[Key]) -> tuple[int, dict[Key, np.ndarray]]:
    with h5py.File(path) as file:
        shown = int(file.attrs["rows"])
        return shown, {key: file["/".join(key)][:shown] for key in keys}


def persistent_tensordict(path: Path, keys: Iterable[Key]) -> tuple[int, dict[Key, np.ndarray]]:
    with h5py.File(path) as file:
        shown, capacity = int(file.attrs["rows"]), int(file.attrs["capacity"])
    data = PersistentTensorDict.from_h5(path)
    assert data.batch_size == (capacity,)
    found = {key: data[key][:shown].numpy() for key in keys}
    data.close()
    return shown, found


class TestH5Storage(StorageContract, DamageContract, OutsiderContract):
    storage_class = H5Storage
    default_capacity = 10_000
    holds_bfloat16 = False
    outsiders: ClassVar[dict[str, Outsider]] = {
        "h5py": h5,
        "PersistentTensorDict": persistent_tensordict,
    }

    def manifest_bytes(self, path: Path) -> bytes:
        with open(path, "rb") as file:
            found = newest_manifest(file.fileno())
        assert found is not None
        return found

    def replace_manifest(self, path: Path, content: bytes) -> None:
        with open(path, "r+b") as file:
            write_manifest(file.fileno(), content)
