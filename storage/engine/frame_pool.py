"""Pools that store each frame of the observations once.

A frame is one observation, or one frame of a stack. Instead of its two observations, a row holds
the positions of their frames in a pool. A position is ``segment * segment_frames + index``.

A pool is one block of memory, such as a map of a file: a preamble, then segments of equal size. One
lane at a time fills a segment, so the frames of a lane are adjacent. There are two kinds of pools:

- In a *plain* pool a segment is an array of ``segment_frames`` frames. There is no preamble.
- In a *delta* pool a segment is a block of at most ``segment_frames`` frames. It begins with
  ``segment_frames`` words, uint32: for each frame, the end of its bytes within the block. A frame
  is encoded as the 4-byte words in which it differs from the frame before it (`encode_frame`). The
  first frame of a block is encoded as its difference from the reference, a frame in the preamble. A
  frame that differs in too many words is stored whole. Readers recognize it by its size.

The writer compares frames by their bits. There are three ways to share frames:

- A row *links* if its observation equals the next observation of the lane's previous row. It then
  holds the same positions.
- A next observation *shifts* if it is the stack of the observation, moved by one frame. Only its
  last frame is new.
- Copies of one frame at the beginning of a stack, such as zeros after a reset, are stored once.

For each segment, the writer keeps ``last_row``, the newest row that needs it. Invariants:

- A segment is overwritten only if it is free: its last row is older than all valid rows, and no
  lane fills it. A row that links updates ``last_row`` before its own frames take a segment, and the
  writer checks ``last_row`` again when it takes a segment.
- All other writes append a frame to the segment that a lane fills.
- The pool holds no state of the writer. After a failed append, a rewind or reopening, the positions
  of the valid rows determine which segments are in use (`FrameWriter.resume`).

`_frame_pool.c` implements the same functions, with equal positions and bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final, TypeAlias

import numpy as np

from tallyroll.storage.engine.frame_layout import WORD_NBYTES, FrameLayout
from tallyroll.storage.engine.kernel import compiled, in_order, table_of
from tallyroll.storage.errors import CorruptStorage, StorageFull

_MOST_IN_RUN: Final = 0xFFFF
"""Maximum number of words that a run skips or replaces."""
_MOST_POSITIONS = 2**31
_FIRST_STEP_NBYTES: Final = 2**20
_STEP_DIVISOR: Final = 16
"""The pool grows by 1/16 of its size. A larger step would leave more space unused in a ring."""
_FREE_DIVISOR: Final = 256
"""The pool grows if fewer than 1/256 of its segments are free. Otherwise the writer would search
for free segments too often."""

Grow: TypeAlias = Callable[[int], np.ndarray]


class FrameWriter:
    """Places the frames of rows in the segments of a pool.

    A new writer regards all segments as free, so call `resume` if the storage has rows. A writer is
    not thread-safe.

    Args:
        layout: the layout of the pool.
        memory: the pool, uint8 [nbytes], writable and aligned to 8 bytes. It may be shorter than
            the preamble.
        grow: function that enlarges the file of the pool. It gets the total number of segments, and
            returns memory with at least as many. It may raise `StorageFull`.
    """

    def __init__(self, layout: FrameLayout, memory: np.ndarray, grow: Grow) -> None:
        self.layout = layout
        self._grow = grow
        self._kernel = compiled()
        self._scratch = np.zeros(layout.frame_nbytes, np.uint8)
        self._free_count = np.zeros(1, np.int64)
        self._last_row, self._free = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._forget_all_lanes()
        self._unfinished: tuple[int, np.ndarray] | None = None
        """The first row of an append in progress, and the segments that lanes used before it."""
        self._next_row = 0
        self.remap(memory)

    @property
    def segments(self) -> int:
        """The number of segments in the pool."""
        return len(self._last_row)

    def used_nbytes(self, oldest: int) -> int:
        """Return the size in bytes of the segments that row ``oldest`` and later rows need."""
        return int(np.count_nonzero(self._last_row >= oldest)) * self.layout.segment_nbytes

    def remap(self, memory: np.ndarray) -> None:
        """Use ``memory`` for the pool, which has grown.

        Raises:
            ValueError: the memory has fewer segments than before, or is not a writable array of
                bytes.
        """
        layout = self.layout
        segments = min(layout.segments_in(memory.nbytes), _MOST_POSITIONS // layout.segment_frames)
        if memory.dtype != np.uint8 or memory.ndim != 1 or not memory.flags.writeable:
            raise ValueError("memory: expected a writable array of bytes, uint8 [nbytes].")
        if segments < len(self._last_row):
            raise ValueError(
                f"memory: expected at least {len(self._last_row)} segments, got {segments}. A pool "
                "does not shrink while it is written; call resume."
            )
        more = np.full(segments - len(self._last_row), -1, np.int64)
        self._memory, self._last_row = memory, np.concatenate([self._last_row, more])
        self._free = np.concatenate([self._free, more])
        self._table: bytes | None = None

    def resume(self, positions: np.ndarray, numbers: np.ndarray, memory: np.ndarray) -> None:
        """Derive the segments in use from the positions of all valid rows.

        Call this after opening, a rewind, the invalidation of rows, or an append whose rows were
        not committed. Afterwards each lane starts a new segment, and its next row does not link.

        Args:
            positions: the positions of the valid rows, int32 [rows, 2 * stack].
            numbers: the numbers of these rows, int64 [rows], ascending.
            memory: the pool, as in the constructor; it may have any size.

        Raises:
            CorruptStorage: a position is not in the pool.
        """
        self._unfinished, self._next_row = None, 0
        self._free_count[0], self._last_row, self._free = 0, self._last_row[:0], self._free[:0]
        self._forget_all_lanes()
        self.remap(memory)
        positions = np.ascontiguousarray(positions, np.int32)
        numbers = np.ascontiguousarray(numbers, np.int64)
        mark = _mark_rows if self._kernel is None else self._kernel.mark_rows
        try:
            mark(positions, numbers, self._last_row, self.layout.segment_frames)
        except IndexError as error:
            raise CorruptStorage(
                f"{error} The rows and the pool do not belong together, or a file is damaged. "
                "Restore a copy."
            ) from error

    def append(
        self,
        lanes: np.ndarray,
        begins: np.ndarray,
        ends: np.ndarray,
        first_row: int,
        oldest: int,
    ) -> np.ndarray:
        """Place the frames of rows, and return their positions.

        If the append fails, or its rows are not committed, no valid row is affected, and `append`
        may be called again without `resume`. The new segments of a failed append are free.

        Args:
            lanes: the lane of each row, int64 [count], 0 or higher.
            begins: the addresses of the observations, int64 [count]. Each has `stack` frames, and
                stays valid during the call.
            ends: the addresses of the next observations, int64 [count].
            first_row: the number of the first row; the others follow.
            oldest: the oldest row that is valid while these rows are written.

        Returns:
            The positions of each row, int32 [count, 2 * stack]: of the observation's frames, then
            of the next observation's.

        Raises:
            StorageFull: the pool cannot grow.
            ValueError: ``oldest`` is negative or above ``first_row``.
        """
        if not 0 <= oldest <= first_row:
            raise ValueError(f"oldest: expected 0 to {first_row}, the first row, got {oldest}.")
        positions = np.empty((len(lanes), 2 * self.layout.stack), np.int32)
        if not len(lanes):
            return positions
        self._abandon()
        if not first_row:
            self._last_row.fill(-1)
            self._forget_lanes()
        elif first_row < self._next_row:  # the rows of the last append were not committed
            np.minimum(self._last_row, first_row - 1, out=self._last_row)
        indices = self._indices_of(lanes)
        begins = np.ascontiguousarray(begins, np.int64)
        ends = np.ascontiguousarray(ends, np.int64)
        self._unfinished = first_row, self._segments_of_lanes()
        if not self.segments:
            self._find_free(oldest)
        if self.layout.delta and not first_row:
            newest = int(begins[0]) + self.layout.value_nbytes - self.layout.frame_nbytes
            self._memory[: self.layout.frame_nbytes] = _bytes_at(newest, self.layout.frame_nbytes)
        rows = indices, begins, ends, positions
        done = 0
        while True:
            if self._kernel is not None:
                table = self._kernel_table()
                done = self._kernel.place_frames(table, *rows, done, first_row, oldest)
            else:
                done = self._place(*rows, done, first_row, oldest)
            if done == len(lanes):
                self._unfinished, self._next_row = None, first_row + done
                return positions
            self._find_free(oldest)

    # --- Segments -------------------------------------------------------------------------------

    def _find_free(self, oldest: int) -> None:
        """List the free segments. Enlarge the pool if there are too few.

        Raises:
            StorageFull: the pool cannot grow.
        """
        layout = self.layout
        self._close_unneeded(oldest)  # valid rows need all segments that remain open
        found = np.flatnonzero(self._last_row < oldest)
        fit = layout.frames_that_fit(0, layout.begin_of_frames)
        least = -(-2 * layout.stack // fit)
        first = self.segments
        if len(found) < max(least, first // _FREE_DIVISOR):
            self._lengthen(first + max(0, least - len(found)))
            found = np.concatenate([found, np.arange(first, self.segments)])
        self._free[: len(found)] = found[::-1]
        self._free_count[0] = len(found)

    def _lengthen(self, least: int) -> None:
        """Enlarge the pool by a step, or only to ``least`` segments if the disk is too full."""
        layout, most = self.layout, _MOST_POSITIONS // self.layout.segment_frames
        if least > most:
            raise StorageFull(
                f"the frame pool has {self.segments:,} segments and needs {least:,}, but 32-bit "
                f"positions allow at most {most:,}. Store the rows in several shards."
            )
        nbytes = layout.nbytes_of(self.segments) if self.segments else 0
        step = max(1, layout.segments_in(nbytes // _STEP_DIVISOR or _FIRST_STEP_NBYTES))
        comfortable = min(most, max(least, self.segments + step))
        try:
            memory = self._grow(comfortable)
        except StorageFull:
            if least == self.segments:
                return
            if least == comfortable:
                raise
            memory = self._grow(least)
        if layout.segments_in(memory.nbytes) < least:
            raise ValueError(f"grow: expected at least {least} segments in the memory it returns.")
        self.remap(memory)

    def _close_unneeded(self, oldest: int) -> None:
        """Close open segments that no valid row needs, such as those of a lane that stalled."""
        lanes = np.flatnonzero(self._open >= 0)
        unneeded = lanes[self._last_row[self._open[lanes]] < oldest]
        self._open[unneeded] = -1

    # --- Lanes ----------------------------------------------------------------------------------

    def _forget_all_lanes(self) -> None:
        """Remove all lanes."""
        self._lane_of: dict[int, int] = {}
        self._tails = np.empty((0, self.layout.stack), np.int32)
        self._open, self._used = np.empty(0, np.int64), np.empty(0, np.int64)
        self._filled = np.empty(0, np.int64)
        self._last = np.empty((0, self.layout.value_nbytes), np.uint8)
        self._reset_newest()

    def _make_lanes(self, count: int) -> None:
        """Enlarge the arrays for ``count`` lanes."""
        self._tails = _lengthened(self._tails, count)
        self._open = _lengthened(self._open, count)
        self._used = _lengthened(self._used, count)
        self._filled = _lengthened(self._filled, count)
        self._last = _lengthened(self._last, count)
        self._reset_newest()

    def _reset_newest(self) -> None:
        """Let the address of each lane's newest value point to the writer's own copy."""
        first, step = self._last.ctypes.data, self.layout.value_nbytes
        self._newest = first + step * np.arange(len(self._open), dtype=np.int64)
        self._table = None

    def _indices_of(self, lanes: np.ndarray) -> np.ndarray:
        """Return the index of each lane in the arrays, which are enlarged for new lanes."""
        known, numbers = self._lane_of, lanes.tolist()
        new = [lane for lane in dict.fromkeys(numbers) if lane not in known]
        if new:
            if len(known) + len(new) > len(self._open):
                self._make_lanes(max(len(known) + len(new), len(known) + len(known) // 2))
            known.update(zip(new, range(len(known), len(known) + len(new)), strict=True))
        return np.array([known[lane] for lane in numbers], np.int64)

    def _segments_of_lanes(self) -> np.ndarray:
        """Return the open segments of all lanes, and the segments to which next rows may link."""
        tails = self._tails[self._tails[:, 0] >= 0]
        segments = tails.ravel() // self.layout.segment_frames
        return np.concatenate([self._open[self._open >= 0], segments])

    def _forget_lanes(self) -> None:
        """Make each lane start a new segment, with a row that does not link."""
        self._tails.fill(-1)
        self._open.fill(-1)
        self._free_count[0] = 0
        self._reset_newest()

    def _abandon(self) -> None:
        """Undo an append that did not finish.

        Its new segments become free. Segments that lanes used before it remain in use until the
        rows before the append become invalid.
        """
        if self._unfinished is None:
            return
        first_row, before = self._unfinished
        touched = self._last_row >= first_row
        kept = before[touched[before]]
        self._last_row[touched] = -1
        self._last_row[kept] = first_row - 1
        self._forget_lanes()
        self._unfinished = None

    # --- Memory ---------------------------------------------------------------------------------

    def _kernel_table(self) -> bytes:
        if self._table is None:
            words: list[Any] = in_order(
                "WRITER",
                memory=self._memory,
                segments=self.segments,
                stack=self.layout.stack,
                lanes=len(self._open),
                tails=self._tails,
                open=self._open,
                used=self._used,
                filled=self._filled,
                last=self._last,
                newest=self._newest,
                last_row=self._last_row,
                free=self._free,
                free_count=self._free_count,
                scratch=self._scratch,
            )
            self._table = table_of([*self.layout.words(), *words])
        return self._table

    # --- Placing in NumPy, as in _frame_pool.c --------------------------------------------------

    def _place(
        self,
        lanes: np.ndarray,
        begins: np.ndarray,
        ends: np.ndarray,
        positions: np.ndarray,
        done: int,
        first_row: int,
        oldest: int,
    ) -> int:
        """Place rows, with the results of `FrameKernel.place_frames`."""
        nbytes = self.layout.value_nbytes
        for i in range(done, len(lanes)):
            lane, row = int(lanes[i]), first_row + i
            begin, end = _bytes_at(begins[i], nbytes), _bytes_at(ends[i], nbytes)
            if not self._place_row(lane, row, oldest, begin, end, positions[i]):
                return i
            self._newest[lane] = ends[i]
        for lane in dict.fromkeys(lanes.tolist()):
            self._last[lane] = _bytes_at(self._newest[lane], nbytes)
        self._reset_newest()
        return len(lanes)

    def _place_row(
        self,
        lane: int,
        row: int,
        oldest: int,
        begin: np.ndarray,
        end: np.ndarray,
        positions: np.ndarray,
    ) -> bool:
        """Place the frames of a row. If there are too few segments, place none; return False."""
        layout, tail = self.layout, self._tails[lane]
        newest = _bytes_at(self._newest[lane], layout.value_nbytes)
        size, stack = layout.frame_nbytes, layout.stack
        shifts = stack > 1 and np.array_equal(begin[size:], end[:-size])
        links = tail[0] >= 0 and np.array_equal(begin, newest)
        if links:
            self._last_row[tail // layout.segment_frames] = row
        of_begin = 0 if links else _distinct_frames(begin, stack)
        of_end = 1 if shifts else _distinct_frames(end, stack)
        if not self._has_space(lane, of_begin + of_end, oldest):
            return False
        before = newest.reshape(stack, size)[-1]
        for part, value, distinct in ((0, begin, of_begin), (1, end, of_end)):
            found = positions[part * stack : (part + 1) * stack]
            if part == 0 and links:
                found[:] = tail
            elif part == 1 and shifts:
                found[:-1] = positions[1:stack]
            frames = value.reshape(stack, size)
            for i in range(stack - distinct, stack):
                found[i] = self._place_frame(lane, row, frames[i], before)
                before = frames[i]
            if distinct and not (part == 1 and shifts):
                found[: stack - distinct] = found[stack - distinct]
        tail[:] = positions[stack:]
        return True

    def _has_space(self, lane: int, frames: int, oldest: int) -> bool:
        """Return True if the list has enough free segments for ``frames`` frames of a lane.

        Segments to which a row has linked since they were listed are removed from the list.
        """
        layout = self.layout
        if self._open[lane] >= 0:
            frames -= layout.frames_that_fit(int(self._used[lane]), int(self._filled[lane]))
        wanted = -(-frames // layout.frames_that_fit(0, layout.begin_of_frames))
        listed = self._free[: self._free_count[0]].tolist()
        i = len(listed)
        while len(listed) - i < wanted and i > 0:
            i -= 1
            if self._last_row[listed[i]] >= oldest:
                del listed[i]
        self._free[: len(listed)] = listed
        self._free_count[0] = len(listed)
        return len(listed) - i >= wanted

    def _open_segment(self, lane: int) -> None:
        """Open a free segment for a lane, and remove the tails whose frames it overwrites."""
        self._free_count[0] -= 1
        segment = self._free[self._free_count[0]]
        inside = (self._tails // self.layout.segment_frames == segment).any(1)
        self._tails[inside & (self._tails[:, 0] >= 0), 0] = -1
        self._open[lane], self._used[lane] = segment, 0
        self._filled[lane] = self.layout.begin_of_frames

    def _place_frame(self, lane: int, row: int, frame: np.ndarray, before: np.ndarray) -> int:
        """Place a frame in the lane's segment, after the frame ``before``."""
        layout = self.layout
        if self._open[lane] < 0 or self._used[lane] == layout.segment_frames:
            self._open_segment(lane)
        content = frame
        if layout.delta:
            encoded = self._encoded(lane, frame, before)
            if encoded is None:
                self._open_segment(lane)
                encoded = self._encoded(lane, frame, before)
                assert encoded is not None, "a segment has space for a whole frame"
            content = encoded
        segment, used, begin = int(self._open[lane]), int(self._used[lane]), int(self._filled[lane])
        block = self._memory[layout.nbytes_of(segment) : layout.nbytes_of(segment + 1)]
        self._filled[lane] = end = begin + content.size
        block[begin:end] = content
        if layout.delta:
            block[WORD_NBYTES * used :][:WORD_NBYTES].view(np.uint32)[0] = end
        self._last_row[segment], self._used[lane] = row, used + 1
        return segment * layout.segment_frames + used

    def _encoded(self, lane: int, frame: np.ndarray, before: np.ndarray) -> np.ndarray | None:
        """Return the bytes to store for a frame, or None if they do not fit in the segment."""
        size = self.layout.frame_nbytes
        left = self.layout.segment_nbytes - int(self._filled[lane])
        encoded = encode_frame(frame, before if self._used[lane] else self._memory[:size])
        if encoded.size <= min(left, size - WORD_NBYTES):
            return encoded
        return frame if left >= size else None


def _lengthened(array: np.ndarray, count: int) -> np.ndarray:
    """Return ``array``, extended to the length ``count`` with -1.

    New uint8 elements are not initialized, because a lane writes its bytes before it reads them.
    """
    made = np.empty((count, *array.shape[1:]), array.dtype)
    made[: len(array)] = array
    if array.dtype != np.uint8:
        made[len(array) :] = -1
    return made


def _bytes_at(address: int, nbytes: int) -> np.ndarray:
    """Return the memory at an address as uint8 [nbytes]; the owner must keep it alive."""
    memory: Any = (ctypes.c_uint8 * nbytes).from_address(int(address))
    return np.frombuffer(memory, np.uint8)


def _distinct_frames(value: np.ndarray, stack: int) -> int:
    """Return the number of frames of a value, counting copies at its beginning once."""
    frames = value.reshape(stack, -1)
    differ = np.flatnonzero((frames != frames[0]).any(1))
    return stack - int(differ[0]) + 1 if len(differ) else 1


def _mark_rows(positions: np.ndarray, numbers: np.ndarray, last_row: np.ndarray, per: int) -> None:
    """Set ``last_row``, with the results of `FrameKernel.mark_rows`."""
    _require_inside(positions, len(last_row) * per)
    for column in positions.reshape(len(numbers), -1).T // per if len(numbers) else ():
        found = np.full_like(last_row, -1)
        found[column] = numbers  # rows ascend, so the newest row of a segment remains
        np.maximum(last_row, found, out=last_row)


def _require_inside(positions: np.ndarray, frames: int) -> None:
    wrong = positions[(positions < 0) | (positions >= frames)]
    if len(wrong):
        raise IndexError(
            f"positions: expected frames below {frames}, the number in the pool, got {wrong[0]}."
        )


def encode_frame(frame: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Encode the difference of ``frame`` from ``before``, all uint8 [nbytes], as runs.

    A run is a word with the number of equal 4-byte words to skip (low 16 bits) and the number of
    words to replace (high 16 bits), followed by the new words. A single equal word within a run is
    replaced too. Runs whose numbers do not fit in 16 bits are split.
    """
    new = frame.view(np.uint32)
    differ = new != before.view(np.uint32)
    differ[1:-1] |= differ[:-2] & differ[2:]
    edges = np.flatnonzero(np.diff(differ, prepend=False, append=False)).tolist()
    parts, word = [new[:0]], 0
    for first, stop in zip(edges[::2], edges[1::2], strict=True):
        skip = first - word
        while first < stop:
            step = min(skip, _MOST_IN_RUN)
            count = 0 if skip > step else min(stop - first, _MOST_IN_RUN)
            parts += [np.array([step | count << 16], np.uint32), new[first : first + count]]
            skip, first = skip - step, first + count
        word = stop
    return np.concatenate(parts).view(np.uint8)


def _decode_frame(frame: np.ndarray, content: np.ndarray) -> bool:
    """Apply differences to ``frame``. Return False if a run does not fit, and stop there."""
    words, runs = frame.view(np.uint32), content.view(np.uint32)
    word = at = 0
    while at < len(runs):
        skip, count = int(runs[at]) & _MOST_IN_RUN, int(runs[at]) >> 16
        word, at = word + skip, at + 1
        if word + count > len(words) or at + count > len(runs):
            return False
        words[word : word + count] = runs[at : at + count]
        word, at = word + count, at + count
    return True


def read_frames(
    layout: FrameLayout, memory: np.ndarray, positions: np.ndarray, *outs: np.ndarray
) -> None:
    """Read frames from a pool.

    The values are arbitrary if another process overwrites the frames meanwhile, or if the pool is
    damaged. The function never accesses memory outside its arguments.

    Args:
        layout: the layout of the pool.
        memory: the pool, uint8 [nbytes], aligned to 4 bytes. It may be read-only.
        positions: the positions of the frames, int32 [..., k]. Reading is fastest if the k
            positions of a row ascend and are in one segment.
        outs: the output array, contiguous, with the bytes of [..., k, *frame]; or two of them, for
            the first and for the last frames of each row.

    Raises:
        IndexError: a position is not in the pool; nothing is read.
        ValueError: the dtype of the positions is not int32, or an output has another size.
    """
    nbytes, given = positions.size * layout.frame_nbytes, sum(out.nbytes for out in outs)
    contiguous = all(out.flags.c_contiguous for out in outs)
    if positions.dtype != np.int32 or given != nbytes or not contiguous:
        raise ValueError(
            f"outs: expected contiguous arrays of {nbytes} bytes for positions of int32, got "
            f"{given} bytes for {positions.dtype}."
        )
    if not positions.size:
        return
    wide, (out, *later) = positions.shape[-1] if positions.ndim else 1, outs
    if (kernel := compiled()) is not None:
        positions = np.ascontiguousarray(positions)
        second = later[0] if later else out[:0]
        kernel.read_frames(memory, positions, out, second, layout.table, wide)
        return
    if later:
        split = wide * out.nbytes // nbytes
        read_frames(layout, memory, positions[..., :split], out)
        read_frames(layout, memory, positions[..., split:], *later)
        return
    wanted = positions.ravel().copy()
    segments = layout.segments_in(memory.nbytes)
    _require_inside(wanted, segments * layout.segment_frames)
    frames = out.reshape(-1).view(np.uint8).reshape(-1, layout.frame_nbytes)
    if not layout.delta:
        pool = memory[: layout.nbytes_of(segments)].reshape(-1, layout.frame_nbytes)
        np.take(pool, wanted, axis=0, out=frames, mode="clip")
        return
    found, where = np.unique(wanted, return_inverse=True)
    frames[:] = np.stack([_read_delta(layout, memory, each) for each in found.tolist()])[where]


def _read_delta(layout: FrameLayout, memory: np.ndarray, position: int) -> np.ndarray:
    """Decode a frame, starting from the last frame that is stored whole, or the reference."""
    segment, index = divmod(position, layout.segment_frames)
    block = memory[layout.nbytes_of(segment) : layout.nbytes_of(segment + 1)]
    first, size = layout.begin_of_frames, layout.frame_nbytes
    ends = [first, *block[:first].view(np.uint32)[: index + 1].tolist()]
    contents = [
        block[begin:end]
        if first <= begin <= end <= len(block) and not (begin | end) % WORD_NBYTES
        else None
        for begin, end in pairwise(ends)
    ]
    whole = [i for i, each in enumerate(contents) if each is not None and each.size == size]
    frame = memory[:size].copy()
    if whole:
        frame[:] = contents[whole[-1]]
    for content in contents[whole[-1] + 1 if whole else 0 :]:
        if content is None or not _decode_frame(frame, content):
            break
    return frame
