"""HDF5 format: a contiguous dataset per column, in one file with the header in its user block.

::

    NAME.h5                 user block: header and manifest; then HDF5: attributes, datasets
    NAME.h5.lock            the lock of the writer; a lock on the file itself would block readers
    NAME.h5.episodes.npy    the episode table
    NAME.h5.content.leaves  content hashes, if they are kept
    NAME.h5.tmp             a larger or smaller copy that is being written

An uncompressed contiguous dataset is a range of bytes of its file. Rows are therefore written as in
any other file, and h5py is needed only to create the file and to locate the datasets.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np

from tallyroll.storage.errors import (
    CapacityMissing,
    CorruptStorage,
    ForeignContent,
    InvalidProvenance,
    MissingLibrary,
    NotAStorage,
    NotWritable,
    PathIsDirectory,
    PathIsTaken,
    StorageFull,
)
from tallyroll.storage.files.commit_header import HEADER_NBYTES, committed_counts
from tallyroll.storage.files.format_versions import refuse_newer_provenance
from tallyroll.storage.files.header_identity import refuse_newer
from tallyroll.storage.files.header_words import with_identity_of
from tallyroll.storage.files.manifest import Manifest, parse_manifest
from tallyroll.storage.files.mapping import Access, Area, map_file
from tallyroll.storage.files.paths import (
    failed,
    free_bytes,
    refuse_impossible,
    require_creatable,
    translated,
    translates_errors,
)
from tallyroll.storage.files.safe_files import Inside, closing, open_file, write_all
from tallyroll.storage.formats.base import BESIDE, EVENTS_FILE, Format
from tallyroll.storage.formats.hdf5.datasets import (
    PROVENANCE_NBYTES,
    DatasetOffsets,
    FilePlaces,
    foreign_names,
    layout_of,
    make_file,
    nbytes_of_file,
    shown_attributes,
)
from tallyroll.storage.formats.hdf5.user_block import (
    MANIFEST_LIMIT,
    USER_BLOCK_NBYTES,
    has_slots,
    is_hdf5,
    is_ours,
    newest_manifest,
    write_manifest,
)
from tallyroll.storage.formats.metadata_checks import differs, require_committed
from tallyroll.storage.formats.space import Footprint
from tallyroll.storage.rows.schema import Schema

_COPY_NBYTES = 2**24


def temporary_path(path: Path) -> Path:
    """Return the path of a new file while it is being written."""
    return path.with_name(path.name + ".tmp")


@contextlib.contextmanager
def new_file(
    path: Path, schema: Schema, capacity: int, like: int | None = None
) -> Iterator[tuple[int, FilePlaces]]:
    """Yield a new open file for ``capacity`` rows, which replaces ``path`` at the end.

    The user block is empty, and the space is reserved. Attributes that other programs added to the
    file ``like`` are copied.

    Raises:
        StorageFull: the disk has no space; nothing was changed.
        UnsupportedPlatform: the file system cannot reserve space; nothing was changed.
    """
    nbytes = nbytes_of_file(schema, capacity)
    new, inside = temporary_path(path), Inside(path.parent)
    try:
        _require_space(path, nbytes)
        # HDF5's own error for a file that is too large is less clear.
        with closing(inside.make(new)) as file:
            os.ftruncate(file, nbytes)
            os.ftruncate(file, 0)
            places = make_file(file, new, schema, capacity, like)
            # A sparse file would cause SIGBUS on a full disk.
            os.posix_fallocate(file, 0, os.fstat(file).st_size)
            places.show_rows(file, 0)
            # Overwrite the random mark, which is not text and could remain after a power cut.
            write_all(file, b" " * PROVENANCE_NBYTES, places.provenance.at)
            yield file, places
            os.fsync(file)
        os.replace(new, path)
        inside.sync_directory(path.parent)
    except OSError as error:
        raise failed(path, error, nbytes) from error
    finally:
        inside.remove(new)


def _require_space(path: Path, nbytes: int) -> None:
    if nbytes > (free := free_bytes(path)):
        beside = (
            f" in addition to the {path.stat().st_size} of the present file"
            if path.exists()
            else ""
        )
        raise StorageFull(
            f"{path} needs {nbytes} more bytes{beside}, and {free} are free. Committed rows are "
            "intact. Free space, or continue in another location."
        )


def rewrite(
    path: Path, schema: Schema, manifest: Manifest, source: DatasetOffsets, rows: int, capacity: int
) -> None:
    """Replace a storage's file with one for ``capacity`` rows, and copy the first ``rows`` rows.

    Args:
        path: the path of the file.
        schema: the schema of the storage.
        manifest: the manifest of the storage.
        source: the offsets of the datasets in the present file.
        rows: the number of rows to copy to the new file.
        capacity: the number of rows for which the new file has space.

    Raises:
        ForeignContent: the file contains objects of another program, which would be lost.
        StorageFull: the disk has no space; nothing was changed.
        UnsupportedPlatform: the file system cannot reserve space; nothing was changed.
    """
    with closing(open_file(path, os.O_RDONLY)) as old:
        if foreign := foreign_names(old, path, schema):
            raise ForeignContent(
                f"{path} must be replaced by a file for {capacity} rows, but contains objects of "
                f"another program: {', '.join(foreign)}. Move them to another file first."
            )
        with new_file(path, schema, capacity, old) as (new, places):
            write_all(new, with_identity_of(new, os.pread(old, HEADER_NBYTES, 0)), 0)
            for column, start, to in zip(
                schema.columns, source.offsets, places.layout.offsets, strict=True
            ):
                _copy(old, start, new, to, rows * column.row_nbytes)
            put_manifest(new, manifest, places)
            places.show_rows(new, rows)


def put_manifest(
    file: int, manifest: Manifest, places: FilePlaces, *, durable: bool = False
) -> None:
    """Write the manifest to the user block, and update the attribute ``provenance``.

    Raises:
        InvalidProvenance: the manifest has more than `MANIFEST_LIMIT` bytes.
    """
    content = json.dumps(manifest | {"places": places.to_json()}).encode()
    if len(content) > MANIFEST_LIMIT:
        raise InvalidProvenance(
            "the manifest of an HDF5 storage, with the provenance of all runs: expected at most "
            f"{MANIFEST_LIMIT} bytes, got {len(content)}. Give less provenance, or use another "
            "format."
        )
    places.show_manifest(file, manifest)
    write_manifest(file, content, durable=durable)  # last, because it makes the file a storage


def _copy(source: int, start: int, target: int, to: int, nbytes: int) -> None:
    # Copy the bytes. If both files shared blocks, a later write could find the disk full.
    while nbytes:
        part = os.pread(source, min(_COPY_NBYTES, nbytes), start)
        if not part:
            raise OSError(errno.EIO, "the file ends before its rows do")
        write_all(target, part, to)
        start, to, nbytes = start + len(part), to + len(part), nbytes - len(part)


_LOOKS = 3


class H5Format(Format):
    """Format of an `H5Storage`: its file, its lock file and the files beside it."""

    name: ClassVar[str] = "tallyroll.hdf5"
    grows: ClassVar[bool] = False
    most_dims: ClassVar[int] = 32
    copies_nbytes: ClassVar[int] = 3 * 2**16
    lacks_bfloat16: ClassVar[str] = "HDF5"

    _places: FilePlaces
    """The places of the rows, from `create` or from the manifest, which is read before `open`."""

    def __init__(self, path: Path) -> None:
        # Resolve links: the file may be replaced, and two names would mean two locks.
        path = Path(os.path.realpath(path))
        super().__init__(path, path.parent)
        self.header_path = self.manifest_path = path
        self.lock_path = path.with_name(path.name + ".lock")
        self.beside = tuple(path.with_name(f"{path.name}.{name}") for name in BESIDE)
        self.events_path = path.with_name(f"{path.name}.{EVENTS_FILE}")
        self._file = -1
        self._arrays: dict[Access, list[np.ndarray]] = {}

    def open_header(self, flags: int) -> int:
        """Return a descriptor of the file."""
        return open_file(self.path, flags)

    def exists(self) -> bool:
        """Return True if the file is ours and contains a manifest."""
        try:
            with closing(open_file(self.path, os.O_RDONLY)) as file:
                return is_ours(self.path) and newest_manifest(file) is not None
        except OSError:
            return False

    def refuse_existing(self) -> None:
        """Raise unless the path is free or holds an unfinished creation."""
        refuse_impossible(self.lock_path)
        if self.path.is_dir():
            raise PathIsDirectory(
                f"{self.path} should be a file, but is a directory. Give the path of a new file."
            )
        if self.path.exists():
            if not is_ours(self.path):
                raise PathIsTaken(
                    f"{self.path} already exists: it is {_what(self.path)}. Give the path of a new "
                    "file."
                )
            self._refuse_storage()
            with contextlib.suppress(NotAStorage):
                self.read_manifest()
        require_creatable(self.path.parent)

    def refuse_missing(self) -> None:
        """Raise unless the file has our user block."""
        super().refuse_missing()
        if self.path.is_dir():
            raise NotAStorage(
                f"{self.path} is a directory, but an HDF5 storage is a file. Give the path of that "
                "file, or use tallyroll.storage.open_storage(path), which opens any format."
            )
        if not os.access(self.path, os.R_OK):
            raise NotWritable(f"{self.path} cannot be read: permission denied.")
        if not is_ours(self.path):
            _refuse_newer(self.path)
            raise NotAStorage(
                f"{self.path} is not a Tallyroll storage: it is {_what(self.path)}. Give the "
                "path of a storage." + (" h5py can open it." if is_hdf5(self.path) else "")
            )

    def discard(self) -> None:
        """Remove an unfinished file, and an unfinished copy."""
        self.inside.remove(temporary_path(self.path))
        self.inside.remove(self.path)

    def replaced_files(self) -> set[Path]:
        """Return the files beside the storage."""
        return {*self.beside, self.events_path}

    @property
    def _layout(self) -> DatasetOffsets:
        return self._places.layout

    def read_manifest(self) -> Manifest:
        """Return the manifest, which records where the values of attributes are."""
        with closing(open_file(self.path, os.O_RDONLY)) as file:
            size, content = os.fstat(file).st_size, newest_manifest(file)
            header, written = os.pread(file, HEADER_NBYTES, 0), has_slots(file)
        _, head = committed_counts(header)
        if size < USER_BLOCK_NBYTES or content is None:
            refuse_newer(header, self.path)
        if size < USER_BLOCK_NBYTES:
            raise CorruptStorage(
                f"{self.path} should have more than {USER_BLOCK_NBYTES} bytes and has {size}: it "
                "was cut short. Restore it from a copy."
            )
        if content is None and (head or written):
            raise CorruptStorage(
                f"{self.path} has {head} committed rows, but the manifest, which describes them, "
                "is damaged in both copies in the user block. Restore it from a copy."
            )
        if content is None:
            raise NotAStorage(
                f"{self.path} is not a Tallyroll storage yet: its creation was interrupted. Create "
                "it again."
            )
        manifest = parse_manifest(content, self.path)
        self._places = _places_in(manifest, self.path)
        return manifest

    @translates_errors
    def write_manifest(self, manifest: Manifest) -> None:
        """Replace the manifest, and the attribute ``provenance``."""
        put_manifest(self._file, manifest, self._places, durable=self.durable)
        if self.durable:
            os.fdatasync(self._file)

    def footprint(self, schema: Schema, rows: int) -> Footprint:
        """Return the space of ``rows`` rows: one file, mapped for writing and for views."""
        nbytes = nbytes_of_file(schema, rows)
        return Footprint(nbytes=nbytes, files=3, largest=nbytes, maps=3)

    def create(self, schema: Schema, header: bytes, capacity: int = 0) -> None:
        """Create the file for ``capacity`` rows and move it to its path when it is complete."""
        if not capacity:
            raise CapacityMissing(
                f"capacity: expected the number of rows to reserve in {self.path}, got None. An "
                "HDF5 file reserves its space when it is created. Pass capacity=..."
            )
        self.discard()
        with new_file(self.path, schema, capacity) as (file, self._places):
            write_all(file, header, 0)

    def fit(self, schema: Schema, capacity: int) -> None:
        """Replace the file with a larger one if it holds fewer than ``capacity`` rows.

        Readers that have the old file open continue to see it.
        """
        if not capacity:
            return
        if capacity > self._checked(schema).capacity:
            with closing(open_file(self.path, os.O_RDONLY)) as file:
                _, head = committed_counts(os.pread(file, HEADER_NBYTES, 0))
            self._rewrite(schema, head, capacity)

    def finish(self, schema: Schema, rows: int) -> None:
        """Replace the file with one of exactly ``rows`` rows, unless its capacity is the same."""
        if rows != self._checked(schema).capacity:
            self._rewrite(schema, rows, rows)

    def _checked(self, schema: Schema) -> DatasetOffsets:
        with closing(open_file(self.path, os.O_RDONLY)) as file:
            return self._layout_in(file, schema)

    def _rewrite(self, schema: Schema, rows: int, capacity: int) -> None:
        self._require_capacity(rows)
        rewrite(self.path, schema, self.read_manifest(), self._layout, rows, capacity)

    def _layout_in(self, file: int, schema: Schema) -> DatasetOffsets:
        """Return the offsets of the datasets, after checking that they have not moved."""
        # Use the descriptor: the path may have become another file after the manifest was read.
        if (content := newest_manifest(file)) is not None:
            self._places = _places_in(parse_manifest(content, self.path), self.path)
        layout = layout_of(file, self.path, schema)
        if layout != self._layout:
            raise CorruptStorage(
                f"the datasets in {self.path} have moved to {layout!r:.200} from "
                f"{self._layout!r:.200}: another program wrote to the file, or it is damaged. "
                "Restore it from a copy."
            )
        return layout

    @translates_errors
    def open(self, schema: Schema, *, writable: bool) -> None:
        """Open the file, and look up the offsets of the datasets with h5py."""
        file = open_file(self.path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            self._layout_in(file, schema)
            if writable:
                self._follow_attributes(file)
                if not self._shows_manifest(file):  # a power cut left a part of it
                    self._places.show_manifest(file, self.read_manifest())
                self.inside.remove(temporary_path(self.path))
        except BaseException:
            os.close(file)
            raise
        self._file, self.schema = file, schema

    def _shows_manifest(self, file: int) -> bool:
        content = newest_manifest(file)
        if content is None:  # the file has no manifest yet
            return True
        return self._places.shows_manifest(file, parse_manifest(content, self.path))

    def _follow_attributes(self, file: int) -> None:
        """Look up our attributes again if another program moved them by adding its own."""
        places = self._places
        if places.rows.is_current(file) and places.provenance.is_current(file):
            return
        manifest = self.read_manifest()
        self._places = self._places.moved(file, self.path)
        put_manifest(file, manifest, self._places, durable=self.durable)

    def grow(self, rows: int) -> None:
        """Raise if ``rows`` exceeds the capacity of the file."""
        if rows > (capacity := self._layout.capacity):
            raise StorageFull(
                f"{self.path} has space for {capacity} rows, but {rows} are needed. Committed rows "
                'are intact. Close the storage, and open it with mode="append" and '
                f"capacity={rows} or more."
            )

    @translates_errors
    def arrays(self, rows: int, access: Access) -> list[np.ndarray]:
        """Map the file, which has its full capacity from the start."""
        self._require_capacity(rows)
        if access not in self._arrays:
            self._arrays[access] = self._mapped(access)
        return self._arrays[access]

    def private(self, rows: int, before: Area | None = None) -> Area:
        """Map the file privately."""
        self._require_capacity(rows)
        layout = self._layout
        try:
            return Area(map_file(self._file, 0, "private"), layout.offsets, layout.capacity)
        except ValueError as error:
            raise self._cut_short(error) from error

    def _require_capacity(self, rows: int) -> None:
        if rows > self._layout.capacity:
            raise CorruptStorage(
                f"{self.path} reports {rows} committed rows, but has space for only "
                f"{self._layout.capacity}. Restore it from a copy."
            )

    def _mapped(self, access: Access) -> list[np.ndarray]:
        capacity = self._layout.capacity
        columns = [(column, (capacity, *column.shape)) for column in self.schema.columns]
        if not capacity:
            return [np.empty(shape, column.numpy_dtype) for column, shape in columns]
        try:
            region = map_file(self._file, 0, access)
            return [
                region.array(column.numpy_dtype, shape, at)
                for (column, shape), at in zip(columns, self._layout.offsets, strict=True)
            ]
        except (ValueError, TypeError) as error:
            raise self._cut_short(error) from error

    def _cut_short(self, error: Exception) -> CorruptStorage:
        return CorruptStorage(
            f"{self.path} was cut short while it was open ({error}): some of its "
            f"{self._layout.capacity} rows are missing. Restore it from a copy."
        )

    @translates_errors
    def write(self, column: int, row: int, rows: np.ndarray) -> None:
        """Write rows through the file. The map shows them at once."""
        nbytes = rows.nbytes // max(1, len(rows))
        content = rows.reshape(-1).view(np.uint8).data
        write_all(self._file, content, self._layout.offsets[column] + row * nbytes)

    def publish(self, rows: int) -> None:
        """Store ``rows`` as the value of the attribute ``rows``."""
        with translated(self.path, 8):
            self._places.show_rows(self._file, rows)

    def shown_wrongly(self, head: Callable[[], int]) -> Iterator[str]:
        """Yield faults in the attributes that writers update repeatedly."""
        path = self.path
        try:
            with closing(open_file(path, os.O_RDONLY)) as file:
                places = self._places
                # Repeat the check, because a writer may be writing the value.
                if places.provenance.is_current(file) and not any(
                    self._shows_manifest(file) for _ in range(_LOOKS)
                ):
                    raise differs(path, "its attribute provenance differs from the manifest")
                if places.rows.is_current(file):
                    self._require_rows(places.rows_shown(file), head())
        except CorruptStorage as error:
            yield str(error)

    def made_wrongly(self, head: Callable[[], int]) -> Iterator[str]:
        """Yield faults in the other attributes. Datasets that have moved already fail in `open`."""
        path = self.path
        try:
            with closing(open_file(path, os.O_RDONLY)) as file:
                attributes = shown_attributes(file, path)
                places = self._places
                moved = not (places.rows.is_current(file) and places.provenance.is_current(file))
                if moved:
                    places.moved(file, path)
            if type(rows := attributes.get("rows")) is not int:
                raise differs(path, f"its attribute rows is {rows!r:.100}")
            if moved:  # `shown_wrongly` does not check the value then
                self._require_rows(rows, head())
            wanted = {
                "capacity": self._layout.capacity,
                "schema": json.dumps(self.schema.to_json()),
            }
            for name, value in wanted.items():
                if attributes.get(name, value) != value:
                    raise differs(path, f"its attribute {name} is {attributes[name]!r:.100}")
        except CorruptStorage as error:
            yield str(error)

    def _require_rows(self, rows: int, head: int) -> None:
        if rows < 0:
            raise differs(self.path, f"its attribute rows is {rows}")
        require_committed(rows, head, self.path)

    def trim(self, rows: int, kept: int) -> None:
        """Do nothing: the file keeps its capacity until `finish` replaces it."""

    @translates_errors
    def sync(self, start: int = 0) -> None:
        """Wait until the file is on the disk."""
        os.fdatasync(self._file)

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, -1
        self._arrays = {}
        if file >= 0:
            os.close(file)


def _places_in(manifest: Manifest, path: Path) -> FilePlaces:
    try:
        return FilePlaces.from_json(manifest.get("places"))
    except ValueError as error:
        raise CorruptStorage(
            f"the manifest in {path} lacks the positions of rows and attributes: it is damaged. "
            "Restore the file from a copy."
        ) from error


def _what(path: Path) -> str:
    if not path.is_file():
        return "not a plain file"
    if not path.stat().st_size:
        return "an empty file"
    return "an HDF5 file of another program" if is_hdf5(path) else "a file of another program"


def _refuse_newer(path: Path) -> None:
    """Raise `FormatVersionMismatch` for an HDF5 file that a later version of Tallyroll wrote."""
    if not is_hdf5(path):
        return
    with (
        contextlib.suppress(OSError, CorruptStorage, MissingLibrary),
        closing(open_file(path, os.O_RDONLY)) as file,
    ):
        refuse_newer_provenance(shown_attributes(file, path).get("provenance"), path)
