"""A user writes attributes to our files, which must stay sound and accept further rows."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import torch
import zarr
from tensordict import TensorDictBase

from tallyroll.storage import StorageError, open_storage, verify
from tallyroll.storage.storages import storage_class


def wrong_with_notes(path: Path, stored: TensorDictBase) -> list[str]:
    """Return the faults that a user's attribute causes in a storage of these rows."""
    if path.suffix == ".h5":
        with h5py.File(path, "r+") as file:
            file.attrs["author"] = "a user"
            file["next"].attrs["unit"] = "m"
    elif path.suffix == ".zarr":
        zarr.open_group(path, mode="r+").attrs["author"] = "a user"
    else:
        (path / "README.txt").write_text("by a user")
    found = []
    report = verify(path)
    if not report.sound:
        found.append(f"verify after a note: {[str(each) for each in report.findings]}")
    try:
        with storage_class(path)(path, mode="append"), open_storage(path) as reader:
            index = reader.index_of(np.array(reader.span, np.int64))
            if len(reader) != len(stored):
                found.append(f"{len(reader)} rows after a note, not {len(stored)}")
            reader.get(torch.from_numpy(index))
    except StorageError as error:
        found.append(f"refused after a note: {error}")
    return found
