"""Frame pools of an open storage: their mapped files, and the writers that fill them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch

from tallyroll.storage.engine.available_memory import available_bytes, is_small_allocation
from tallyroll.storage.engine.columns import ArrayRows
from tallyroll.storage.engine.frame_pool import FrameWriter, read_frames
from tallyroll.storage.engine.once_columns import OnceColumn
from tallyroll.storage.engine.ring import pieces
from tallyroll.storage.errors import CorruptStorage, NotEnoughMemory
from tallyroll.storage.files.mapping import Access, map_file
from tallyroll.storage.files.paths import failed, translates_errors
from tallyroll.storage.formats.base import Format
from tallyroll.storage.rows.deferred_tensor import DeferredTensor
from tallyroll.storage.rows.keys import LANE, Key, format_key
from tallyroll.storage.rows.row_refs import RowRefs
from tallyroll.storage.rows.schema import Schema


class PoolFile:
    """The mapped file of a frame pool.

    Args:
        format: the open files of the storage.
        once: the column whose frames are in the pool.
        access: the access mode of the map.
    """

    def __init__(self, format: Format, once: OnceColumn, access: Access) -> None:
        self.path, self._access = format.path, access
        self.once, self.layout = once, once.layout
        self._file = format.open_pool(once.key, os.O_RDWR if access == "write" else os.O_RDONLY)
        self.memory = np.empty(0, np.uint8)
        """The mapped bytes, up to the end of the last whole segment."""
        self.remap()

    def follow(self) -> None:
        """In a forked child, become a reader: the parent process continues to write."""
        self._access = "read"

    def remap(self) -> np.ndarray:
        """Map all whole segments of the file, which may have grown. Return their bytes."""
        if self._file < 0:  # closed, but a deferred tensor still reads the map
            return self.memory
        segments = self.layout.segments_in(os.fstat(self._file).st_size)
        nbytes = self.layout.nbytes_of(segments)
        if segments and nbytes > len(self.memory):
            region = map_file(self._file, nbytes, self._access)
            self.memory = region.array(np.dtype(np.uint8), (nbytes,))
        return self.memory

    @translates_errors
    def grow(self, segments: int) -> np.ndarray:
        """Enlarge the file to ``segments`` segments, with reserved disk space. Return all bytes.

        Raises:
            StorageFull: the disk has no space. The file keeps its size.
        """
        size, wanted = os.fstat(self._file).st_size, self.layout.nbytes_of(segments)
        try:
            if wanted > size:
                os.posix_fallocate(self._file, size, wanted - size)
        except OSError as error:
            os.ftruncate(self._file, size)
            raise failed(self.path, error, wanted - size) from error
        return self.remap()

    def read(self, positions: np.ndarray, *outs: np.ndarray, defined: bool = True) -> None:
        """Copy the frames at ``positions`` [*, frames] to one or two arrays [*, ...], ``outs``.

        If ``outs`` has two arrays, the first gets the first frames of each row, and the second the
        others.
        If ``defined`` is False, invalid positions do not raise: their rows get undefined values.

        Raises:
            CorruptStorage: a position is not in the pool.
        """
        layout = self.layout
        try:
            read_frames(layout, self.memory, positions, *outs)
        except IndexError:
            segments = layout.segments_in(len(self.remap()))
            beyond = (positions < 0) | (positions >= segments * layout.segment_frames)
            if beyond.any():
                if defined or not segments:
                    raise CorruptStorage(
                        f"{self.path}: column {format_key(self.once.key)} names frames that are "
                        f"not in its pool of {segments} segments. Restore the storage from a copy."
                    ) from None
                positions = np.where(beyond, 0, positions)
            read_frames(layout, self.memory, positions, *outs)

    def sync(self) -> None:
        """Wait until the frames are on the disk."""
        os.fdatasync(self._file)

    def close(self) -> None:
        """Close the file. Arrays that were read stay valid."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Frames and size of one frame pool; see `DiskStorage.pool_usage`."""

    key: Key
    """Key of the observation whose frames are in the pool."""
    stack: int
    """Number of frames of a value; 1 if the value is one frame."""
    delta: bool
    """True if frames are stored as differences from the frame before."""
    frames: int
    """Number of frames that the valid rows need, each counted once."""
    used_nbytes: int
    """Bytes of the segments that contain these frames."""
    nbytes: int
    """Bytes of the file, including free segments."""


def summed(usages: Iterable[PoolUsage]) -> list[PoolUsage]:
    """Add up the use of the pools of several storages that have the same key and layout."""
    found: dict[tuple[Key, int, bool], PoolUsage] = {}
    for each in usages:
        layout = each.key, each.stack, each.delta
        before = found.get(layout, PoolUsage(*layout, 0, 0, 0))
        found[layout] = PoolUsage(
            *layout,
            before.frames + each.frames,
            before.used_nbytes + each.used_nbytes,
            before.nbytes + each.nbytes,
        )
    return [*found.values()]


@dataclass(frozen=True, slots=True)
class StoredSize:
    """Disk space of a storage's rows; see `RowReader.stored_size`."""

    once: tuple[Key, ...]
    """The observations whose frames are stored once."""
    row_nbytes: int
    """Bytes a row."""
    measured: bool
    """True if ``row_nbytes`` was measured on the valid rows.

    False if it is an estimate: a row that adds one frame to each pool, none smaller as differences.
    """
    ring_nbytes: int | None
    """Bytes of a full ring; None if the storage keeps every row."""


class FramePools:
    """The frame pools of an open storage, which replace frames by their positions.

    The files do not record which segments are free. A writer derives it from the positions of the
    valid rows before its first append, and again after a rewind or a failed append.

    Args:
        format: the open files of the storage.
        schema: the schema of the rows.
        once: the columns that are stored once.
        writable: True if the caller writes frames.
    """

    def __init__(
        self, format: Format, schema: Schema, once: Sequence[OnceColumn], *, writable: bool
    ) -> None:
        keys = schema.keys
        self._lane = keys.index(LANE) if LANE in keys else None
        self._fresh = False
        """True if the writers know the free segments and the newest frames of each lane."""
        self.of_place: dict[int, PoolFile] = {}
        """The pool of each column that is stored once, by the position of the column in a row."""
        self._writers: list[tuple[int, int, PoolFile, FrameWriter]] = []
        self._files: list[PoolFile] = []
        self._columns = schema.columns
        with ExitStack() as undo:
            for each in once:
                file = PoolFile(format, each, "write" if writable else "read")
                undo.callback(file.close)
                self._files.append(file)
                begin, end = keys.index(each.key), keys.index(each.next_key)
                self.of_place[begin] = self.of_place[end] = file
                if writable:
                    writer = FrameWriter(each.layout, file.memory, file.grow)
                    self._writers.append((begin, end, file, writer))
            undo.pop_all()

    def follow(self) -> None:
        """In a forked child, become a reader: the parent process continues to write."""
        for file in self._files:
            file.follow()

    # --- writing ----------------------------------------------------------------------------------

    def forget(self) -> None:
        """Make the next append derive the free segments from the valid rows again."""
        self._fresh = False

    def placed(
        self, rows: ArrayRows, start: int, oldest: int, columns: Sequence[np.ndarray], ring: int
    ) -> ArrayRows:
        """Write the frames of rows to the pools. Return rows with positions instead of frames.

        Call this after `reserve` is stored, and before the commit.

        Args:
            rows: the rows.
            start: the number of the first row, which is also the number of committed rows.
            oldest: the oldest row that stays valid.
            columns: the mapped columns, indexed by slot.
            ring: the number of slots of the ring, or 0.

        Raises:
            StorageFull: the disk has no space, or a pool has 2**31 frames. The rows that were to be
                overwritten are no longer valid.
        """
        if not self._fresh:
            self._resume(columns, range(oldest, start), ring)
        self._fresh = False  # until all frames are placed
        values, lanes = list(rows.values), self._lanes_of(rows)
        for begin, end, file, writer in self._writers:
            kept = [_contiguous(values[begin]), _contiguous(values[end])]
            begins, ends = map(_addresses, kept)
            positions = writer.append(lanes, begins, ends, start, oldest)
            n = file.layout.stack
            values[begin], values[end] = positions[:, :n], positions[:, n:]
        self._fresh = True
        return ArrayRows(values)

    def _lanes_of(self, rows: ArrayRows) -> np.ndarray:
        if self._lane is None:
            return np.zeros(rows.count, np.int64)
        return np.asarray(rows.values[self._lane], np.int64).reshape(rows.count, -1)[:, 0]

    def _resume(self, columns: Sequence[np.ndarray], valid: range, ring: int) -> None:
        valid = range(valid.start, max(valid.start, valid.stop))
        numbers = np.arange(valid.start, valid.stop, dtype=np.int64)
        for begin, end, file, writer in self._writers:
            both = [_rows_of(columns[place], valid, ring) for place in (begin, end)]
            writer.resume(np.concatenate(both, axis=1), numbers, file.remap())

    def sync(self) -> None:
        """Wait until all frames are on the disk."""
        for file in self._files:
            file.sync()

    # --- reading ----------------------------------------------------------------------------------

    def empty_for(self, count: int, places: Sequence[int]) -> list[np.ndarray]:
        """Return new arrays [count, ...] for the values of columns that are stored once.

        Raises:
            NotEnoughMemory: the values would take more than half of the available memory.
        """
        columns = [self._columns[place] for place in places]
        nbytes = count * sum(column.row_nbytes for column in columns)
        if not is_small_allocation(nbytes) and 2 * nbytes > (available := available_bytes()):
            raise NotEnoughMemory(
                f"expected at most half of the {available // 2**20:,} MiB of available memory, but "
                f"a copy of these {count:,} rows, whose frames are stored once, takes "
                f"{nbytes // 2**20:,} MiB. Read fewer rows or columns with get(index, keys)."
            )
        return [np.empty((count, *each.shape), each.numpy_dtype) for each in columns]

    def decoded(
        self, columns: Sequence[np.ndarray], slots: slice, places: Sequence[int]
    ) -> dict[int, np.ndarray]:
        """Return the values in slots of the mapped columns, by the position of the column.

        Raises:
            NotEnoughMemory: the values would take more than half of the available memory.
        """
        found = {}
        count = len(range(len(columns[0]))[slots])
        for place, out in zip(places, self.empty_for(count, places), strict=True):
            # Slots of a ring may hold rows that are not valid.
            positions = np.ascontiguousarray(columns[place][slots])
            self.of_place[place].read(positions, out, defined=False)
            found[place] = out
        return found

    def deferred(
        self, columns: Sequence[np.ndarray], slots: slice, places: Sequence[int]
    ) -> dict[int, DeferredTensor]:
        """Return large columns as tensors that `decoded` fills on first use.

        The tensors may outlive the open storage, because its maps live as long as they are used.
        """
        found = {}
        count = len(range(len(columns[0]))[slots])
        for place in places:
            column = self._columns[place]
            # Viewing the bits as bfloat16 would read the values.
            if is_small_allocation(count * column.row_nbytes) or column.dtype is torch.bfloat16:
                continue
            self.of_place[place].remap()

            def decode(place: int = place) -> torch.Tensor:
                return torch.from_numpy(self.decoded(columns, slots, [place])[place])

            found[place] = DeferredTensor(decode, (count, *column.shape), column.dtype)
        return found

    def usage(self, columns: Sequence[np.ndarray], valid: range, ring: int) -> list[PoolUsage]:
        """Return the use of each pool by the rows ``valid`` of the mapped columns.

        Positions outside a pool, which only damaged rows have, do not count.
        """
        found: dict[PoolFile, list[np.ndarray]] = {file: [] for file in self._files}
        for place, file in self.of_place.items():
            found[file].append(_rows_of(columns[place], valid, ring).ravel())
        usages = []
        for file, positions in found.items():
            layout, nbytes = file.layout, len(file.remap())
            used = np.zeros((layout.segments_in(nbytes), layout.segment_frames), np.bool_)
            for each in positions:
                used.ravel()[each[(each >= 0) & (each < used.size)]] = True
            segments = int(used.any(axis=1).sum())
            usages.append(
                PoolUsage(
                    file.once.key,
                    layout.stack,
                    layout.delta,
                    int(used.sum()),
                    segments * layout.segment_nbytes,
                    nbytes,
                )
            )
        return usages

    def used_nbytes(self, columns: Sequence[np.ndarray], valid: range, ring: int) -> int:
        """Return the size in bytes of all segments that the rows ``valid`` need.

        A writer knows them. Otherwise the call reads the positions of these rows.
        """
        if self._fresh:
            return sum(writer.used_nbytes(valid.start) for *_, writer in self._writers)
        return sum(each.used_nbytes for each in self.usage(columns, valid, ring))

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


def _rows_of(column: np.ndarray, valid: range, ring: int) -> np.ndarray:
    """Return the rows ``valid`` of a mapped column, in order."""
    parts = [column[slot : slot + n] for slot, _, n in pieces(valid.start, valid.stop, ring)]
    return parts[0] if len(parts) == 1 else np.concatenate([column[:0], *parts])


def _contiguous(values: np.ndarray | RowRefs) -> np.ndarray | RowRefs:
    """Return ``values`` with contiguous rows, copied if necessary."""
    if isinstance(values, RowRefs) or (len(values) and values[0].flags.c_contiguous):
        return values
    return np.ascontiguousarray(values)


def _addresses(values: np.ndarray | RowRefs) -> np.ndarray:
    """Return the address of each row, int64 [rows]."""
    if isinstance(values, np.ndarray):
        return values.ctypes.data + np.arange(len(values)) * values.strides[0]
    sources = values.sources
    if values.origin is None:
        return sources[0].ctypes.data + values.index.astype(np.int64) * sources[0].strides[0]
    bases = np.array([each.ctypes.data for each in sources], np.int64)
    strides = np.array([each.strides[0] for each in sources], np.int64)
    at: np.ndarray = bases[values.origin] + values.index * strides[values.origin]
    return at
