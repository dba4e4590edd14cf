"""Cache of the decompressed chunks of an array, with read-ahead.

The cache of an array is one block of memory with a slot per chunk, so that one call copies rows of
many chunks. The least recently used chunks are evicted.

Caching a chunk takes longer than decompressing it, because it writes to memory that has not been
touched before. A large chunk is therefore cached only if its rows are requested again, or many of
them at once. Random rows that touch more chunks than fit into the cache are decompressed and
copied without evicting anything.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Protocol

import numpy as np

from tallyroll.storage.engine.pool import BufferPool
from tallyroll.storage.ext.packed.layout import ArrayLayout

_FEW: Final = 4
"""Below this number of chunks, the caller loads them, since threads would take longer to start."""
_MOST_THREADS: Final = 8
_SMALL_NBYTES: Final = 2**16
"""Chunks up to this size are cached on first use; results up to this size are not pooled."""
_MOST_POOLED_NBYTES: Final = 2**26
_DENSE: Final = 4
"""A call is dense if it requests at least 1 / `_DENSE` of the rows in the needed chunks."""


class Chunks(Protocol):
    """The stored chunks of an array."""

    layout: ArrayLayout
    nbytes: int

    def prepared(self, chunk: int) -> Any:
        """Prepare a chunk for `load`, and return the argument ``where`` of that call.

        One thread at a time may call this.
        """

    def load(self, where: Any, chunk: int) -> np.ndarray:
        """Decompress a chunk: [chunk_rows, *shape]. Several threads may call this at once."""

    def done(self, *, idle: bool = False) -> None:
        """Release the least recently used resources that `prepared` opened; if ``idle``, all."""

    def another(self) -> Chunks:
        """Return the same chunks with separate file handles, for another cache."""

    def close(self) -> None:
        """Close all files."""


class Workers:
    """Thread pool that loads chunks. It starts on demand, and starts again in a forked child."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = _threads() if threads is None else threads
        self._pool: ThreadPoolExecutor | None = None

    def run(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Run jobs, in parallel if there are enough of them."""
        if len(jobs) < _FEW or self.threads < 2:
            for job in jobs:
                job()
            return
        parts = [list(jobs[number :: self.threads]) for number in range(self.threads)]
        running = [self._executor().submit(_all_of, part) for part in parts[1:] if part]
        try:
            _all_of(parts[0])
        finally:
            errors = [each.exception() for each in running]
        for error in errors:
            if error is not None:
                raise error

    def begin(self, job: Callable[[], None]) -> Future[None] | None:
        """Run a job in the background; skip it and return None if there is only one thread."""
        return self._executor().submit(job) if self.threads > 1 else None

    def _executor(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="tallyroll-unpack")
        return self._pool

    def forget(self) -> None:
        """Discard the pool in a forked child, which has none of its threads."""
        self._pool = None

    def close(self) -> None:
        """Stop the threads."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)


def _all_of(jobs: Sequence[Callable[[], None]]) -> None:
    for job in jobs:
        job()


def _threads() -> int:
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


_Some = tuple[np.ndarray, np.ndarray]
"""Positions [k] in an array, and the rows [k] of a chunk to copy there."""
_Wanted = tuple[int, np.ndarray | None, _Some | None]
"""A chunk, its target array (None: discard the chunk), and the rows to copy (None: all rows)."""


class CachedArray:
    """Rows of an array, read through a cache of chunks.

    Args:
        chunks: the stored chunks.
        nbytes: the size of the cache in bytes; it holds at least one chunk.
        workers: the threads that load chunks.
    """

    def __init__(self, chunks: Chunks, nbytes: int, workers: Workers) -> None:
        self.chunks, self._workers = chunks, workers
        self.layout = layout = chunks.layout
        self._slots = max(1, min(nbytes // max(1, layout.chunk_nbytes), layout.chunks))
        self.loads = 0
        """The number of chunks decompressed so far."""
        self._forget()
        _LIVE.add(self)

    @property
    def max_nbytes(self) -> int:
        """The maximum size of the cache in bytes."""
        return self._slots * self.layout.chunk_nbytes

    def _forget(self) -> None:
        layout = self.layout
        self._lock = threading.Lock()
        self._slab: np.ndarray | None = None
        self._slot_of = np.full(layout.chunks, -1, np.int32)
        self._chunk_in = np.full(self._slots, -1, np.int64)
        self._used = np.full(self._slots, -1, np.int64)
        self._lately = 2 * self._slots
        self._asked = np.full(layout.chunks, -1 - self._lately, np.int64)
        self._pool = BufferPool([(layout.numpy_dtype, layout.shape)])
        self._clock = 0
        self._next = -1
        self._ahead: Future[None] | None = None

    def forked(self) -> None:
        """Reset the cache in a forked child, since another thread may have held the lock."""
        self._workers.forget()
        self._forget()

    def take(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Copy rows [*] in any order; see `ColumnReader.take`."""
        layout = self.layout
        shape = (*rows.shape, *layout.shape)
        if out is None:
            out = np.empty(shape, layout.numpy_dtype)
        if not rows.size:
            return out
        flat, target = rows.reshape(-1), out.reshape(-1, *layout.shape)
        chunk = flat // layout.chunk_rows
        with self._lock:
            slots = self._slot_of[chunk]
            if (slots >= 0).all():
                self._clock += 1
                self._used[slots] = self._clock
                self._gather(slots, flat, target)
                return out
            held, copied = self._chosen(np.unique(chunk), len(flat))
            if len(held):
                self._hold(held)
                # Rows of chunks that are not cached are undefined until they are copied below.
                self._gather(self._slot_of[chunk], flat, target)
            if len(copied):
                self._copy_rows(copied, chunk, flat, target)
        return out

    def take_each(self, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Copy the rows of several requests, which may touch the same chunks, in one call.

        The memory of the result is reused once nothing refers to it.
        """
        every = self._memory(sum(each.size for each in rows))
        if len(rows) == 1:
            return [self.take(rows[0], every.reshape(*rows[0].shape, *self.layout.shape))]
        self.take(np.concatenate([each.reshape(-1) for each in rows]), every)
        found, start = [], 0
        for each in rows:
            part = every[start : start + each.size]
            found.append(part.reshape(*each.shape, *self.layout.shape))
            start += each.size
        return found

    def _memory(self, count: int) -> np.ndarray:
        """Return memory for rows; small and very large blocks are not pooled."""
        layout = self.layout
        if _SMALL_NBYTES < count * layout.row_nbytes <= _MOST_POOLED_NBYTES:
            return self._pool.arrays((count,))[0]
        return np.empty((count, *layout.shape), layout.numpy_dtype)

    def _chosen(self, needed: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Split the needed chunks into those to cache, and those whose rows are only copied.

        A chunk is cached if there is room for it and one of the following holds: the chunks of this
        array are small, ``rows`` is at least a quarter of the rows of the needed chunks, or the
        chunk was requested recently.
        """
        there = self._slot_of[needed] >= 0
        missing, present = needed[~there], needed[there]
        small = self.layout.chunk_nbytes <= _SMALL_NBYTES
        if small or _DENSE * rows >= len(needed) * self.layout.chunk_rows:
            again = np.ones(len(missing), np.bool_)
        else:
            again = self.loads - self._asked[missing] <= self._lately
            self._asked[missing] = self.loads
        again &= np.cumsum(again) <= self._slots - len(present)
        return np.concatenate([present, missing[again]]), missing[~again]

    def _copy_rows(
        self, chunks: np.ndarray, chunk: np.ndarray, rows: np.ndarray, out: np.ndarray
    ) -> None:
        """Decompress chunks [n] without caching them, and copy the requested rows.

        Args:
            chunks: the chunks.
            chunk: the chunk of each row [k].
            rows: the rows [k].
            out: the target [k, *shape].
        """
        order = chunk.argsort(kind="stable")
        begins, ends = (chunk[order].searchsorted(chunks, side) for side in ("left", "right"))
        within = (rows % self.layout.chunk_rows)[order]
        self._load(
            [
                (each, out, (order[begin:end], within[begin:end]))
                for each, begin, end in zip(
                    chunks.tolist(), begins.tolist(), ends.tolist(), strict=True
                )
            ]
        )

    def _gather(self, slots: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
        assert self._slab is not None
        size = self.layout.chunk_rows
        at = slots.astype(np.int64) * size + rows % size
        # "clip" is the mode in which NumPy writes to `out` directly.
        self._slab.take(at, axis=0, out=out, mode="clip")

    def _hold(self, needed: np.ndarray, *, alone: bool = False) -> None:
        """Load chunks [n], at most one per slot, into the cache.

        If ``alone``, the calling thread loads the chunks itself. A pool thread must do so, because
        pool threads that wait for each other could deadlock.
        """
        layout = self.layout
        if self._slab is None:
            # The system allocates the memory when it is first touched.
            self._slab = np.empty((self._slots * layout.chunk_rows, *layout.shape), layout.dtype)
        self._clock += 1
        slots = self._slot_of[needed]
        self._used[slots[slots >= 0]] = self._clock
        missing = needed[slots < 0]
        if not len(missing):
            return
        free = np.argpartition(self._used, len(missing) - 1)[: len(missing)]
        gone = self._chunk_in[free]
        self._slot_of[gone[gone >= 0]] = -1
        self._chunk_in[free] = self._used[free] = -1
        size, slab = layout.chunk_rows, self._slab
        self._load(
            [
                (chunk, slab[slot * size : (slot + 1) * size], None)
                for chunk, slot in zip(missing.tolist(), free.tolist(), strict=True)
            ],
            alone,
        )
        self._slot_of[missing], self._chunk_in[free] = free, missing
        self._used[free] = self._clock

    def _load(self, wanted: Sequence[_Wanted], alone: bool = False) -> None:
        chunks = self.chunks
        jobs = [_ChunkJob(chunks, chunks.prepared(each[0]), *each) for each in wanted]
        self.loads += len(jobs)
        try:
            if alone:
                _all_of(jobs)
            else:
                self._workers.run(jobs)
        finally:
            chunks.done()

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Copy the rows ``[start, stop)``.

        If the previous call ended at ``start``, also begin to decompress the rows after ``stop``.
        """
        layout, size = self.layout, self.layout.chunk_rows
        out = np.empty((max(0, stop - start), *layout.shape), layout.numpy_dtype)
        if not len(out):
            return out
        first, last = start // size, (stop - 1) // size
        with self._lock:
            whole = range(-(-start // size), stop // size)
            loaded = [chunk for chunk in whole if self._slot_of[chunk] < 0]
            # Decompress whole chunks directly into the result, and cache partial ones.
            self._load(
                [
                    (chunk, out[chunk * size - start : (chunk + 1) * size - start], None)
                    for chunk in loaded
                ]
            )
            there = {*loaded}
            for chunk in range(first, last + 1):
                if chunk not in there:
                    self._hold(np.array([chunk]))
                    self._copy(chunk, start, stop, out)
            goes_on, self._next = start == self._next, stop
            if goes_on:
                self._read_ahead(stop, stop - start)
        return out

    def _copy(self, chunk: int, start: int, stop: int, out: np.ndarray) -> None:
        assert self._slab is not None
        size = self.layout.chunk_rows
        begin, end = max(start, chunk * size), min(stop, (chunk + 1) * size)
        at = int(self._slot_of[chunk]) * size - chunk * size
        out[begin - start : end - start] = self._slab[at + begin : at + end]

    def _read_ahead(self, start: int, count: int) -> None:
        """Begin to decompress ``count`` rows from ``start`` on if they fit into half the cache."""
        size = self.layout.chunk_rows
        chunks = np.arange(start // size, min(-(-(start + count) // size), self.layout.chunks))
        if not len(chunks) or 2 * len(chunks) > self._slots:
            return
        if self._ahead is None or self._ahead.done():
            self._ahead = self._workers.begin(_Prefetch(self, chunks))

    def hold(self, chunks: np.ndarray) -> None:
        """Load chunks into the cache in the calling thread, for the read-ahead job.

        A chunk that cannot be loaded raises its error again when its rows are requested.
        """
        with self._lock:
            self._hold(chunks, alone=True)

    def each_chunk(self) -> range:
        """Return the numbers of all chunks."""
        return range(self.layout.chunks)

    def check(self, chunk: int) -> None:
        """Load a chunk without caching it.

        Raises:
            CorruptStorage: the chunk is damaged.
        """
        with self._lock:
            self._load([(chunk, None, None)])

    def close_files(self) -> None:
        """Close the files until rows are requested again."""
        with self._lock:
            self.chunks.done(idle=True)

    def close(self) -> None:
        """Close the files and free the memory."""
        with self._lock:
            self.chunks.close()
            self._slab = None
            self._slot_of[:] = -1


class _ChunkJob:
    """Job that loads one chunk and copies it; see `_Wanted`."""

    __slots__ = ("_chunk", "_chunks", "_out", "_some", "_where")

    def __init__(
        self, chunks: Chunks, where: Any, chunk: int, out: np.ndarray | None, some: _Some | None
    ) -> None:
        self._chunks, self._where, self._chunk = chunks, where, chunk
        self._out, self._some = out, some

    def __call__(self) -> None:
        found = self._chunks.load(self._where, self._chunk)
        if self._out is None:
            return
        if self._some is None:
            self._out[:] = found
        else:
            places, within = self._some
            self._out[places] = found[within]


class _Prefetch:
    """Job that decompresses chunks ahead of the reader."""

    def __init__(self, array: CachedArray, chunks: np.ndarray) -> None:
        self._array, self._chunks = weakref.ref(array), chunks

    def __call__(self) -> None:
        if (array := self._array()) is not None:
            array.hold(self._chunks)


_LIVE: weakref.WeakSet[CachedArray] = weakref.WeakSet()


def _in_child() -> None:
    for each in list(_LIVE):
        each.forked()


os.register_at_fork(after_in_child=_in_child)


def budgets(sizes: Sequence[int], nbytes: int) -> list[int]:
    """Divide a cache budget of ``nbytes`` among arrays of the given sizes.

    Small arrays get their whole size, and large arrays get equal shares of the rest.
    """
    found, left, order = [0] * len(sizes), nbytes, np.argsort(sizes, kind="stable")
    for place, which in enumerate(order.tolist()):
        found[which] = min(sizes[which], left // (len(sizes) - place))
        left -= found[which]
    return found
