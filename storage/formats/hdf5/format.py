"""A contiguous dataset per column, in one HDF5 file with the header in its user block.

::

    NAME.h5                 user block: header and manifest; then HDF5: attributes, datasets
    NAME.h5.lock            held by the writer: a lock on the file itself would stop its readers
    NAME.h5.episodes.npy    the table of episodes
    NAME.h5.tmp             a larger or smaller copy that is being written

An uncompressed contiguous dataset is a run of bytes at an offset of its file. So rows are
written like those of any other file, and h5py is asked for no more than the file's making.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np

from tallyroll.storage.errors import (
    CapacityMissing,
    CorruptStorage,
    InvalidSchema,
    NotAStorage,
    StorageFull,
)
from tallyroll.storage.files.commit_header import HEADER_NBYTES, committed_counts, refuse_newer
from tallyroll.storage.files.manifest import Manifest, parse_manifest
from tallyroll.storage.files.paths import failed, told
from tallyroll.storage.files.safe_files import write_all
from tallyroll.storage.formats.hdf5.datasets import (
    PROVENANCE_NBYTES,
    DatasetOffsets,
    FilePlaces,
    layout_of,
    nbytes_of_file,
    shown_attributes,
)
from tallyroll.storage.formats.hdf5.path_checks import OneFileFormat
from tallyroll.storage.formats.hdf5.replace import (
    aside,
    is_at,
    new_file,
    open_file,
    opened,
    read_rows,
    rewrite,
    show_manifest,
    show_provenance,
    show_rows,
    shows_manifest,
)
from tallyroll.storage.formats.hdf5.user_block import (
    USER_BLOCK_NBYTES,
    has_slots,
    newest_manifest,
)
from tallyroll.storage.formats.mapping import MAP_NORESERVE, Access
from tallyroll.storage.formats.metadata_checks import differs, require_committed
from tallyroll.storage.formats.space import Footprint
from tallyroll.storage.rows.keys import spell
from tallyroll.storage.rows.schema import Schema

__all__ = ["H5Format"]

_LOOKS = 3


class H5Format(OneFileFormat):
    """The file of an `H5Storage`."""

    name: ClassVar[str] = "tallyroll.hdf5"
    grows: ClassVar[bool] = False
    most_dims: ClassVar[int] = 32

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._schema: Schema | None = None
        self._places: FilePlaces | None = None
        self._file = -1
        self._arrays: dict[Access, list[np.ndarray]] = {}

    @property
    def _known(self) -> FilePlaces:
        assert self._places is not None
        return self._places

    @property
    def _layout(self) -> DatasetOffsets:
        return self._known.layout

    def read_manifest(self) -> Manifest:
        """The manifest, which says where the values of attributes lie. Read before `open`."""
        with opened(self.path, os.O_RDONLY) as file:
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
                f"{self.path} has {head} committed rows, and both copies of the manifest in its "
                "user block are damaged, which says what they are. Restore it from a copy."
            )
        if content is None:
            raise NotAStorage(
                f"{self.path} is not a Tallyroll storage yet: its creation was interrupted. Create "
                "it again."
            )
        manifest = parse_manifest(content, self.path)
        self._places = _places_in(manifest, self.path)
        return manifest

    def write_manifest(self, manifest: Manifest, *, durable: bool = False) -> None:
        """Replace the manifest, and the attribute ``provenance``."""
        with contextlib.ExitStack() as exits:
            file = self._file
            if file < 0:
                file = exits.enter_context(opened(self.path, os.O_RDWR))
            try:
                show_manifest(file, manifest, self._known, durable=durable)
                if durable:
                    os.fdatasync(file)
            except OSError as error:
                raise failed(self.path, error, 0) from error

    def check(self, schema: Schema) -> None:
        """Refuse what HDF5 has no dtype or name for."""
        for column in schema.columns:
            if column.dtype_name == "bfloat16":
                raise InvalidSchema(
                    f"column {spell(column.key)} is bfloat16, which HDF5 does not have. Convert it "
                    "to float32 before writing, or use MemmapStorage."
                )

    def footprint(self, schema: Schema, rows: int) -> Footprint:
        """Space that ``rows`` rows take: one file, mapped for writing and for views."""
        nbytes = nbytes_of_file(schema, rows)
        return Footprint(nbytes=nbytes, files=3, largest=nbytes, maps=3)

    def create(self, schema: Schema, header: bytes, capacity: int = 0) -> None:
        """Make the file for ``capacity`` rows, whole, and put it in its place."""
        if not capacity:
            raise CapacityMissing(
                f"{self.path} is HDF5, whose space is reserved when the file is made. Say how many "
                "rows it is for: capacity=..."
            )
        self.discard()
        with new_file(self.path, schema, capacity) as (file, self._places):
            write_all(file, header, 0)

    def fit(self, schema: Schema, capacity: int) -> None:
        """Write a larger file aside where this one holds fewer than ``capacity`` rows.

        Readers that have it open go on seeing the old one.
        """
        if not capacity:
            return
        if capacity > self._checked(schema).capacity:
            with opened(self.path, os.O_RDONLY) as file:
                _, head = committed_counts(os.pread(file, HEADER_NBYTES, 0))
            self._rewrite(schema, head, capacity)

    def finish(self, schema: Schema, rows: int) -> None:
        """Write a file of exactly ``rows`` rows aside, unless this one has as many."""
        if rows != self._checked(schema).capacity:
            self._rewrite(schema, rows, rows)

    def _checked(self, schema: Schema) -> DatasetOffsets:
        with opened(self.path, os.O_RDONLY) as file:
            return self._layout_in(file, schema)

    def _rewrite(self, schema: Schema, rows: int, capacity: int) -> None:
        self._require_capacity(rows)
        rewrite(self.path, schema, self.read_manifest(), self._layout, rows, capacity)

    def _layout_in(self, file: int, schema: Schema) -> DatasetOffsets:
        """The offsets of the datasets, if they are where they were made."""
        # By the descriptor: the path may be another file since the manifest was read.
        if (content := newest_manifest(file)) is not None:
            self._places = _places_in(parse_manifest(content, self.path), self.path)
        layout = layout_of(file, self.path, schema)
        if layout != self._layout:
            raise CorruptStorage(
                f"the datasets in {self.path} do not lie where they were made ({layout!r:.200}, "
                f"made as {self._layout!r:.200}): another program wrote to the file, or it is "
                "damaged. Restore it from a copy."
            )
        return layout

    def open(self, schema: Schema, *, writable: bool) -> None:
        """Open the file, and ask h5py where the datasets lie."""
        try:
            file = open_file(self.path, os.O_RDWR if writable else os.O_RDONLY)
        except OSError as error:
            raise failed(self.path, error, 0) from error
        try:
            self._layout_in(file, schema)
            if writable:
                self._require_attributes(file)
                self._show_manifest_again(file)
                self.inside.remove(aside(self.path))
        except BaseException:
            os.close(file)
            raise
        self._file, self._schema = file, schema

    def _show_manifest_again(self, file: int) -> None:
        """Write the attribute ``provenance`` where a power cut left a part of it."""
        try:
            if not self._shows_manifest(file):
                show_provenance(file, self.read_manifest(), self._known)
        except OSError as error:
            raise failed(self.path, error, 0) from error

    def _shows_manifest(self, file: int) -> bool:
        content = newest_manifest(file)
        if content is None:  # there is none yet
            return True
        return shows_manifest(file, parse_manifest(content, self.path), self._known)

    def _require_attributes(self, file: int) -> None:
        """Another program that changed attributes may have moved ours."""
        places, size = self._known, os.fstat(file).st_size
        for name, place in (("rows", places.rows), ("provenance", places.provenance)):
            if not is_at(file, place) or place.at + PROVENANCE_NBYTES > size:
                raise CorruptStorage(
                    f"the attribute {name} in {self.path} is not where it was: another program "
                    "wrote to the file, or it is damaged. Its rows can be read: copy them to a "
                    "new storage to go on."
                )

    def grow(self, rows: int) -> None:
        """Refuse more rows than the file was made for."""
        if rows > (capacity := self._layout.capacity):
            raise StorageFull(
                f"{self.path} was made for {capacity} rows, and {rows} are wanted. Committed rows "
                f'are intact. Close it, and open it with mode="append" and capacity={rows} or more.'
            )

    @told
    def arrays(self, rows: int, access: Access) -> list[np.ndarray]:
        """Map the file; it holds its capacity from the start."""
        self._require_capacity(rows)
        if access not in self._arrays:
            self._arrays[access] = self._mapped(access)
        return self._arrays[access]

    def _require_capacity(self, rows: int) -> None:
        if rows > self._layout.capacity:
            raise CorruptStorage(
                f"{self.path} says {rows} rows are committed, and holds {self._layout.capacity} at "
                "most. Restore it from a copy."
            )

    def _mapped(self, access: Access) -> list[np.ndarray]:
        assert self._schema is not None
        capacity = self._layout.capacity
        columns = [(column, (capacity, *column.shape)) for column in self._schema.columns]
        if not capacity:
            return [np.empty(shape, column.numpy_dtype) for column, shape in columns]
        try:
            if access == "private":
                flags = mmap.MAP_PRIVATE | MAP_NORESERVE
                area = mmap.mmap(self._file, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            else:
                kind = mmap.ACCESS_WRITE if access == "write" else mmap.ACCESS_READ
                area = mmap.mmap(self._file, 0, access=kind)
            return [
                np.ndarray(shape, column.numpy_dtype, buffer=area, offset=at)
                for (column, shape), at in zip(columns, self._layout.offsets, strict=True)
            ]
        except (ValueError, TypeError) as error:
            raise CorruptStorage(
                f"{self.path} was cut short while it was open ({error}): its {capacity} rows are "
                "not all there. Restore it from a copy."
            ) from error

    @told
    def write(self, column: int, row: int, rows: np.ndarray) -> None:
        """Write through the file, which the map shows at once."""
        nbytes = rows.nbytes // max(1, len(rows))
        content = rows.reshape(-1).view(np.uint8).data
        write_all(self._file, content, self._layout.offsets[column] + row * nbytes)

    def publish(self, rows: int) -> None:
        """Store ``rows`` as the value of the attribute."""
        try:
            show_rows(self._file, rows, self._known)
        except OSError as error:
            raise failed(self.path, error, 8) from error

    def shown_wrongly(self, schema: Schema, head: Callable[[], int]) -> Iterator[str]:
        """Look at the values of attributes that are written again and again."""
        path = self.path
        try:
            with opened(path, os.O_RDONLY) as file:
                places = self._known
                # A writer may be just writing it.
                if is_at(file, places.provenance) and not any(
                    self._shows_manifest(file) for _ in range(_LOOKS)
                ):
                    raise differs(path, "its attribute provenance is not that of the manifest")
                if is_at(file, places.rows):
                    self._require_rows(read_rows(file, places), head())
        except CorruptStorage as error:
            yield str(error)

    def made_wrongly(self, schema: Schema, head: Callable[[], int]) -> Iterator[str]:
        """Look at the other attributes; datasets not in their places cannot be opened."""
        path = self.path
        try:
            with opened(path, os.O_RDONLY) as file:
                attributes = shown_attributes(file, path)
                moved = not is_at(file, self._known.rows)
            if type(rows := attributes.get("rows")) is not int:
                raise differs(path, f"its attribute rows is {rows!r:.100}")
            if moved:  # where no writer of ours reaches it
                self._require_rows(rows, head())
            wanted = {
                "capacity": self._layout.capacity,
                "schema": json.dumps(schema.to_json()),
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

    def trim(self, rows: int) -> None:
        """The file keeps its capacity; `finish` writes it without."""

    @told
    def sync(self, start: int = 0) -> None:
        """Return when the file is on the disk."""
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
            f"the manifest in {path} does not say where rows and attributes lie: it is damaged. "
            "Restore it from a copy."
        ) from error
