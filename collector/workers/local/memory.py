"""Memory that processes share, without a name, and how much of it there is to be had.

A memfd has no name in ``/dev/shm``: the kernel frees it with the last process that holds it,
however that process ends. Only its file descriptor travels, by
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
"""Bytes, a cache line: two processes that write neighbours do not slow each other down."""

Shape = Sequence[int]


def _next_start(end: int) -> int:
    return -(-end // ALIGNMENT) * ALIGNMENT


class Measure:
    """Adds up what the same calls would carve from an :class:`Arena`.

    What it returns has shape and dtype, and no memory.
    """

    def __init__(self) -> None:
        self.end = 0
        """Bytes wanted so far: the size of an arena that can hold them."""

    def _add(self, nbytes: int) -> None:
        self.end = _next_start(self.end) + nbytes

    def array(self, shape: Shape, dtype: DTypeLike) -> NDArray[Any]:
        """An array of zeros ``shape``, all its entries one, not to be written to."""
        one = np.zeros((), dtype)
        self._add(math.prod(shape) * one.itemsize)
        return np.broadcast_to(one, tuple(shape))

    def tensor(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """A meta tensor ``shape``."""
        self._add(math.prod(shape) * dtype.itemsize)
        return torch.empty(tuple(shape), dtype=dtype, device="meta")


class Arena:
    """Shared memory that arrays and tensors are carved from, one behind the other.

    Two processes that ask in the same order for the same shapes and dtypes get the same
    memory. Pages take room when they are first written, and until then are zeros. Made by
    :meth:`create` or :meth:`attach`; what was carved stays usable, and keeps the memory, after
    the arena is gone.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        """The memory's file descriptor; the arena's to close."""
        self.nbytes = nbytes
        self.end = 0
        """Bytes carved so far."""
        weakref.finalize(self, os.close, fd)
        # An empty file cannot be mapped: it has a byte that no column has.
        memory = mmap.mmap(fd, max(1, nbytes))
        self._bytes: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)

    @classmethod
    def create(cls, nbytes: int) -> "Arena":
        """New memory of ``nbytes`` bytes, all 0. It cannot be made smaller or larger.

        Raises:
            OSError: a limit of this process (files, address space) does not allow it.
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
        """The memory of another process's arena. ``fd`` is the arena's from now on."""
        os.set_inheritable(fd, False)  # what comes over a socket would go to all children
        return cls(fd, nbytes)

    def __reduce__(self) -> tuple[Any, ...]:
        """Arrive, with the arguments of a process that is being started, as the same memory."""
        return _arrived, (DupFd(self.fd), self.nbytes)

    def array(self, shape: Shape, dtype: DTypeLike) -> NDArray[Any]:
        """The next array ``shape``, at a multiple of :data:`ALIGNMENT` bytes.

        Raises:
            ValueError: it does not fit: it was not measured.
        """
        kind = np.dtype(dtype)
        part = self._carve(math.prod(shape) * kind.itemsize)
        return part.view(kind).reshape(tuple(shape))

    def tensor(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """The next tensor ``shape``, at a multiple of :data:`ALIGNMENT` bytes.

        Raises:
            ValueError: it does not fit: it was not measured.
        """
        part = self._carve(math.prod(shape) * dtype.itemsize)
        return torch.from_numpy(part).view(dtype).reshape(tuple(shape))

    def _carve(self, nbytes: int) -> NDArray[np.uint8]:
        start = _next_start(self.end)
        if start + nbytes > self.nbytes:
            raise ValueError(
                f"expected {nbytes} bytes from byte {start} on, got an arena of {self.nbytes} "
                "bytes; carve in the order in which the arena was measured"
            )
        self.end = start + nbytes
        return self._bytes[start : self.end]


def _arrived(descriptor: Any, nbytes: int) -> Arena:
    return Arena.attach(descriptor.detach(), nbytes)


Area = Measure | Arena
"""Memory that is carved, or that is to be."""


# How much there is


def require(nbytes: int, what: str) -> None:
    """Raise unless ``nbytes`` of memory are to be had for ``what``.

    Shared memory is only taken when it is touched, and then it is too late for an error:
    the kernel kills a process.

    Raises:
        ArgumentError: they are not.
    """
    available = available_bytes()
    if nbytes > available:
        raise ArgumentError(
            f"expected {-(-nbytes // 2**20)} MiB of shared memory for {what}, got "
            f"{available // 2**20} MiB available; make frames_per_batch smaller, or use fewer "
            "lanes or workers"
        )
