"""Append the rows of a storage to another one of a different format or size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from tallyroll.storage import (
    H5Storage,
    MemmapStorage,
    StorageError,
    ZarrStorage,
    open_storage,
    verify,
)


def _new(kind: str, rows: int, path: Path) -> Any:
    if kind == "h5":
        return H5Storage(path.with_suffix(".h5"), capacity=max(1, rows))
    if kind == "zarr":
        return ZarrStorage(path.with_suffix(".zarr"))
    return MemmapStorage(path, max_size=rows + 7 if kind == "larger ring" else None)


def _append(other: Any, storage: Any, by: str) -> None:
    """Append all rows of ``storage``."""
    if by in ("all", "twice"):
        rows = storage[:]
    elif by == "slice":
        rows = storage[0 : len(storage)]
    else:
        rows = storage.get(torch.from_numpy(storage.index_of(np.array(storage.span, np.int64))))
    other.extend(rows, ids="renumber")


def wrong_in_copy(
    source: Path, stored: TensorDictBase, kind: str, by: str, path: Path
) -> list[str]:
    """Return the faults of a copy of ``source``, whose rows in their order are ``stored``."""
    what, found = f"copy to {kind} by {by}", []
    times = 2 if by == "twice" else 1
    with open_storage(source) as storage, _new(kind, times * len(storage), path) as other:
        try:
            for _ in range(times):
                _append(other, storage, by)
        except StorageError as error:
            return [f"{what}: refused: {error}"]
        rows = other.get(torch.from_numpy(other.index_of(np.array(other.span, np.int64)))).clone()
        place = other.path
    if len(rows) != times * len(stored):
        return [f"{what}: {len(rows)} rows, not {times} times {len(stored)}"]
    if times == 2:
        first, rows = rows[: len(stored)], rows[len(stored) :]
        ids = [set(part["collector", "traj_ids"].tolist()) for part in (first, rows)]
        if ids[0] & ids[1]:
            found.append(f"{what}: {len(ids[0] & ids[1])} ids are there twice")
    for key, leaf in stored.items(True, True):
        if key == ("collector", "traj_ids"):
            moved = rows[key] - leaf
            right = bool((moved == moved[0]).all()) and int(rows[key].min()) >= 0
        else:
            right = rows[key].numpy().tobytes() == leaf.numpy().tobytes()
        if not right:
            found.append(f"{what}: another {key}")
    report = verify(place)
    if not report.sound and verify(source).sound:
        found.append(f"{what}: verify: {[str(each) for each in report.findings]}")
    return found
