"""Open a storage whatever its format."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from .base import DiskStorage
from .errors import NotAStorage, StorageMissing
from .manifest import read_manifest
from .memmap import MemmapStorage

__all__ = ["open_storage"]

_CLASSES: tuple[type[DiskStorage], ...] = (MemmapStorage,)


def open_storage(
    path: str | os.PathLike[str], mode: Literal["append", "read"] = "read", **options: Any
) -> DiskStorage:
    """Open the storage at ``path``, its format taken from its manifest.

    Args:
        path: where it is.
        mode: ``"read"`` or ``"append"``.
        options: as the storage's class takes them.

    Raises:
        StorageMissing: nothing is there.
        NotAStorage: something else is there.
        CorruptStorage: it is damaged.
    """
    place = Path(path)
    if not place.exists():
        raise StorageMissing(f"{path} does not exist. Give the path of a storage.")
    if not place.is_dir():
        raise NotAStorage(f"{path} is a file, not a Tallyroll storage. Give the path of a storage.")
    name = read_manifest(place / "manifest.json")["format"]
    for storage_class in _CLASSES:
        if storage_class._format_class.name == name:
            return storage_class(path, mode=mode, **options)
    known = ", ".join(c._format_class.name for c in _CLASSES)
    raise NotAStorage(
        f"{path} is of format {name}, and this Tallyroll knows {known}. Use a newer Tallyroll."
    )
