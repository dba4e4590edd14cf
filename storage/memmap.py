"""A file per column, as `tensordict.TensorDict.load_memmap` reads them, in one directory.

::

    DIR/manifest.json        what it is; written last when a storage is created
    DIR/tallyroll.header     rows committed, and the record
    DIR/tallyroll.lock       held by the writer
    DIR/meta.json            for tensordict, in each nested directory too
    DIR/reward.memmap        the column ("reward",), row after row
    DIR/next/reward.memmap   the column ("next", "reward")
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np

from .base import DiskStorage
from .commit import HEADER_NBYTES, committed_counts
from .errors import (
    CorruptStorage,
    DirectoryNotEmpty,
    InvalidSchema,
    NotAStorage,
    NotWritable,
    PathIsFile,
    StorageExists,
    StorageFull,
    StorageMissing,
    UnsupportedPlatform,
)
from .format import Access, Format
from .layout import META_FIELDS, encode, meta_of, place_of
from .manifest import sync_directory, write_aside
from .rows import spell
from .schema import Column, Schema

__all__ = ["MemmapFormat", "MemmapStorage"]

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
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# Not named by Python 3.11. Without it Linux counts a private map against free memory.
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0


class MemmapFormat(Format):
    """The files of a `MemmapStorage`."""

    name: ClassVar[str] = "tallyroll.memmap"
    rings: ClassVar[bool] = True

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

    def refuse_existing(self) -> None:
        """Accept a path where nothing is, an empty directory, or an unfinished creation."""
        self._refuse_impossible()
        if self.manifest_path.exists():
            raise StorageExists(
                f'{self.path} holds a storage already. Open it with mode="append" to add rows to '
                "it, or give another path."
            )
        self._refuse_lost_manifest()
        if not self.path.is_dir():
            self._require_creatable()
        elif not os.access(self.path, os.W_OK | os.X_OK):
            raise NotWritable(f"{self.path} cannot be written to. Give a path that can.")
        elif foreign := self._foreign():
            raise DirectoryNotEmpty(
                f"{self.path} is not empty: it holds {foreign}. A new storage needs a directory "
                "of its own; give another path."
            )

    def _refuse_lost_manifest(self) -> None:
        """An unfinished creation has committed nothing; anything else is somebody's data."""
        try:
            with open(self.header_path, "rb") as header:
                reserve, head = committed_counts(header.read(HEADER_NBYTES))
        except OSError:
            return
        if reserve or head:
            raise CorruptStorage(
                f"{self.path} has {head} committed rows and no {_MANIFEST}, which says what they "
                "are. Restore it from a copy; or delete the directory, and give it again."
            )

    def _refuse_impossible(self) -> None:
        try:
            self.manifest_path.exists()
        except OSError as error:
            raise NotWritable(
                f"{self.path} cannot be the path of a storage: {error.strerror}. Give another path."
            ) from error

    def _require_creatable(self) -> None:
        for place in (self.path, *self.path.parents):
            if place.is_dir():
                if not os.access(place, os.W_OK | os.X_OK):
                    raise NotWritable(
                        f"{self.path} cannot be created: {place} cannot be written to. Give a "
                        "path that can."
                    )
                return
            if place.is_symlink() and not place.exists():
                raise PathIsFile(
                    f"{self.path} should be a directory, and {place} is a link to nothing. Give "
                    "another path."
                )
            if place.exists():
                raise PathIsFile(
                    f"{self.path} should be a directory, and {place} is a file. Give another path."
                )

    def _foreign(self) -> str | None:
        if not any(self.path.iterdir()):
            return None
        files = [file for file in self.path.rglob("*") if file.is_symlink() or not file.is_dir()]
        foreign = [f for f in files if f.name not in _OURS and f.suffix != ".memmap"]
        # The lock comes first: without it these files are not from a creation of ours.
        if self.lock_path.exists() and not foreign:
            return None
        return (foreign[0] if foreign else next(self.path.iterdir())).name

    def refuse_missing(self) -> None:
        """Accept a directory."""
        self._refuse_impossible()
        if not self.path.exists():
            raise StorageMissing(
                f'{self.path} does not exist. Give the path of a storage, or use mode="create".'
            )
        if not self.path.is_dir():
            raise NotAStorage(
                f"{self.path} is a file, and this storage is a directory. Give its path."
            )

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

    def prepare(self) -> None:
        """Make the directory."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NotWritable(
                f"{self.path} cannot be created: {error.strerror}. Give another path."
            ) from error

    def create(self, schema: Schema, header: bytes, capacity: int = 0) -> None:
        """Make empty column files, tensordict's metadata, and the header."""
        self.discard()
        self._columns = schema.columns
        try:
            for column in schema.columns:
                file = self._file_of(column)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch()
            self.publish(0)
            with open(self.header_path, "wb", buffering=0) as target:
                os.posix_fallocate(target.fileno(), 0, len(header))
                target.write(header)
                os.fsync(target.fileno())
        except OSError as error:
            raise self._failed(error, len(header)) from error
        for directory in {self.path, *(self._file_of(c).parent for c in schema.columns)}:
            sync_directory(directory)

    def discard(self) -> None:
        """Remove files of an unfinished creation, and directories that it leaves empty."""
        for place in sorted(self.path.rglob("*"), reverse=True):
            if place == self.lock_path:
                continue
            if place.is_dir() and not place.is_symlink():
                if not any(place.iterdir()):
                    place.rmdir()
            elif place.name in _OURS or place.suffix == ".memmap":
                place.unlink()

    def open(self, schema: Schema, *, writable: bool) -> None:
        """Open the column files."""
        self._columns = schema.columns
        files: list[int] = []
        try:
            for column in schema.columns:
                files.append(self._open_file(self._file_of(column), writable))
        except BaseException:
            for file in files:
                os.close(file)
            raise
        self._files = tuple(files)

    def _open_file(self, path: Path, writable: bool) -> int:
        # Not through links: a storage's rows lie inside its directory.
        try:
            return os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW)
        except FileNotFoundError as error:
            raise CorruptStorage(
                f"{path} is missing, which the manifest says is a column. Restore it from a copy."
            ) from error
        except PermissionError as error:
            raise NotWritable(
                f"{path} cannot be opened: permission denied. Open the storage as a user who may."
            ) from error
        except OSError as error:
            raise CorruptStorage(
                f"{path} is not a plain file of rows ({error.strerror}). Restore it from a copy."
            ) from error

    def _file_of(self, column: Column) -> Path:
        return self.path / place_of(column.key, leaf=True)

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
            raise self._failed(error, rows * row_nbytes - sum(sizes)) from error

    def _failed(self, error: OSError, nbytes: int) -> StorageFull | UnsupportedPlatform | OSError:
        if error.errno in _FULL:
            place = os.statvfs(self.path)
            return StorageFull(
                f"{self.path} needs {nbytes} more bytes, and {place.f_bavail * place.f_frsize} are "
                f"free ({error.strerror}). Committed rows are intact. Free space, or go on in "
                "another place."
            )
        if error.errno in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENODEV}:
            return UnsupportedPlatform(
                f"the file system of {self.path} cannot reserve or map space "
                f"({error.strerror}). Use a local file system."
            )
        return error

    def arrays(self, rows: int, access: Access) -> list[np.ndarray]:
        """Map what all files hold; they must hold ``rows`` rows."""
        sizes = [os.fstat(file).st_size for file in self._files]
        for column, size in zip(self._columns, sizes, strict=True):
            if size < rows * column.row_nbytes:
                raise CorruptStorage(
                    f"{self._file_of(column)} should have at least {rows * column.row_nbytes} "
                    f"bytes for {rows} committed rows and has {size}: it was cut short. Restore "
                    "it from a copy."
                )
        room = min(size // c.row_nbytes for size, c in zip(sizes, self._columns, strict=True))
        try:
            return [
                _map_column(file, column, room, access)
                for file, column in zip(self._files, self._columns, strict=True)
            ]
        except OSError as error:
            raise self._failed(error, 0) from error

    def write(self, column: int, row: int, rows: np.ndarray) -> None:
        """Write through the file, which the maps show at once."""
        file, at = self._files[column], row * self._columns[column].row_nbytes
        rest = rows.reshape(-1).view(np.uint8).data
        while len(rest):
            written = os.pwrite(file, rest, at)
            rest, at = rest[written:], at + written

    def publish(self, rows: int) -> None:
        """Write tensordict's metadata for ``rows`` rows, the root last."""
        try:
            for directory, meta in sorted(meta_of(self._columns, rows).items(), reverse=True):
                write_aside(self.path / directory / _META, meta)
        except OSError as error:
            raise self._failed(error, 4096) from error

    def trim(self, rows: int) -> None:
        """Cut the files to ``rows`` rows."""
        for file, column in zip(self._files, self._columns, strict=True):
            os.ftruncate(file, rows * column.row_nbytes)

    def sync(self) -> None:
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
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
        area = mmap.mmap(file, nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    else:
        kind = mmap.ACCESS_WRITE if access == "write" else mmap.ACCESS_READ
        area = mmap.mmap(file, nbytes, access=kind)
    return np.ndarray(shape, column.numpy_dtype, buffer=area)


class MemmapStorage(DiskStorage):
    """Rows in memory-mapped files, one a column, growing as rows come.

    As `DiskStorage`, with ``path`` a directory. `tensordict.TensorDict.load_memmap`
    opens it too, with the rows of the last refresh.
    """

    _format_class = MemmapFormat
