"""Anonymous memory that processes share, and a check that enough of it is available.

A memfd has no name in ``/dev/shm``: the kernel frees it with the last process that holds it,
however that process ends. Only its file descriptor is sent, by
``multiprocessing.reduction.send_handle``.
"""

import fcntl
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from tallyroll.collector.errors import ArgumentError
from tallyroll.storage.engine.available_memory import available_bytes

ALIGNMENT = 64
"""Bytes of a cache line, so that writers of neighbors do not slow each other down."""

Shape = Sequence[int]


def _next_start(end: int) -> int:
    return -(-end // ALIGNMENT) * ALIGNMENT


class ArenaSizer:
    """Computes the size of an :class:`Arena` for the same calls.

    The results have shape and dtype, but no memory.
    """

    def __init__(self) -> None:
        self.end = 0
        """Bytes requested so far: the minimum size of an arena for them."""

    def _add(self, nbytes: int) -> None:
        self.end = _next_start(self.end) + nbytes

    def array(self, shape: Shape, dtype: DTypeLike) -> NDArray[Any]:
        """Return a read-only array of shape ``shape``, all of whose zeros share one element."""
        one = np.zeros((), dtype)
        self._add(math.prod(shape) * one.itemsize)
        return np.broadcast_to(one, tuple(shape))

    def tensor(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Return a meta tensor of shape ``shape``."""
        self._add(math.prod(shape) * dtype.itemsize)
        return torch.empty(tuple(shape), dtype=dtype, device="meta")


class Arena:
    """Shared memory from which arrays and tensors are allocated one after another.

    Two processes that ask in the same order for the same shapes and dtypes get the same memory.
    Pages are zero, and occupy memory only after the first write. :meth:`create` and :meth:`attach`
    make arenas. Arrays and tensors stay usable, and keep the memory, after the arena is freed.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        """File descriptor of the memory, which the arena closes."""
        self.nbytes = nbytes
        self.end = 0
        """Bytes allocated so far."""
        weakref.finalize(self, os.close, fd)
        # An empty file cannot be mapped, so the file has at least one byte.
        memory = mmap.mmap(fd, max(1, nbytes))
        self._bytes: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)

    @classmethod
    def create(cls, nbytes: int) -> "Arena":
        """Allocate new memory of ``nbytes`` bytes, all 0, whose size cannot change.

        Raises:
            OSError: a limit of this process (files, address space) was reached.
        """
        fd = os.memfd_create("tallyroll", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, max(1, nbytes))
            # A file that shrinks under its map kills each process that touches it.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, nbytes)

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> "Arena":
        """Map the memory of another process's arena. The new arena owns ``fd``."""
        os.set_inheritable(fd, False)  # a descriptor from a socket is inherited by all children
        return cls(fd, nbytes)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arena as an argument of a process that is being started."""
        return _arrived, (DupFd(self.fd), self.nbytes)

    def array(self, shape: Shape, dtype: DTypeLike) -> NDArray[Any]:
        """Return the next array of shape ``shape``, at a multiple of :data:`ALIGNMENT` bytes.

        Raises:
            ValueError: the array does not fit, because it was not measured.
        """
        kind = np.dtype(dtype)
        part = self._carve(math.prod(shape) * kind.itemsize)
        return part.view(kind).reshape(tuple(shape))

    def tensor(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Return the next tensor of shape ``shape``, at a multiple of :data:`ALIGNMENT` bytes.

        Raises:
            ValueError: the tensor does not fit, because it was not measured.
        """
        part = self._carve(math.prod(shape) * dtype.itemsize)
        return torch.from_numpy(part).view(dtype).reshape(tuple(shape))

    def _carve(self, nbytes: int) -> NDArray[np.uint8]:
        start = _next_start(self.end)
        if start + nbytes > self.nbytes:
            raise ValueError(
                f"expected {nbytes} bytes from byte {start} on, got an arena of {self.nbytes} "
                "bytes. Carve in the order in which the arena was measured."
            )
        self.end = start + nbytes
        return self._bytes[start : self.end]


def _arrived(descriptor: Any, nbytes: int) -> Arena:
    return Arena.attach(descriptor.detach(), nbytes)


Area = ArenaSizer | Arena
"""Memory to allocate from, or its measurement."""


# Available memory


def require(nbytes: int, what: str) -> None:
    """Raise an error unless ``nbytes`` of memory are available for ``what``.

    The kernel allocates shared memory on the first write. If memory is short then, the kernel does
    not report an error, but kills a process.

    Raises:
        ArgumentError: less memory is available.
    """
    available = available_bytes()
    if nbytes > available:
        raise ArgumentError(
            f"expected {-(-nbytes // 2**20)} MiB of shared memory for {what}, got "
            f"{available // 2**20} MiB available. Make frames_per_batch smaller, or use fewer "
            "lanes or workers."
        )
