"""The storages of users and replay buffers: a class for each format, and `open_storage`."""

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
from tallyroll.storage.stores.row_writer import NoWriter

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
    """Rows in memory-mapped files, one a column, growing as rows come.

    As `DiskStorage`, with ``path`` a directory. `tensordict.TensorDict.load_memmap`
    opens it too, with the rows of the last refresh; after a kill in the middle of a
    refresh only when a writer has opened and closed the storage again.

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
    """Rows in the datasets of an HDF5 file, with space for ``capacity`` rows from the start.

    As `DiskStorage`, with ``path`` a file and ``capacity`` needed to create it; opened with
    a larger one, the file is replaced by a larger one. h5py opens it at any time: the attribute
    ``rows`` says how many of the rows that it shows are committed. Nothing else may
    write to it.
    """

    _format_class = H5Format


class ZarrStorage(DiskStorage):
    """Rows in a Zarr v3 group, one uncompressed array a column, growing as rows come.

    As `DiskStorage`, with ``path`` a directory; with ``capacity`` chunks are chosen for
    that many rows, between 256 KiB and 64 MiB. zarr-python, TensorStore and xarray open it
    at any time and see the rows of the last refresh; nothing else may write to it.
    """

    _format_class = ZarrFormat


class ReaderStorage(DiskStorage):
    """A storage over a registered reader of another format: read, and never written."""

    def __init__(self, reader: RowReader, mode: Mode, **reopening: Any) -> None:
        if mode != "read":
            reader.close()
            NoWriter(reader).refuse()
        AsTensorStorage.__init__(self)
        self.path, self.mode, self.reader, self.writer = reader.path, mode, reader, NoWriter(reader)
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
"""The classes by the short names of their formats."""

_OTHER_ZARR = ("zarr.json", ".zgroup", ".zarray", ".zmetadata")


def open_storage(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    mode: Literal["append", "read"] = "read",
    **options: Any,
) -> DiskStorage:
    """Open the storage at ``path``; its files decide the format.

    Of several paths, or of a pattern such as ``"runs/*"``, the storages are read as one, in any
    formats: their rows are numbered one storage after the other in the order given, those of a
    pattern in natural order (run-2 before run-10). It has the rows that are there when it is
    opened. Their columns must be the same. Nothing is written to it.

    A sharded storage, which the workers of a collector with ``sharded=True`` wrote, is read as one
    likewise: it has the rows that counted when it is opened.

    A packed dataset in an object store is opened by its address, ``s3://bucket/key``, and read by
    ranges: ``s3=S3Options(...)`` says how. Credentials are those of the environment.

    Args:
        path: the path of the storage, or a list of paths and patterns.
        mode: ``"read"`` or ``"append"``.
        options: further arguments of the storage's class, such as ``accept_copy``. Of several:
            ``columns``, those that are wanted, which all must have (None: all columns), and
            ``ids``. ``ids="offset"`` moves the trajectory ids of a storage of which an earlier one
            has some to above all of these (``storage.reader.ids_moved_by`` says by how much);
            ``ids="keep"`` refuses that.

    Raises:
        StorageMissing: nothing is there.
        NotAStorage: something else is there, and no installed package has a reader for it (an
            entry point in the group ``tallyroll.readers``).
        FormatVersionMismatch: another version of the format is there.
        CopyOfOpenStorage: the storage is a copy of one that was open for writing.
        CorruptStorage: the storage is damaged.
        InvalidAddress: an address has credentials in it, or cannot be one.
        ObjectStoreFailed: the store refuses, or does not answer in time.
        RowsDoubled: of several: two are the same storage, or have a row in common that was copied.
        SchemaMismatch: of several: their columns differ. Each difference is named.
        TrajectoryIdTaken: of several, with ``ids="keep"``: two have a trajectory id.
        ReadOnlyStorage: of several, with ``mode="append"``.
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
    except (OSError, StorageError):  # the call that opens it raises them
        return False


def require_reading(path: str, mode: Mode) -> None:
    """Raise `ReadOnlyStorage` before anything is opened that is read only."""
    if mode != "read":
        raise ReadOnlyStorage(
            f"{path} is opened to be read, and nothing writes to it here. Write to another storage."
        )


def storage_class(path: str | os.PathLike[str], format: str | None = None) -> type[DiskStorage]:
    """Return the class for a storage that is at ``path``, or will be.

    Args:
        path: where it is. What is there decides; where nothing is, the suffix does
            (``.h5``, ``.hdf5``, ``.zarr``), and without one of these it is memory-mapped.
        format: a key of `FORMATS` that it must be.

    Raises:
        ValueError: no such format, or ``path`` is of another one.
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
    if not zarr.stands() and not memmap.stands():
        refuse_newer_group(place)
        for file in _OTHER_ZARR:
            if (place / file).exists():
                raise NotAStorage(
                    f"{place} is Zarr ({file}), and not a Tallyroll storage: another program wrote "
                    "it, or its creation was interrupted. Open it with zarr-python; if it was to "
                    "be a storage, create it again."
                )
    manifest = (zarr if zarr.stands() else memmap).read_manifest()
    for name, files in FILES.items():
        if files.name == manifest["format"]:
            return name
    known = ", ".join(files.name for files in FILES.values())
    raise NotAStorage(
        f"{place} is of format {manifest['format']}, and this Tallyroll knows {known}. Use a newer "
        "Tallyroll."
    )
