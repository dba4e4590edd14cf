"""The public storage classes, one for each format, and `open_storage`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from tallyroll.storage.errors import NotAStorage, ReadOnlyStorage, StorageError, StorageMissing
from tallyroll.storage.files.manifest import SHARDED, parse_manifest
from tallyroll.storage.files.paths import (
    is_address,
    is_pattern,
    refuse_impossible,
    refuse_nothing,
    translated,
    user_path,
)
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.formats.by_name import FILES, format_at
from tallyroll.storage.formats.hdf5.format import H5Format
from tallyroll.storage.formats.memmap import MemmapFormat
from tallyroll.storage.formats.zarr.format import ZarrFormat, refuse_newer_group
from tallyroll.storage.readers.file_reader import Mode
from tallyroll.storage.readers.registry import open_by, reader_at
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.replay.disk_storage import DiskStorage
from tallyroll.storage.replay.tensor_storage import AsTensorStorage
from tallyroll.storage.stores.row_writer import ReadOnlyWriter

__all__ = [
    "FORMATS",
    "DiskStorage",
    "H5Storage",
    "MemmapStorage",
    "ZarrStorage",
    "open_storage",
    "storage_class",
]


class MemmapStorage(DiskStorage):
    """Storage in memory-mapped files, one for each column, that grows with the rows.

    See `DiskStorage` for the arguments; ``path`` is a directory.
    `tensordict.TensorDict.load_memmap` can open the directory too, with the rows of the last
    refresh. After a kill in the middle of a refresh, it can do so only once a writer has opened and
    closed the storage again.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tallyroll.storage import MemmapStorage
        >>> with MemmapStorage(max_size=4) as ring:  # without a path it is temporary
        ...     print(ring.extend(TensorDict({"x": torch.arange(3)}, [3])))
        ...     print(ring.extend(TensorDict({"x": torch.arange(3, 6)}, [3])))
        ...     print(len(ring), ring.span, ring.in_order()["x"], ring.get(-1)["x"])
        range(0, 3)
        range(3, 6)
        4 range(2, 6) tensor([2, 3, 4, 5]) tensor(3)
    """

    _format_class = MemmapFormat


class H5Storage(DiskStorage):
    """Storage in the datasets of an HDF5 file, with space for ``capacity`` rows from the start.

    See `DiskStorage` for the arguments. ``path`` is a file, and creation requires ``capacity``. If
    the storage is opened with a larger capacity, a larger file replaces it. h5py can open the file
    at any time: the attribute ``rows`` counts the visible rows that are committed. No other program
    may write to the file.
    """

    _format_class = H5Format


class ZarrStorage(DiskStorage):
    """Storage in a Zarr v3 group, with one uncompressed array for each column.

    See `DiskStorage` for the arguments; ``path`` is a directory. The arrays grow with the rows.
    With ``capacity``, chunks are sized for that many rows, between 256 KiB and 64 MiB. zarr-python,
    TensorStore and xarray can open the group at any time and see the rows of the last refresh. No
    other program may write to it. To them, a column that is stored once (``once=True``) is an
    array of positions.
    """

    _format_class = ZarrFormat


class ReaderStorage(DiskStorage):
    """Read-only storage over a registered reader of another format."""

    def __init__(self, reader: RowReader, mode: Mode, **reopening: Any) -> None:
        if mode != "read":
            reader.close()
            ReadOnlyWriter(reader).refuse()
        AsTensorStorage.__init__(self)
        self.path, self.mode, self.reader, self.writer = (
            reader.path,
            mode,
            reader,
            ReadOnlyWriter(reader),
        )
        self._fit_ring()
        self._reopening = {"path": os.path.abspath(reader.path), **reopening}

    def __reduce__(self) -> tuple[Any, ...]:
        function, (_, state) = super().__reduce__()
        return function, (partial(open_storage, **self._reopening), state)


FORMATS: Mapping[str, type[DiskStorage]] = {
    "memmap": MemmapStorage,
    "hdf5": H5Storage,
    "zarr": ZarrStorage,
}
"""The storage classes by the short names of their formats."""

_OTHER_ZARR = ("zarr.json", ".zgroup", ".zarray", ".zmetadata")


def open_storage(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    mode: Literal["append", "read"] = "read",
    **options: Any,
) -> DiskStorage:
    """Open the storage at ``path``; its files determine the format.

    Several paths, or a pattern such as ``"runs/*"``, are read as one storage. The storages may have
    different formats but must have the same columns. Their rows are numbered one storage after the
    other in the given order; a pattern is expanded in natural order (run-2 before run-10). The
    result has the rows that exist when it is opened. Nothing is written to it.

    A sharded storage, which the workers of a collector with ``sharded=True`` wrote, is read as one
    storage in the same way. It has the rows that were acknowledged when it was opened.

    A packed dataset in an object store is opened by its address, ``s3://bucket/key``, and read by
    ranges. ``s3=S3Options(...)`` configures the access. Credentials come from the environment.

    Args:
        path: the path of the storage, or a list of paths and patterns.
        mode: ``"read"`` or ``"append"``.
        options: further arguments of the storage class, such as ``accept_copy``. Two arguments are
            only for several storages. ``columns`` names the columns to read, which all of the
            storages must have (None: all columns). With ``ids="offset"``, the default, if an
            earlier storage already has some of the trajectory ids of a later one, the ids of the
            later one are moved above all earlier ids (``storage.reader.ids_moved_by`` has the
            offset). ``ids="keep"`` raises instead.

    Raises:
        StorageMissing: nothing exists at the path.
        NotAStorage: something else is at the path, and no installed package has a reader for it
            (an entry point in the group ``tallyroll.readers``).
        FormatVersionMismatch: the storage was written by another version of the format.
        CopyOfOpenStorage: the storage is a copy of one that was open for writing.
        CorruptStorage: the storage is damaged.
        InvalidAddress: an address contains credentials or is malformed.
        ObjectStoreFailed: the object store refuses a request or does not answer in time.
        RowsDoubled: two of several storages are the same, or share a copied row.
        SchemaMismatch: the columns of several storages differ. The message names each difference.
        TrajectoryIdTaken: with ``ids="keep"``, two of several storages share a trajectory id.
        ReadOnlyStorage: several storages were opened with ``mode="append"``.
    """
    if not isinstance(path, str | os.PathLike):
        return cast(DiskStorage, open_by("several", path, mode, options))
    if is_address(path):
        return cast(DiskStorage, open_by("address", path, mode, options))
    place = user_path(path)
    if is_pattern(place):
        return cast(DiskStorage, open_by("several", path, mode, options))
    options.pop("s3", None)
    try:
        with translated(place):
            name = _name_at(place)
        return FORMATS[name](place, mode=mode, **options)
    except NotAStorage:
        if is_sharded(place):
            return cast(DiskStorage, open_by("sharded", place, mode, options))
        if (reader := reader_at(place)) is None:
            raise
    return ReaderStorage(reader, mode)


def is_sharded(path: str | os.PathLike[str]) -> bool:
    """Return True if a sharded storage is at ``path``."""
    root = user_path(path).absolute()
    manifest = root / "manifest.json"
    try:
        content = Inside(root).read(manifest, 2**25)
        return bool(parse_manifest(content, manifest)["format"] == SHARDED)
    except (OSError, StorageError):  # the call that opens the storage raises the error
        return False


def require_reading(path: str, mode: Mode) -> None:
    """Raise `ReadOnlyStorage` unless ``mode`` is ``"read"``, before anything is opened."""
    if mode != "read":
        raise ReadOnlyStorage(
            f'{path} can only be opened with mode="read": nothing writes to it. Write to another '
            "storage."
        )


def storage_class(path: str | os.PathLike[str], format: str | None = None) -> type[DiskStorage]:
    """Return the class for the storage that is at ``path``, or that will be created there.

    Args:
        path: the path of the storage. Existing files determine the class. Otherwise the suffix
            does (``.h5``, ``.hdf5``, ``.zarr``); any other suffix means memory-mapped files.
        format: the required format, a key of `FORMATS`.

    Raises:
        ValueError: the format does not exist, or the storage at ``path`` has another format.
    """
    place = user_path(path)
    try:
        with translated(place):
            there = _name_at(place)
    except (StorageMissing, NotAStorage):
        there = None
    return FORMATS[format_at(place, format, there)]


def _name_at(place: Path) -> str:
    refuse_impossible(place)
    refuse_nothing(place, "Give the path of a storage.")
    if place.is_dir():
        return _name_of_directory(place)
    H5Format(place).refuse_missing()
    return "hdf5"


def _name_of_directory(place: Path) -> str:
    memmap, zarr = MemmapFormat(place), ZarrFormat(place)
    refuse_impossible(zarr.manifest_path)
    if not zarr.exists() and not memmap.exists():
        refuse_newer_group(place)
        for file in _OTHER_ZARR:
            if (place / file).exists():
                raise NotAStorage(
                    f"{place} is Zarr ({file}), but not a Tallyroll storage: another program wrote "
                    "it, or its creation was interrupted. Open it with zarr-python. If it should "
                    "be a storage, create it again."
                )
    manifest = (zarr if zarr.exists() else memmap).read_manifest()
    for name, files in FILES.items():
        if files.name == manifest["format"]:
            return name
    known = ", ".join(files.name for files in FILES.values())
    raise NotAStorage(
        f"{place} has the format {manifest['format']}, but this Tallyroll knows only {known}. Use "
        "a newer Tallyroll."
    )
