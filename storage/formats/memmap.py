"""A file per column, as `tensordict.TensorDict.load_memmap` reads them, in one directory.

::

    DIR/manifest.json        what it is; written last when a storage is created
    DIR/tallyroll.header     rows committed, and the record
    DIR/tallyroll.lock       held by the writer
    DIR/episodes.npy         the table of episodes
    DIR/meta.json            for tensordict, in each nested directory too
    DIR/reward.memmap        the column ("reward",), row after row
    DIR/next/reward.memmap   the column ("next", "reward")
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np

from tallyroll.storage.errors import CorruptStorage, InvalidSchema
from tallyroll.storage.files.paths import failed, opened, told
from tallyroll.storage.files.safe_files import write_all
from tallyroll.storage.formats.directory import DirectoryFormat
from tallyroll.storage.formats.mapping import MAP_NORESERVE, Access
from tallyroll.storage.formats.metadata_checks import wrong_documents
from tallyroll.storage.formats.tensordict_layout import META_FIELDS, encode, meta_of, place_of
from tallyroll.storage.rows.keys import spell
from tallyroll.storage.rows.schema import Column, Schema

__all__ = ["MemmapFormat"]

_MANIFEST, _HEADER, _LOCK, _META, _EPISODES = (
    "manifest.json",
    "tallyroll.header",
    "tallyroll.lock",
    "meta.json",
    "episodes.npy",
)
_ASIDE = ".tmp"
_WHOLE = {_MANIFEST, _META, _EPISODES}
_OURS = {_HEADER, _LOCK, *_WHOLE, *(name + _ASIDE for name in _WHOLE)}
_LONGEST_NAME = 255
_LOOKS = 100


class MemmapFormat(DirectoryFormat):
    """The files of a `MemmapStorage`."""

    name: ClassVar[str] = "tallyroll.memmap"
    rings: ClassVar[bool] = True

    _schema: Schema | None = None
    _columns: tuple[Column, ...] = ()
    _files: tuple[int, ...] = ()

    @property
    def lock_path(self) -> Path:
        """The writer's lock file."""
        return self.path / _LOCK

    @property
    def header_path(self) -> Path:
        """The header's file."""
        return self.path / _HEADER

    @property
    def manifest_path(self) -> Path:
        """The manifest."""
        return self.path / _MANIFEST

    @property
    def episodes_path(self) -> Path:
        """The table of episodes."""
        return self.path / _EPISODES

    def _owns(self, name: Path) -> bool:
        return name.name in _OURS or name.suffix == ".memmap"

    def check(self, schema: Schema) -> None:
        """Refuse names that collide with files or with fields of tensordict's metadata."""
        taken = {Path(name): f"the file {name}" for name in sorted(_OURS)}
        for column in schema.columns:
            for depth, part in enumerate(column.key):
                if part in META_FIELDS:
                    raise InvalidSchema(
                        f"{part!r} in column {spell(column.key)} is a field of tensordict's "
                        "meta.json and cannot be a name there. Rename it."
                    )
                leaf = depth == len(column.key) - 1
                name = encode(part) + (".memmap" if leaf else "")
                if len(name.encode()) + len(_ASIDE) > _LONGEST_NAME:
                    raise InvalidSchema(
                        f"{part!r} in column {spell(column.key)} is too long for a file name."
                    )
                place, owner = (
                    place_of(column.key[: depth + 1], leaf=leaf),
                    spell(column.key[: depth + 1]),
                )
                if taken.setdefault(place, owner) != owner or place.name in _OURS:
                    raise InvalidSchema(
                        f"column {spell(column.key)} would lie at {place}, where "
                        f"{taken[place]} is. Rename it."
                    )

    def create(self, schema: Schema, header: bytes, capacity: int = 0) -> None:
        """Make empty column files, tensordict's metadata, and the header."""
        self.discard()
        self._schema, self._columns = schema, schema.columns
        try:
            for column in schema.columns:
                file = self._file_of(column)
                self.inside.make_directory(file.parent)
                os.close(self.inside.make(file))
        except OSError as error:
            raise failed(self.path, error, len(header)) from error
        self.publish(0)
        self._write_header(header)
        self._sync_directories({self._file_of(column).parent for column in schema.columns})

    def open(self, schema: Schema, *, writable: bool) -> None:
        """Open the column files."""
        self._schema, self._columns = schema, schema.columns
        flags = os.O_RDWR if writable else os.O_RDONLY
        files: list[int] = []
        try:
            for column in schema.columns:
                files.append(opened(self.inside, self._file_of(column), flags, what="a column"))
        except BaseException:
            for file in files:
                os.close(file)
            raise
        self._files = tuple(files)

    def _file_of(self, column: Column) -> Path:
        return self.path / place_of(column.key, leaf=True)

    @told
    def grow(self, rows: int) -> None:
        """Reserve disk space for ``rows`` rows in all: a sparse file would kill us when full."""
        sizes = [os.fstat(file).st_size for file in self._files]
        try:
            for file, size, column in zip(self._files, sizes, self._columns, strict=True):
                if (wanted := rows * column.row_nbytes) > size:
                    os.posix_fallocate(file, size, wanted - size)
        except OSError as error:
            for file, size in zip(self._files, sizes, strict=True):
                os.ftruncate(file, size)
            row_nbytes = sum(column.row_nbytes for column in self._columns)
            raise failed(self.path, error, rows * row_nbytes - sum(sizes)) from error

    @told
    def arrays(self, rows: int, access: Access) -> list[np.ndarray]:
        """Map what all files hold; they must hold ``rows`` rows."""
        for _ in range(_LOOKS):
            room = self._room(rows)
            try:
                return [
                    _map_column(file, column, room, access)
                    for file, column in zip(self._files, self._columns, strict=True)
                ]
            except ValueError:
                # A writer that closes cut the files to the committed rows meanwhile.
                continue
        raise CorruptStorage(
            f"the files of {self.path} were cut shorter {_LOOKS} times while they were opened, so "
            "that something else than a writer does that. Open the storage when it has ended."
        )

    def _room(self, rows: int) -> int:
        """Number of rows that all files hold, at least ``rows``."""
        sizes = [os.fstat(file).st_size for file in self._files]
        for column, size in zip(self._columns, sizes, strict=True):
            if size < rows * column.row_nbytes:
                raise CorruptStorage(
                    f"{self._file_of(column)} should have at least {rows * column.row_nbytes} "
                    f"bytes for {rows} committed rows and has {size}: it was cut short. Restore "
                    "it from a copy."
                )
        return min(size // c.row_nbytes for size, c in zip(sizes, self._columns, strict=True))

    @told
    def write(self, column: int, row: int, rows: np.ndarray) -> None:
        """Write through the file, which the maps show at once."""
        file, at = self._files[column], row * self._columns[column].row_nbytes
        write_all(file, rows.reshape(-1).view(np.uint8).data, at)

    def publish(self, rows: int) -> None:
        """Write tensordict's metadata for ``rows`` rows, the root last."""
        assert self._schema is not None
        try:
            for directory, meta in sorted(meta_of(self._schema, rows).items(), reverse=True):
                content = json.dumps(meta).encode()
                place = self.path / directory / _META
                self.inside.write_aside(place, content, synced=self.durable)
        except OSError as error:
            raise failed(self.path, error, 4096) from error

    def _documents(self) -> set[Path]:
        assert self._schema is not None
        shown = {self.path / directory / _META for directory in meta_of(self._schema, 0)}
        return {self.manifest_path, self.episodes_path, *shown}

    def shown_wrongly(self, schema: Schema, head: Callable[[], int]) -> Iterator[str]:
        """Compare tensordict's metadata with what it should be."""
        return wrong_documents(
            self.inside,
            lambda rows: {
                self.path / directory / _META: meta
                for directory, meta in meta_of(schema, rows).items()
            },
            head,
        )

    @told
    def trim(self, rows: int) -> None:
        """Cut the files to ``rows`` rows."""
        for file, column in zip(self._files, self._columns, strict=True):
            os.ftruncate(file, rows * column.row_nbytes)

    @told
    def sync(self, start: int = 0) -> None:
        """Return when every column is on the disk."""
        for file in self._files:
            os.fdatasync(file)

    def close(self) -> None:
        """Close the column files."""
        files, self._files = self._files, ()
        for file in files:
            os.close(file)


def _map_column(file: int, column: Column, rows: int, access: Access) -> np.ndarray:
    shape = (rows, *column.shape)
    if not rows:
        return np.empty(shape, column.numpy_dtype)
    nbytes = rows * column.row_nbytes
    if access == "private":
        flags = mmap.MAP_PRIVATE | MAP_NORESERVE
        area = mmap.mmap(file, nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    else:
        kind = mmap.ACCESS_WRITE if access == "write" else mmap.ACCESS_READ
        area = mmap.mmap(file, nbytes, access=kind)
    return np.ndarray(shape, column.numpy_dtype, buffer=area)
