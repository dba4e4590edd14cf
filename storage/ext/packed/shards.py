"""Shard files of a Zarr array, in the format of Zarr v3's ``sharding_indexed`` codec.

A shard contains the stored chunks, followed by an index with the offset and size of each chunk and
the CRC-32C of the index. Reads stay within the bounds of the index, and never exceed the maximum
size of a chunk.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

import numpy as np

from tallyroll.storage.errors import CorruptStorage
from tallyroll.storage.ext.packed.codecs import BadChunk, crc32c
from tallyroll.storage.ext.packed.layout import ArrayLayout
from tallyroll.storage.files.paths import failed
from tallyroll.storage.files.safe_files import Inside

_ABSENT: Final = 2**64 - 1
_SUM_NBYTES: Final = 4
_MOST_OPEN: Final = 16


def shard_path(root: Path, layout: ArrayLayout, number: int) -> Path:
    """Return the path of a shard file."""
    name = ".".join(["c", str(number), *("0" for _ in layout.shape)])
    return root.joinpath(*layout.path, name)


def _index_nbytes(layout: ArrayLayout) -> int:
    return layout.shard_rows // layout.chunk_rows * 16 + _SUM_NBYTES


class ChunkWriter(ABC):
    """Base class of writers that split the rows of an array into chunks.

    Args:
        layout: the layout of the array; its number of rows is not known yet.
    """

    def __init__(self, layout: ArrayLayout) -> None:
        self.layout = layout
        self._chunk = np.zeros((layout.chunk_rows, *layout.shape), layout.numpy_dtype)
        self._filled = 0
        self.rows = self.nbytes = 0
        """Rows written and bytes stored so far."""

    def append(self, values: np.ndarray) -> None:
        """Write rows [n, *shape]."""
        done, size = 0, self.layout.chunk_rows
        while done < len(values):
            if not self._filled and len(values) - done >= size:
                self._store(np.ascontiguousarray(values[done : done + size]))
                done += size
                continue
            some = min(size - self._filled, len(values) - done)
            self._chunk[self._filled : self._filled + some] = values[done : done + some]
            self._filled, done = self._filled + some, done + some
            if self._filled == size:
                self._store(self._chunk)
                self._filled = 0
        self.rows += len(values)

    @abstractmethod
    def _store(self, chunk: np.ndarray) -> None:
        """Write a C-contiguous chunk [chunk_rows, *shape]."""

    def finish(self) -> None:
        """Write the remaining rows."""
        if self._filled:
            self._chunk[self._filled :] = 0
            self._store(self._chunk)
            self._filled = 0

    def abandon(self) -> None:  # noqa: B027 - the creator of a file with all arrays closes it
        """Close the file."""


class ShardWriter(ChunkWriter):
    """Writer of an array's rows to shards.

    Args:
        inside: the directory of the storage.
        layout: the layout of the array.
    """

    def __init__(self, inside: Inside, layout: ArrayLayout) -> None:
        super().__init__(layout)
        self._inside = inside
        self._shard = self._at = 0
        self._file: BinaryIO | None = None
        self._entries: list[tuple[int, int]] = []
        inside.make_directory(inside.root.joinpath(*layout.path))

    def _store(self, chunk: np.ndarray) -> None:
        if self._file is None:
            path = shard_path(self._inside.root, self.layout, self._shard)
            self._file = open(self._inside.make(path), "wb", buffering=2**18)  # noqa: SIM115
        stored = self.layout.codec.encode(chunk)
        self._file.write(stored)
        self._entries.append((self._at, len(stored)))
        self._at += len(stored)
        if len(self._entries) == self.layout.shard_rows // self.layout.chunk_rows:
            self._end_shard()

    def _end_shard(self, *, whole: bool = False) -> None:
        """Write the index of the current shard; ``whole`` is True for the last shard."""
        file = self._file
        if file is None:
            return
        layout = self.layout.with_rows(self.rows) if whole else self.layout
        index = np.full((layout.shard_rows // layout.chunk_rows, 2), _ABSENT, "<u8")
        index[: len(self._entries)] = self._entries
        content = index.tobytes()
        file.write(content + crc32c(content).to_bytes(_SUM_NBYTES, "little"))
        self.nbytes += self._at + len(content) + _SUM_NBYTES
        file.close()
        self._file, self._entries, self._at = None, [], 0
        self._shard += 1

    def finish(self) -> None:
        """Write the remaining rows and the last index."""
        super().finish()
        self._end_shard(whole=True)

    def abandon(self) -> None:
        """Close the file."""
        if self._file is not None:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                file.close()


class ShardFiles(Protocol):
    """Byte access to shards, local or remote; `open` returns a handle for the other methods."""

    @property
    def root(self) -> Path:
        """The root directory of all shards."""

    def open(self, path: Path) -> Any:
        """Open a shard; raise OSError on failure."""

    def size(self, file: Any) -> int:
        """Return the size of a shard in bytes."""

    def read(self, file: Any, nbytes: int, begin: int) -> bytes:
        """Read bytes, fewer at the end of the shard. Several threads may call this at once."""

    def will_read(self, file: Any, nbytes: int, begin: int) -> None:
        """Announce that these bytes will be read next."""

    def distrust(self, file: Any, nbytes: int, begin: int) -> bool:
        """Discard cached copies of invalid bytes; return True if reading again may help."""

    def close(self, file: Any) -> None:
        """Close a shard."""


class LocalFiles:
    """Shards in local files."""

    def __init__(self, inside: Inside) -> None:
        self.root, self._inside = inside.root, inside

    def open(self, path: Path) -> int:
        """Open a file and return its descriptor."""
        return self._inside.open(path, os.O_RDONLY)

    def size(self, file: int) -> int:
        """Return the size of a file in bytes."""
        return os.fstat(file).st_size

    def read(self, file: int, nbytes: int, begin: int) -> bytes:
        """Read bytes of a file."""
        return os.pread(file, nbytes, begin)

    def will_read(self, file: int, nbytes: int, begin: int) -> None:
        """Do nothing: the system reads ahead."""

    def distrust(self, file: int, nbytes: int, begin: int) -> bool:
        """Return False: there are no cached copies."""
        return False

    def close(self, file: int) -> None:
        """Close a file."""
        os.close(file)


class ShardChunks:
    """The chunks of an array in its shards; several threads may load chunks at once.

    Args:
        files: the shards.
        layout: the array.
        nbytes: the total size of the files in bytes; None: determine it.

    Raises:
        CorruptStorage: a shard is missing, or too short for its index.
    """

    def __init__(self, files: ShardFiles, layout: ArrayLayout, nbytes: int | None = None) -> None:
        self.layout, self._source = layout, files
        self._files: OrderedDict[int, Any] = OrderedDict()
        self._indices: dict[int, np.ndarray] = {}
        if nbytes is None:
            nbytes = sum(self._nbytes_of(shard) for shard in range(layout.shards))
        self.nbytes = nbytes
        """The total size of the files in bytes."""

    def _path(self, shard: int) -> Path:
        return shard_path(self._source.root, self.layout, shard)

    def _nbytes_of(self, shard: int) -> int:
        with self._translated_errors(shard), self._opened(shard) as file:
            found = self._source.size(file)
        if found < _index_nbytes(self.layout):
            raise CorruptStorage(
                f"{self._path(shard)} was cut short to {found} bytes, which is less than the size "
                f"of its index. It contains {self._rows_of(shard)}. Restore it from a copy."
            )
        return found

    @contextlib.contextmanager
    def _opened(self, shard: int) -> Iterator[Any]:
        file = self._source.open(self._path(shard))
        try:
            yield file
        finally:
            self._source.close(file)

    @contextlib.contextmanager
    def _translated_errors(self, shard: int) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise CorruptStorage(
                f"{self._path(shard)}, with {self._rows_of(shard)}, is missing. Restore it from a "
                "copy."
            ) from error
        except OSError as error:
            raise failed(self._path(shard), error, 0) from error

    def _rows_of(self, shard: int) -> str:
        layout = self.layout
        start = shard * layout.shard_rows
        stop = min(start + layout.shard_rows, layout.rows)
        return f"rows {start:,} to {stop - 1:,} of {'/'.join(layout.path)}"

    def _file(self, shard: int) -> Any:
        if shard in self._files:
            self._files.move_to_end(shard)
            return self._files[shard]
        with self._translated_errors(shard):
            file = self._source.open(self._path(shard))
        self._files[shard] = file
        return file

    def _index(self, shard: int) -> np.ndarray:
        found = self._indices.get(shard)
        if found is None:
            found = self._indices[shard] = self._read_index(shard)
        return found

    def _read_index(self, shard: int) -> np.ndarray:
        layout, nbytes, file = self.layout, _index_nbytes(self.layout), self._file(shard)
        with self._translated_errors(shard):
            begin = self._source.size(file) - nbytes
            content = self._source.read(file, nbytes, begin) if begin >= 0 else b""
            if not _sum_fits(content) and self._source.distrust(file, nbytes, begin):
                content = self._source.read(file, nbytes, begin)
        body = content[:-_SUM_NBYTES]
        if len(content) != nbytes or not _sum_fits(content):
            raise self._damaged(shard, "its index is incomplete or does not match its checksum")
        index = np.frombuffer(body, "<u8").reshape(-1, 2)
        chunks = layout.shard_rows // layout.chunk_rows
        index = index[: min(chunks, layout.chunks - shard * chunks)]
        most = layout.codec.most_stored(layout.chunk_nbytes)
        # Compare the parts before their sum, which could overflow.
        if ((index[:, 0] > begin) | (index[:, 1] > begin) | (index[:, 1] > most)).any() or (
            index.sum(1) > begin
        ).any():
            raise self._damaged(shard, "its index points past the end of the file")
        return index.astype(np.int64)

    def _damaged(self, shard: int, why: str) -> CorruptStorage:
        return CorruptStorage(
            f"{self._path(shard)}, with {self._rows_of(shard)}, is damaged: {why}. Restore it from "
            "a copy."
        )

    def prepared(self, chunk: int) -> tuple[Any, int, int]:
        """Return a file handle, valid until the next `done`, and a chunk's offset and size."""
        chunks = self.layout.shard_rows // self.layout.chunk_rows
        shard, at = divmod(chunk, chunks)
        begin, nbytes = self._index(shard)[at].tolist()
        file = self._file(shard)
        self._source.will_read(file, nbytes, begin)
        return file, begin, nbytes

    def load(self, where: tuple[Any, int, int], chunk: int) -> np.ndarray:
        """Decompress a `prepared` chunk: [chunk_rows, *shape]. Do not modify the result.

        Raises:
            CorruptStorage: the chunk is damaged.
        """
        file, begin, nbytes = where
        shard = chunk * self.layout.chunk_rows // self.layout.shard_rows
        try:
            return self._decoded(where, shard)
        except BadChunk as error:
            if not self._source.distrust(file, nbytes, begin):
                raise damaged_chunk(self._path(shard), self.layout, chunk, error) from error
        try:
            return self._decoded(where, shard)
        except BadChunk as error:
            self._source.distrust(file, nbytes, begin)
            raise damaged_chunk(self._path(shard), self.layout, chunk, error) from error

    def _decoded(self, where: tuple[Any, int, int], shard: int) -> np.ndarray:
        (file, begin, nbytes), layout = where, self.layout
        with self._translated_errors(shard):
            stored = self._source.read(file, nbytes, begin)
        return layout.as_chunk(layout.codec.decode(stored, layout.chunk_nbytes, layout.itemsize))

    def done(self, *, idle: bool = False) -> None:
        """Close the least recently used files above a limit; if ``idle``, close all files."""
        while len(self._files) > (0 if idle else _MOST_OPEN):
            self._source.close(self._files.popitem(last=False)[1])

    def another(self) -> ShardChunks:
        """Return the same chunks with separate file handles."""
        return ShardChunks(self._source, self.layout, self.nbytes)

    def close(self) -> None:
        """Close all files."""
        with contextlib.ExitStack() as exits:
            while self._files:
                exits.callback(self._source.close, self._files.popitem()[1])

    def __del__(self) -> None:
        # The reader was not closed.
        self.close()


def _sum_fits(content: bytes) -> bool:
    body, told = content[:-_SUM_NBYTES], content[-_SUM_NBYTES:]
    return crc32c(body).to_bytes(_SUM_NBYTES, "little") == told


def damaged_chunk(path: Any, layout: ArrayLayout, chunk: int, error: Exception) -> CorruptStorage:
    """Return the error for a damaged chunk, which names the chunk's rows."""
    start = chunk * layout.chunk_rows
    stop = min(start + layout.chunk_rows, layout.rows)
    return CorruptStorage(
        f"{path} is damaged: the chunk with rows {start:,} to {stop - 1:,} of "
        f"{'/'.join(layout.path)} cannot be read ({error}). Rows in other chunks are intact. "
        "Restore the file from a copy."
    )
