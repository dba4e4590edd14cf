"""Packed rows in an HDF5 file: chunked datasets with HDF5's shuffle and gzip filters.

The user block at the front identifies the file and contains a copy of the metadata that HDF5 stores
later in the file; see `front`. The manifest is a dataset of bytes, ``tallyroll/manifest``. This
module decompresses the stored chunks itself, which bounds the memory that a damaged chunk can take.
The checksum of a chunk is the Adler-32 of its zlib stream.
"""

from __future__ import annotations

import copy
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from tallyroll.storage.errors import CorruptStorage
from tallyroll.storage.ext.packed import front
from tallyroll.storage.ext.packed.codecs import BadChunk, inflate
from tallyroll.storage.ext.packed.layout import FORMAT_HDF5, ArrayLayout, Layout
from tallyroll.storage.ext.packed.shards import ChunkWriter, damaged_chunk
from tallyroll.storage.files.manifest import MANIFEST_LIMIT, Manifest, parse_manifest, sealed
from tallyroll.storage.files.paths import translated
from tallyroll.storage.files.safe_files import open_any
from tallyroll.storage.formats.hdf5.datasets import DAMAGE, h5py_module
from tallyroll.storage.formats.hdf5.guarded_file import GuardedFile, new_hdf5

_MANIFEST: Final = "tallyroll/manifest"


def is_packed(path: Path) -> bool:
    """Return True if a file begins with the signature that this module writes."""
    if not path.is_file():
        return False
    with translated(path), open(open_any(path, os.O_RDONLY | os.O_CLOEXEC), "rb") as file:
        return file.read(len(front.MAGIC)) == front.MAGIC


def opened(path: Path) -> Any:
    """Open the file for reading.

    Raises:
        MissingLibrary: h5py is not installed.
        CorruptStorage: the file cannot be opened.
    """
    h5py = h5py_module()
    with _reading(path, "the file"):
        return h5py.File(path, "r", rdcc_nbytes=0)


@contextmanager
def _reading(path: Path, what: str) -> Iterator[None]:
    """Convert h5py's errors for damaged metadata to `CorruptStorage`."""
    try:
        yield
    except DAMAGE as error:
        raise _damaged(path, f"HDF5 cannot read {what} ({error})") from error


def _damaged(path: Path, why: str) -> CorruptStorage:
    return CorruptStorage(
        f"{path} is damaged: {why!s:.500}. Restore it from a copy, or save its rows with "
        "`tallyroll repair`."
    )


def _dataset(file: Any, path: Path, name: str) -> Any:
    """Return a dataset of this file; reject links and external data."""
    h5py = h5py_module()
    with _reading(path, name):
        found = file
        for part in name.split("/"):
            if not isinstance(found.get(part, getlink=True), h5py.HardLink):
                raise _damaged(path, f"{name} is missing, or is a link")
            found = found[part]
        if not isinstance(found, h5py.Dataset) or found.is_virtual or found.external:
            raise _damaged(path, f"{name} is not a dataset of this file")
        return found


def stored_manifest(file: Any, path: Path) -> Manifest:
    """Return the manifest.

    Raises the errors of `parse_manifest`.
    """
    data = _dataset(file, path, _MANIFEST)
    with _reading(path, _MANIFEST):
        plain = data.dtype == np.uint8 and data.ndim == 1 and data.chunks is None
        if not plain or not 0 < data.shape[0] <= min(MANIFEST_LIMIT, data.id.get_storage_size()):
            raise _damaged(path, f"{_MANIFEST} is not a text of 1 to {MANIFEST_LIMIT} bytes")
        content = data[()].tobytes()
    found = parse_manifest(content, path)
    if found["format"] != FORMAT_HDF5:
        raise _damaged(path, f"its manifest has the unexpected format {found['format']!r:.80}")
    return found


class DatasetChunks:
    """The chunks of a dataset.

    Raises:
        CorruptStorage: the dataset does not match the array's layout.
    """

    def __init__(self, file: Any, path: Path, layout: ArrayLayout) -> None:
        self.layout, self._path = layout, path
        name = "/".join(layout.path)
        self._data = data = _dataset(file, path, name)
        self._shuffled = layout.numpy_dtype.itemsize > 1
        wanted = ((layout.rows, *layout.shape), layout.numpy_dtype, "gzip", self._shuffled)
        with _reading(path, name):
            found = (data.shape, data.dtype, data.compression, data.shuffle)
            others = data.fletcher32 or data.scaleoffset is not None
            if found != wanted or others or data.chunks != (layout.chunk_rows, *layout.shape):
                raise _damaged(path, f"{name} does not match the manifest")
            if data.id.get_num_chunks() != layout.chunks:
                raise _damaged(path, f"{name} does not have all {layout.chunks:,} chunks")
            self.nbytes: int = data.id.get_storage_size()

    def prepared(self, chunk: int) -> tuple[int, bytes]:
        """Return a chunk's mask of skipped filters, and its stored bytes."""
        layout = self.layout
        place = (chunk * layout.chunk_rows, *(0 for _ in layout.shape))
        try:
            info = self._data.id.get_chunk_info_by_coord(place)
            if info.byte_offset is None or info.size > _most_stored(layout.chunk_nbytes):
                raise BadChunk("it is missing, or is larger than a chunk can be")
            mask, stored = self._data.id.read_direct_chunk(place)
        except (BadChunk, *DAMAGE) as error:
            raise self._bad(chunk, error) from error
        return mask, stored

    def load(self, where: tuple[int, bytes], chunk: int) -> np.ndarray:
        """Decompress a chunk; raise CorruptStorage if it is damaged."""
        (mask, stored), layout = where, self.layout
        try:
            return layout.as_chunk(
                inflate(stored, mask, self._shuffled, layout.chunk_nbytes, layout.itemsize)
            )
        except BadChunk as error:
            raise self._bad(chunk, error) from error

    def _bad(self, chunk: int, error: Exception) -> CorruptStorage:
        return damaged_chunk(self._path, self.layout, chunk, error)

    def done(self, *, idle: bool = False) -> None:
        """Do nothing: the file stays open."""

    def another(self) -> DatasetChunks:
        """Return a shallow copy: the library serializes access anyway."""
        return copy.copy(self)

    def close(self) -> None:
        """Release the dataset. The owner of the file closes it."""
        self._data = None


def _most_stored(nbytes: int) -> int:
    return nbytes + nbytes // 1000 + 1024


class DatasetWriter(ChunkWriter):
    """Writer of an array's rows to a dataset, one block after the other."""

    def __init__(self, file: Any, guard: GuardedFile, layout: ArrayLayout) -> None:
        super().__init__(layout)
        self._guard = guard
        self._shuffled = layout.numpy_dtype.itemsize > 1
        self._data = file.create_dataset(
            "/".join(layout.path),
            shape=(0, *layout.shape),
            maxshape=(None, *layout.shape),
            chunks=(layout.chunk_rows, *layout.shape),
            dtype=layout.numpy_dtype,
            compression="gzip",
            compression_opts=layout.codec.level,
            shuffle=self._shuffled,
        )
        self._chunks = 0

    def _store(self, chunk: np.ndarray) -> None:
        body = chunk.tobytes()
        if self._shuffled:
            parts = np.frombuffer(body, np.uint8).reshape(-1, chunk.itemsize)
            body = np.ascontiguousarray(parts.T).tobytes()
        stored = zlib.compress(body, self.layout.codec.level)
        size, start = self.layout.chunk_rows, self._chunks * self.layout.chunk_rows
        if start + size > len(self._data):
            # Grow geometrically, since a resize takes longer than writing a chunk.
            self._data.resize(size * max(16, 2 * self._chunks), axis=0)
        self._data.id.write_direct_chunk((start, *(0 for _ in self.layout.shape)), stored)
        self._guard.check()
        self._chunks += 1
        self.nbytes += len(stored)

    def finish(self) -> None:
        """Write the remaining rows."""
        super().finish()
        self._data.resize(self.rows, axis=0)


def new_file(path: Path, room: int) -> AbstractContextManager[tuple[Any, GuardedFile]]:
    """Create a file with a user block of ``room`` bytes; see `new_hdf5`."""
    return new_hdf5(path, userblock_size=room, libver="v110")


def finish_file(file: Any, manifest: Manifest, layout: Layout) -> bytes:
    """Write the manifest, and return the content of the user block for `write_front`.

    Raises:
        ValueError: the manifest is too large.
    """
    content = json.dumps(sealed(manifest)).encode()
    if len(content) > MANIFEST_LIMIT:
        raise ValueError(f"manifest: expected at most {MANIFEST_LIMIT} bytes, got {len(content)}.")
    file.create_dataset(_MANIFEST, data=np.frombuffer(content, np.uint8))
    file.attrs["about"] = "packed by Tallyroll: tallyroll/manifest says how its rows are packed"
    copied = _copy(file, content, layout)
    return copied if len(copied) <= file.userblock_size else front.MAGIC


def write_front(path: Path, content: bytes) -> None:
    """Write the user block of a closed file, and flush the file to the disk."""
    with open(path, "r+b") as target:
        target.write(content)
        target.flush()
        os.fsync(target.fileno())


def _copy(file: Any, manifest: bytes, layout: Layout) -> bytes:
    """Return a copy of the metadata that HDF5 stores later in the file, for the front."""
    late = {place for each in layout.states for place in (each.breaks, each.starts)}
    places, tables = [], {}
    for number, array in enumerate(layout.arrays):
        data = file["/".join(array.path)].id
        found = [data.get_chunk_info(chunk) for chunk in range(array.chunks)]
        # Sort by row, since the library does not guarantee an order.
        found.sort(key=lambda each: each.chunk_offset[0])
        places.append(([each.byte_offset for each in found], [each.size for each in found]))
        if number in late:
            tables[number] = [data.read_direct_chunk(each.chunk_offset)[1] for each in found]
    return front.serialize(manifest, places, tables)


class FrontChunks:
    """The chunks of an array, located by the copy at the front of the file.

    Args:
        read: a function that returns bytes of the file, given their count and offset.
        path: the file, for messages.
        layout: the array.
        places: the offsets and sizes of the chunks in bytes.
        kept: the stored chunks in the copy itself; empty unless the array was written last.
    """

    def __init__(
        self,
        read: Callable[[int, int], bytes],
        path: Path,
        layout: ArrayLayout,
        places: tuple[np.ndarray, np.ndarray],
        kept: Sequence[bytes],
    ) -> None:
        self.layout, self._read, self._path = layout, read, path
        self._starts, self._sizes = places
        self._kept = kept
        if not len(self._starts) == len(self._sizes) == layout.chunks:
            raise _damaged(path, f"its front does not locate all chunks of {'/'.join(layout.path)}")
        self.nbytes = int(self._sizes.sum())

    def prepared(self, chunk: int) -> bytes:
        """Return the stored bytes of a chunk."""
        start, nbytes = int(self._starts[chunk]), int(self._sizes[chunk])
        if chunk < len(self._kept):
            return self._kept[chunk]
        if not 0 <= nbytes <= _most_stored(self.layout.chunk_nbytes) or start < 0:
            raise damaged_chunk(
                self._path, self.layout, chunk, BadChunk("its offset or size is invalid")
            )
        try:
            return self._read(nbytes, start)
        except OSError as error:
            raise damaged_chunk(self._path, self.layout, chunk, error) from error

    def load(self, where: bytes, chunk: int) -> np.ndarray:
        """Decompress a chunk; raise CorruptStorage if it is damaged."""
        layout = self.layout
        shuffled = layout.numpy_dtype.itemsize > 1
        try:
            return layout.as_chunk(
                inflate(where, 0, shuffled, layout.chunk_nbytes, layout.itemsize)
            )
        except BadChunk as error:
            raise damaged_chunk(self._path, layout, chunk, error) from error

    def done(self, *, idle: bool = False) -> None:
        """Do nothing: the file stays open."""

    def another(self) -> FrontChunks:
        """Return a shallow copy, which reads the same file."""
        return copy.copy(self)

    def close(self) -> None:
        """Do nothing: the owner of the file closes it."""
