"""Open a storage whatever its format: what is there says which it is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tallyroll.storage.errors import CorruptStorage, NotAStorage, StorageMissing
from tallyroll.storage.files.header import refuse_newer_header
from tallyroll.storage.files.inside import Inside
from tallyroll.storage.files.manifest import read_manifest
from tallyroll.storage.files.paths import refuse_impossible, translated
from tallyroll.storage.formats.hdf5.user_block import is_hdf5, is_ours
from tallyroll.storage.formats.newer import refuse_newer_file, refuse_newer_group
from tallyroll.storage.storages import DiskStorage, H5Storage, MemmapStorage, ZarrStorage

__all__ = ["FORMATS", "open_storage", "storage_class"]

FORMATS: Mapping[str, type[DiskStorage]] = {
    "memmap": MemmapStorage,
    "hdf5": H5Storage,
    "zarr": ZarrStorage,
}
"""The classes by the short names of their formats."""

_SUFFIXES = {".h5": "hdf5", ".hdf5": "hdf5", ".zarr": "zarr"}
_OTHER_ZARR = ("zarr.json", ".zgroup", ".zarray", ".zmetadata")


def open_storage(
    path: str | os.PathLike[str], mode: Literal["append", "read"] = "read", **options: Any
) -> DiskStorage:
    """Open the storage at ``path``, its format told by what is there.

    Args:
        path: where it is.
        mode: ``"read"`` or ``"append"``.
        options: as the storage's class takes them, ``accept_copy`` for one.

    Raises:
        StorageMissing: nothing is there.
        NotAStorage: something else is there.
        FormatVersionMismatch: another version of the format is there.
        CopyOfOpenStorage: it is a copy of one that was open for writing.
        CorruptStorage: it is damaged.
    """
    with translated(Path(path)):
        kind = _class_at(Path(path))
    return kind(path, mode=mode, **options)


def storage_class(path: str | os.PathLike[str], format: str | None = None) -> type[DiskStorage]:
    """The class for a storage that is at ``path``, or will be.

    Args:
        path: where it is. What is there decides; where nothing is, the suffix does
            (``.h5``, ``.hdf5``, ``.zarr``), and without one of these it is memory-mapped.
        format: a key of `FORMATS` that it must be.

    Raises:
        ValueError: no such format, or ``path`` is of another one.
    """
    if format is not None and format not in FORMATS:
        raise ValueError(f"format is one of {', '.join(FORMATS)}, got {format!r}.")
    place = Path(path)
    suffix = _SUFFIXES.get(place.suffix.lower())
    try:
        with translated(place):
            there = _name_at(place)
    except (StorageMissing, NotAStorage):
        there = None
    for found, what in ((there, "holds a storage of format"), (suffix, "has the suffix of")):
        if found is not None and format not in (None, found):
            raise ValueError(
                f"{path} {what} {found}, and the format {format} was asked for. Leave one of them "
                "out, or give another path."
            )
    return FORMATS[there or format or suffix or "memmap"]


def _class_at(place: Path) -> type[DiskStorage]:
    return FORMATS[_name_at(place)]


def _name_at(place: Path) -> str:
    refuse_impossible(place)
    if not place.exists():
        raise StorageMissing(f"{place} does not exist. Give the path of a storage.")
    return _name_of_directory(place) if place.is_dir() else _name_of_file(place)


_MEMMAP_HEADER = "tallyroll.header"


def _name_of_directory(place: Path) -> str:
    ours = place / "tallyroll" / "manifest.json"
    refuse_impossible(ours)
    if not ours.exists() and not (place / "manifest.json").exists():
        refuse_newer_group(place)
        for file in _OTHER_ZARR:
            if (place / file).exists():
                raise NotAStorage(
                    f"{place} is Zarr ({file}), and not a Tallyroll storage: another program wrote "
                    "it, or its creation was interrupted. Open it with zarr-python; if it was to "
                    "be a storage, create it again."
                )
    manifest_path = ours if ours.exists() else place / "manifest.json"
    try:
        manifest = read_manifest(Inside(place), manifest_path)
    except (NotAStorage, CorruptStorage):
        refuse_newer_header(Inside(place), place / _MEMMAP_HEADER)
        raise
    for name, kind in FORMATS.items():
        if kind._format_class.name == manifest["format"]:
            return name
    known = ", ".join(kind._format_class.name for kind in FORMATS.values())
    raise NotAStorage(
        f"{place} is of format {manifest['format']}, and this Tallyroll knows {known}. Use a newer "
        "Tallyroll."
    )


def _name_of_file(place: Path) -> str:
    if is_ours(place):
        return "hdf5"
    refuse_newer_file(place)
    what = "an HDF5 file that another program wrote" if is_hdf5(place) else "a file"
    raise NotAStorage(
        f"{place} is {what}, not a Tallyroll storage. Give the path of a storage."
        + (" h5py opens it." if "HDF5" in what else "")
    )
