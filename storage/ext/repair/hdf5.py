"""Read truncated HDF5 files and files of killed writers, and find the readable rows."""

from __future__ import annotations

import errno
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final

import numpy as np

from tallyroll.storage.engine.available_memory import require_memory
from tallyroll.storage.errors import InvalidDataset
from tallyroll.storage.ext.dataset_checks.checker import DatasetFolder
from tallyroll.storage.ext.dataset_checks.disk import Ranges, ReadOnlyFile, touches
from tallyroll.storage.ext.dataset_checks.hdf5 import room_of
from tallyroll.storage.ext.dataset_checks.superblock import declared_end
from tallyroll.storage.ext.exchange.export_rows import BLOCK_NBYTES
from tallyroll.storage.ext.exchange.hdf5_files import DAMAGE
from tallyroll.storage.ext.repair.losses import Losses
from tallyroll.storage.formats.hdf5.datasets import h5py_module

_WORDS: Final = 16
"""The memory in bytes per row that it takes to find the readable rows."""


class PaddedFile(ReadOnlyFile):
    """A file padded to the size in its superblock, with known missing parts.

    HDF5 rejects a file that is shorter than the size in its superblock. It ignores the flags that a
    killed writer left if Python reads the file on behalf of HDF5. A read of missing bytes fails,
    because zeros in metadata could have another meaning. Nothing is written.
    """

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        size = raw.seek(0, 2)
        super().__init__(max(size, declared_end(raw) or 0))
        self.gaps: Ranges = [*getattr(raw, "gaps", []), (size, self._size)]
        """The ranges of missing bytes."""
        self.room = room_of(raw)
        """The total number of bytes that the file's datasets may claim."""

    def has(self, start: int, nbytes: int) -> bool:
        """Return True if no byte of a range is missing."""
        return start + nbytes <= self._size and not touches(self.gaps, start, start + nbytes)

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer; raise OSError (EIO) if a byte is missing."""
        view = memoryview(buffer).cast("B")
        if not self.has(self._at, len(view)):
            raise OSError(errno.EIO, "a part of the file is missing")
        self._raw.seek(self._at)
        found = self._raw.readinto(view) or 0
        self._at += found
        return int(found)


@contextmanager
def opened_damaged(folder: DatasetFolder, name: str) -> Iterator[tuple[Any, PaddedFile]]:
    """Yield an HDF5 file that may be damaged, and the padded file through which HDF5 reads it.

    Raises:
        InvalidDataset: HDF5 cannot open the file.
    """
    raw, place = folder.opened(name), folder.root / name
    if raw is None:
        raise InvalidDataset(f"{place} cannot be repaired: it is missing, or a link.")
    with raw:
        try:
            padded = PaddedFile(raw)
            file = _opened(padded)
        except (*DAMAGE, OverflowError) as error:
            raise InvalidDataset(
                f"{place} cannot be repaired: HDF5 cannot open it ({error!s:.200}). "
                "Files of a writer that flushes after each episode can be repaired."
            ) from error
        with file:
            yield file, padded


def _opened(padded: PaddedFile) -> Any:
    """Open a file so that HDF5 reads no more bytes than requested."""
    h5py = h5py_module()
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    access.set_sieve_buf_size(0)
    _, slots, _, preemption = access.get_cache()
    access.set_cache(0, slots, 2**24, preemption)
    access.set_fileobj_driver(h5py.h5fd.fileobj_driver, padded)
    return h5py.File(h5py.h5f.open(b"damaged", h5py.h5f.ACC_RDONLY, fapl=access))


def readable_rows(data: Any, there: PaddedFile) -> np.ndarray:
    """Return a mask of the readable rows [n] of a dataset.

    Raises:
        NotEnoughMemory: the dataset claims too many rows, or has chunks that are too large.
    """
    rows = data.shape[0]
    row = max(1, math.prod(data.shape[1:]) * data.dtype.itemsize)
    step = data.chunks[0] if data.chunks else max(1, BLOCK_NBYTES // row)
    instead = "Nothing was written."
    require_memory(_WORDS * rows, f"the {rows:,} rows that the file claims to have", instead)
    require_memory(step * row, f"a chunk of {step:,} rows", instead)
    try:
        good = _stored(data, there)
    except DAMAGE:
        return np.zeros(rows, bool)
    for begin, end in runs(good):
        for start in range(begin, end, step):
            stop = min(start + step, end)
            try:
                data[start:stop]
            except DAMAGE:
                good[start:stop] = False
    return good


def _stored(data: Any, there: PaddedFile) -> np.ndarray:
    """Return a mask of the rows whose bytes are in the file."""
    h5py = h5py_module()
    rows = data.shape[0]
    good = np.zeros(rows, bool)
    layout = data.id.get_create_plist().get_layout()
    if layout == h5py.h5d.COMPACT:
        good[:] = True
    elif layout == h5py.h5d.CONTIGUOUS:
        offset = data.id.get_offset()
        row = max(1, math.prod(data.shape[1:]) * data.dtype.itemsize)
        if offset is not None:
            good[:] = True
            for start, stop in there.gaps:
                first = max(0, (start - offset) // row)
                good[first : max(first, -(-(stop - offset) // row))] = False
    elif layout == h5py.h5d.CHUNKED:
        shape, chunk = data.shape, data.chunks
        wanted = math.prod(-(-n // c) for n, c in zip(shape[1:], chunk[1:], strict=True))
        counts = np.zeros(-(-rows // chunk[0]), np.int64)

        def count(info: Any) -> None:
            number = info.chunk_offset[0] // chunk[0]
            if there.has(info.byte_offset, info.size) and number < len(counts):
                counts[number] += 1

        data.id.chunk_iter(count)
        good = np.repeat(counts >= wanted, chunk[0])[:rows]
    return good


def runs(good: np.ndarray) -> list[tuple[int, int]]:
    """Return the runs of True in a mask [n] as pairs of start and stop (exclusive)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], good, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def cut_after(pieces: Iterable[tuple[int, int]], last: np.ndarray) -> list[tuple[int, int]]:
    """Split runs of rows after each row for which ``last`` [n] is True."""
    found = list[tuple[int, int]]()
    for start, stop in pieces:
        ends = (np.flatnonzero(last[start : stop - 1]) + start + 1).tolist()
        found += pairwise([start, *ends, stop])
    return found


def lose_gaps(
    losses: Losses, good: np.ndarray, message: str, file: str, episode: int | None = None
) -> None:
    """Report the rows that are False in the mask ``good`` [n]."""
    for start, stop in runs(~good):
        losses.add(message, stop - start, file=file, episode=episode, row=start)
