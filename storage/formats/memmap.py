"""Memory-mapped format: one file per column, as `tensordict.TensorDict.load_memmap` reads it.

::

    DIR/manifest.json        the manifest; written last when a storage is created
    DIR/tallyroll.header     the number of committed rows, and the record
    DIR/tallyroll.lock       the lock of the writer
    DIR/episodes.npy         the episode table
    DIR/content.leaves       content hashes, if they are kept
    DIR/meta.json            for tensordict, also in each nested directory
    DIR/reward.memmap        the column ("reward",), row after row
    DIR/next/reward.memmap   the column ("next", "reward")
    DIR/observation.frames   the frames of ("observation",), if they are stored once
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tallyroll.storage.errors import CorruptStorage, InvalidSchema
from tallyroll.storage.files.mapping import Access, Area, Region, map_file, pages
from tallyroll.storage.files.paths import failed, open_column, translates_errors
from tallyroll.storage.files.safe_files import close_all, write_all
from tallyroll.storage.formats.base import BESIDE, EVENTS_FILE
from tallyroll.storage.formats.directory import DirectoryFormat
from tallyroll.storage.rows.keys import Key, format_key
from tallyroll.storage.rows.schema import Column, Schema

_HEADER, _LOCK = "tallyroll.header", "tallyroll.lock"
_MANIFEST, _META = "manifest.json", "meta.json"
_ASIDE = ".tmp"
_FRAMES = ".frames"
_WHOLE = {_MANIFEST, _META, *BESIDE, EVENTS_FILE}
_OURS = {_HEADER, _LOCK, *_WHOLE, *(name + _ASIDE for name in _WHOLE)}
_TAKEN = {Path(name): f"the file {name}" for name in sorted(_OURS)}
_LONGEST_NAME = 255
_LOOKS = 100

META_FIELDS = frozenset({"shape", "device", "_type"})
"""Fields of ``meta.json`` besides the names of columns."""

# Characters that tensordict writes as %XX in file names.
_ENCODED = {*map(chr, range(32)), *'/<>:"|?*\\ %', chr(127)}


class MemmapFormat(DirectoryFormat):
    """The files of a `MemmapStorage`."""

    name: ClassVar[str] = "tallyroll.memmap"
    rings: ClassVar[bool] = True
    pools: ClassVar[bool] = True

    _files: tuple[int, ...] = ()
    """Descriptors of the column files, which a writer keeps open."""
    _inodes: list[int] | None = None
    """The inodes of the files that a reader mapped."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.lock_path, self.header_path = path / _LOCK, path / _HEADER
        self.manifest_path = path / _MANIFEST
        self.beside = tuple(path / name for name in BESIDE)
        self.events_path = path / EVENTS_FILE

    def _owns(self, name: Path) -> bool:
        return name.name in _OURS or name.suffix in (".memmap", _FRAMES)

    def check(self, schema: Schema) -> None:
        """Raise for names that collide with files or with fields of tensordict's metadata."""
        super().check(schema)
        taken = dict(_TAKEN)
        for column in schema.columns:
            for depth, part in enumerate(column.key):
                if part in META_FIELDS:
                    raise InvalidSchema(
                        f"{part!r} in column {format_key(column.key)} is a field of tensordict's "
                        "meta.json and cannot be a name there. Rename it."
                    )
                leaf = depth == len(column.key) - 1
                name = _encode(part) + (".memmap" if leaf else "")
                if len(name.encode()) + len(_ASIDE) > _LONGEST_NAME:
                    raise InvalidSchema(
                        f"{part!r} in column {format_key(column.key)} is too long for a file name. "
                        "Give a shorter name."
                    )
                place, owner = (
                    place_of(column.key[: depth + 1], leaf=leaf),
                    format_key(column.key[: depth + 1]),
                )
                if taken.setdefault(place, owner) != owner or place.name in _OURS:
                    raise InvalidSchema(
                        f"column {format_key(column.key)} would be stored at {place}, which is the "
                        f"path of {taken[place]}. Rename it."
                    )

    def _make_columns(self, capacity: int) -> None:
        for column in self.schema.columns:
            file = self._file_of(column)
            self.inside.make_directory(file.parent)
            os.close(self.inside.make(file))

    def open(self, schema: Schema, *, writable: bool) -> None:
        """Open the column files for writing. A reader opens only the directory."""
        self.schema = schema
        if writable:
            self._files = tuple(self._open_all(os.O_RDWR))
            return
        self.inside.hold()
        self._inodes = None

    def _open_all(self, flags: int) -> list[int]:
        first = self._inodes is None
        open_one = partial(open_column, self.inside) if first else self.inside.open
        files: list[int] = []
        try:
            for column in self.schema.columns:
                files.append(open_one(self._file_of(column), flags))
        except BaseException:
            close_all(files)
            raise
        return files

    @contextmanager
    def _opened(self) -> Iterator[Sequence[int]]:
        """Yield descriptors of the column files. A reader opens them for the context only.

        Raises:
            FileNotFoundError: the files have been deleted since they were first mapped.
            CorruptStorage: the files have been replaced.
        """
        if self._files:
            yield self._files
            return
        files = self._open_all(os.O_RDONLY)
        try:
            inodes = [os.fstat(file).st_ino for file in files]
            if self._inodes not in (None, inodes):
                raise CorruptStorage(
                    f"files of {self.path} were replaced while it was open. Open it again."
                )
            self._inodes = inodes
            yield files
        finally:
            close_all(files)

    def _file_of(self, column: Column) -> Path:
        return self.path / place_of(column.key, leaf=True)

    def _pool_path(self, key: Key) -> Path:
        place = place_of(key, leaf=False)
        return self.path / place.with_name(place.name + _FRAMES)

    @translates_errors
    def grow(self, rows: int) -> None:
        """Reserve disk space for ``rows`` rows. Sparse files would cause SIGBUS on a full disk."""
        sizes = [os.fstat(file).st_size for file in self._files]
        try:
            for file, size, column in zip(self._files, sizes, self.schema.columns, strict=True):
                if (wanted := rows * column.row_nbytes) > size:
                    os.posix_fallocate(file, size, wanted - size)
        except OSError as error:
            for file, size in zip(self._files, sizes, strict=True):
                os.ftruncate(file, size)
            row_nbytes = sum(column.row_nbytes for column in self.schema.columns)
            raise failed(self.path, error, rows * row_nbytes - sum(sizes)) from error

    @translates_errors
    def arrays(self, rows: int, access: Access) -> list[np.ndarray]:
        """Map the whole files, which must hold ``rows`` rows."""
        with self._opened() as files:
            for _ in range(_LOOKS):
                room = self._room(files, rows)
                try:
                    return [
                        _map_column(file, column, room, access)
                        for file, column in zip(files, self.schema.columns, strict=True)
                    ]
                except ValueError:
                    # A closing writer trimmed the files to the committed rows meanwhile.
                    continue
        raise CorruptStorage(
            f"another program made the files of {self.path} shorter {_LOOKS} times while they were "
            "being opened. Open the storage when that program has ended."
        )

    def private(self, rows: int, before: Area | None = None) -> Area:
        """Map all files one after the other in one region."""
        with self._opened() as files:
            room = self._room(files, rows)
            sizes = [room * column.row_nbytes for column in self.schema.columns]
            starts = tuple(accumulate(map(pages, sizes), initial=0))
            region = Region(starts[-1], "private")
            for file, size, start in zip(files, sizes, starts, strict=False):
                region.add(file, size, start)
        return Area(region, starts[:-1], room)

    def map_into(self, regions: Sequence[Region | None], rows: int, starts: Sequence[int]) -> None:
        """Map the first ``rows`` rows of each column into its region, at its byte in ``starts``.

        Columns whose region is None are skipped.

        Raises:
            CorruptStorage: the files are shorter.
            OSError: the system refuses.
        """
        with self._opened() as files:
            self._room(files, rows)
            columns = self.schema.columns
            for file, column, region, at in zip(files, columns, regions, starts, strict=True):
                if region is not None:
                    region.add(file, rows * column.row_nbytes, at)

    def _room(self, files: Sequence[int], rows: int) -> int:
        """Return the number of rows that all files hold; raise if it is below ``rows``."""
        sizes = [os.fstat(file).st_size for file in files]
        for column, size in zip(self.schema.columns, sizes, strict=True):
            if size < rows * column.row_nbytes:
                raise CorruptStorage(
                    f"{self._file_of(column)} should have at least {rows * column.row_nbytes} "
                    f"bytes for {rows} committed rows and has {size}: it was cut short. Restore "
                    "it from a copy."
                )
        return min(size // c.row_nbytes for size, c in zip(sizes, self.schema.columns, strict=True))

    @translates_errors
    def write(self, column: int, row: int, rows: np.ndarray) -> None:
        """Write rows through the file. The maps show them at once."""
        file, at = self._files[column], row * self.schema.columns[column].row_nbytes
        write_all(file, rows.reshape(-1).view(np.uint8).data, at)

    def _documents(self, rows: int) -> dict[Path, Any]:
        shown = sorted(meta_of(self.schema, rows).items(), reverse=True)
        return {self.path / directory / _META: meta for directory, meta in shown}

    @translates_errors
    def trim(self, rows: int, kept: int) -> None:
        """Trim the files to ``rows`` rows, or to ``kept`` if that is more."""
        for file, column in zip(self._files, self.schema.columns, strict=True):
            os.ftruncate(file, max(rows, kept) * column.row_nbytes)

    @translates_errors
    def sync(self, start: int = 0) -> None:
        """Wait until every column is on the disk."""
        for file in self._files:
            os.fdatasync(file)

    def close(self) -> None:
        """Close the column files, and the directory."""
        files, self._files = self._files, ()
        self.inside.release()
        close_all(files)


def _map_column(file: int, column: Column, rows: int, access: Access) -> np.ndarray:
    shape = (rows, *column.shape)
    if not rows:
        return np.empty(shape, column.numpy_dtype)
    region = map_file(file, rows * column.row_nbytes, access)
    return region.array(column.numpy_dtype, shape)


def _encode(name: str) -> str:
    """Return a name in tensordict's encoding for file names."""
    return "".join(f"%{ord(char):02X}" if char in _ENCODED else char for char in name)


@lru_cache(maxsize=2**10)
def place_of(key: Key, *, leaf: bool) -> Path:
    """Return the path of a column (``leaf``) or a group of columns, relative to the root."""
    *groups, name = map(_encode, key)
    return Path(*groups, name + ".memmap" if leaf else name)


def meta_of(schema: Schema, rows: int) -> dict[Path, dict[str, Any]]:
    """Return the content of every directory's ``meta.json`` for ``rows`` rows."""
    levels: dict[Path, dict[str, Any]] = {}
    for column in schema.columns:
        for depth, name in enumerate(column.key):
            level = levels.setdefault(Path(*map(_encode, column.key[:depth])), {})
            level[name] = {"type": "TensorDict"}
        level[column.key[-1]] = {
            "device": "cpu",
            "shape": [rows, *column.shape],
            "dtype": str(column.dtype),
            "is_nested": False,
        }
    behind = {Path(*map(_encode, key)): shape for key, shape in schema.batch_shapes.items()}
    end = {"device": "cpu", "_type": "<class 'tensordict._td.TensorDict'>"}
    return {
        directory: level | {"shape": [rows, *behind.get(directory, ())]} | end
        for directory, level in levels.items()
    }
