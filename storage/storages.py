"""The storages of users and replay buffers: a class for each format, and `open_storage`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tallyroll.storage.datasets.joined.members import PathLike, expanded, is_pattern
from tallyroll.storage.datasets.joined.union import MemberIds, UnionReader
from tallyroll.storage.datasets.remote.address import reopened_as, s3_path
from tallyroll.storage.datasets.remote.options import S3Options
from tallyroll.storage.datasets.sharded.files import ShardedFiles
from tallyroll.storage.datasets.sharded.reader import ShardedReader
from tallyroll.storage.datasets.sharded.sink import ShardedWriter
from tallyroll.storage.errors import NotAStorage, ReadOnlyStorage, StorageMissing
from tallyroll.storage.files.paths import refuse_impossible, refuse_nothing, translated, user_path
from tallyroll.storage.formats.by_name import FILES, format_at
from tallyroll.storage.formats.hdf5.format import H5Format
from tallyroll.storage.formats.memmap import MemmapFormat
from tallyroll.storage.formats.zarr.format import ZarrFormat, refuse_newer_group
from tallyroll.storage.readers.file_reader import Mode
from tallyroll.storage.readers.registry import reader_at
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.replay.disk_storage import DiskStorage
from tallyroll.storage.replay.tensor_storage import AsTensorStorage
from tallyroll.storage.rows.keys import Keys
from tallyroll.storage.stores.row_writer import NoWriter

__all__ = [
    "FORMATS",
    "DiskStorage",
    "H5Storage",
    "MemmapStorage",
    "ShardedStorage",
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


class _ReaderStorage(DiskStorage):
    """A storage over a registered reader of another format: read, and never written."""

    def __init__(self, reader: RowReader, mode: Mode, **reopening: Any) -> None:
        if mode != "read":
            reader.close()
            NoWriter(reader).refuse()
        AsTensorStorage.__init__(self)
        self.path, self.mode, self.reader, self.writer = reader.path, mode, reader, NoWriter(reader)
        self._fit_ring()
        self._reopening = {"path": reopened_as(reader.path), **reopening}

    def __reduce__(self) -> tuple[Any, ...]:
        function, (_, state) = super().__reduce__()
        return function, (partial(open_storage, **self._reopening), state)


class UnionStorage(_ReaderStorage):
    """Several storages as one, to read: see `open_storage`."""

    reader: UnionReader

    def reopen_by(self, places: Sequence[Path], **options: Any) -> None:
        """Be pickled as these paths, with the rows that are there now."""
        spans = [each.span for each in self.reader.members]
        paths = [reopened_as(each) for each in places]
        self._reopening = {"path": paths, "spans": spans, **options}


class ShardedStorage(DiskStorage):
    """A storage of which workers write the rows, each to a shard of its own: see `open_storage`.

    A collector with ``sharded=True`` makes it of a path. It takes a run, and no rows; they are
    read by `open_storage`.

    Args:
        path: a directory.
        mode: ``"create"`` or ``"append"``.

    Raises:
        StorageExists, DirectoryNotEmpty, StorageMissing, NotAStorage: something else is there, or
            nothing.
        StorageLocked: another process writes its run.
    """

    writer: ShardedWriter

    def __init__(
        self, path: str | os.PathLike[str], *, mode: Literal["create", "append"] = "create"
    ) -> None:
        AsTensorStorage.__init__(self)
        self.path, self.mode = user_path(path), mode
        self.writer = ShardedWriter(self.path.absolute(), mode)
        self.reader = self.writer.reader
        self._reopening = {"path": str(self.path.absolute())}

    def reserve(self, rows: int) -> None:
        """Do nothing: workers reserve space where they are."""

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that count."""
        return self.head * self.schema.row_nbytes if self.head else 0


FORMATS: Mapping[str, type[DiskStorage]] = {
    "memmap": MemmapStorage,
    "hdf5": H5Storage,
    "zarr": ZarrStorage,
}
"""The classes by the short names of their formats."""

_OTHER_ZARR = ("zarr.json", ".zgroup", ".zarray", ".zmetadata")


def open_storage(
    path: PathLike | Sequence[PathLike],
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
        return _union(path, mode, **options)
    address = s3_path(path)
    if address is None and is_pattern(user_path(path)):
        return _union(path, mode, **options)
    s3: S3Options | None = options.pop("s3", None)
    if address is not None:
        # Imported now, since it is rarely wanted.
        from tallyroll.storage.datasets.remote.remote_archive import opened

        _require_reading(str(address), mode)
        return _ReaderStorage(opened(address, s3 or S3Options()), mode, s3=s3)
    place = user_path(path)
    try:
        with translated(place):
            name = _name_at(place)
        return FORMATS[name](place, mode=mode, **options)
    except NotAStorage:
        if is_sharded(place):
            return _sharded(ShardedFiles(place.absolute()), place, mode, **options)
        if (reader := reader_at(place)) is None:
            raise
    return _ReaderStorage(reader, mode)


def _sharded(
    files: ShardedFiles, path: Path, mode: Mode, *, accept_copy: bool = False
) -> UnionStorage:
    reader = ShardedReader(files, path, accept_copy=accept_copy)
    try:
        found = UnionStorage(reader, mode)
    except BaseException:
        reader.close()
        raise
    # As these shards with these rows: when it is opened again, more may count.
    found.reopen_by([each.path for each in reader.members], accept_copy=accept_copy)
    return found


def _union(
    path: PathLike | Sequence[PathLike],
    mode: Mode,
    *,
    columns: Keys | None = None,
    ids: MemberIds = "offset",
    spans: Sequence[range] | None = None,
    **options: Any,
) -> UnionStorage:
    places = expanded(path)
    given = [path] if isinstance(path, str | os.PathLike) else path
    _require_reading(", ".join(map(str, given)), mode)
    with ExitStack() as stack:
        members = [stack.enter_context(open_storage(place, **options)) for place in places]
        reader = UnionReader(
            [each.reader for each in members],
            Path(", ".join(str(each) for each in given)),
            columns=columns,
            ids=ids,
            spans=spans,
            owners=members,
        )
        found = UnionStorage(reader, mode)
        if ids == "keep":
            _ = reader.ids_moved_by
        stack.pop_all()
    found.reopen_by(places, columns=columns, ids=ids, **options)
    return found


def is_sharded(path: str | os.PathLike[str]) -> bool:
    """Return whether a sharded storage is at ``path``."""
    return ShardedFiles.stand_at(user_path(path).absolute())


def _require_reading(path: str, mode: Mode) -> None:
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
