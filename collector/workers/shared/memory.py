"""Memory that processes share, without a name, and how much of it there is to be had.

A memfd has no name in ``/dev/shm``: the kernel frees it with the last process that holds it,
however that process ends. Only its file descriptor travels, by
``multiprocessing.reduction.send_handle``.
"""

import fcntl
import math
import mmap
import os
import re
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from tallyroll.collector.errors import ArgumentError

ALIGNMENT = 64
"""Bytes, a cache line: two processes that write neighbours do not slow each other down."""

Shape = Sequence[int]


class Area(Protocol):
    """Memory for arrays: an :class:`Arena`, or a :class:`Measure` of one to be."""

    @property
    def end(self) -> int:
        """Bytes carved so far."""

    def array(self, shape: Shape, dtype: DTypeLike) -> NDArray[Any]:
        """The next array."""

    def tensor(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """The next tensor."""


def _next_start(end: int) -> int:
    return -(-end // ALIGNMENT) * ALIGNMENT


class Measure:
    """Adds up what the same calls would carve from an :class:`Arena`.

    What it returns has shape and dtype, and no memory.
    """

    def __init__(self) -> None:
        self._end = 0

    @property
    def end(self) -> int:
        """Bytes wanted so far: the size of an arena that can hold them."""
        return self._end

    def _add(self, nbytes: int) -> None:
        self._end = _next_start(self._end) + nbytes

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
    :meth:`create` or :meth:`attach`.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        """The memory's file descriptor; the arena's to close."""
        self.nbytes = nbytes
        self._end = 0
        self._release = weakref.finalize(self, os.close, fd)
        try:
            # An empty file cannot be mapped: it has a byte that belongs to nobody.
            memory = mmap.mmap(fd, max(1, nbytes))
        except BaseException:
            self._release()
            raise
        self._bytes: NDArray[np.uint8] | None = np.frombuffer(memory, np.uint8)

    @classmethod
    def create(cls, nbytes: int) -> "Arena":
        """New memory of ``nbytes`` bytes, all 0. Nobody can make it smaller or larger.

        Raises:
            OSError: a limit of this process (files, address space) does not allow it.
        """
        fd = os.memfd_create("tallyroll", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, max(1, nbytes))
            # A file that shrinks under its map kills whoever touches it.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, nbytes)

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> "Arena":
        """The memory of another process's arena. ``fd`` is the arena's from now on.

        Raises:
            ValueError: there is less of it than ``nbytes``.
        """
        os.set_inheritable(fd, False)  # what comes over a socket would go to all children
        size = os.fstat(fd).st_size
        if size < nbytes:
            os.close(fd)
            raise ValueError(
                f"expected {nbytes} bytes of shared memory to attach to, got a file of {size}; "
                "attach with the nbytes of the arena that was created"
            )
        return cls(fd, nbytes)

    @property
    def end(self) -> int:
        """Bytes carved so far."""
        return self._end

    def array(self, shape: Shape, dtype: DTypeLike) -> NDArray[Any]:
        """The next array ``shape``, at a multiple of :data:`ALIGNMENT` bytes.

        Raises:
            ValueError: it does not fit, or the arena is closed.
        """
        kind = np.dtype(dtype)
        part = self._carve(math.prod(shape) * kind.itemsize, f"{tuple(shape)} of {kind}")
        return part.view(kind).reshape(tuple(shape))

    def tensor(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """The next tensor ``shape``, at a multiple of :data:`ALIGNMENT` bytes.

        Raises:
            ValueError: it does not fit, or the arena is closed.
        """
        part = self._carve(math.prod(shape) * dtype.itemsize, f"{tuple(shape)} of {dtype}")
        return torch.from_numpy(part).view(dtype).reshape(tuple(shape))

    def _carve(self, nbytes: int, what: str) -> NDArray[np.uint8]:
        if self._bytes is None:
            raise ValueError(f"expected {what} from an arena that is closed; carve before closing")
        start = _next_start(self._end)
        if start + nbytes > self.nbytes:
            raise ValueError(
                f"expected {what}, {nbytes} bytes from byte {start} on, got an arena of "
                f"{self.nbytes} bytes; carve in the order in which the arena was measured"
            )
        self._end = start + nbytes
        return self._bytes[start : self._end]

    def close(self) -> None:
        """Give the memory back; what was carved stays usable, and keeps it, until it is gone."""
        self._release()
        self._bytes = None  # the map goes with the last view of it


# How much there is


@dataclass(frozen=True)
class _Files:
    """Names of a cgroup's files, and of the entry that says what the kernel would give back."""

    limit: str
    used: str
    reclaimable: str


_V2 = _Files("memory.max", "memory.current", "inactive_file")
_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def require(nbytes: int, what: str) -> None:
    """Raise unless ``nbytes`` of memory are to be had for ``what``.

    Shared memory is only taken when it is touched, and then there is nobody left to tell: the
    kernel kills a process.

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


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that can still be taken: the least of what the machine and the cgroups leave.

    File cache that the kernel would give back counts as free, swap does not count. Where the
    system does not say, there is no limit. ``root`` is where ``proc`` and ``sys`` are.
    """
    left = [mem_available(_read(root / "proc/meminfo"))]
    mounts, paths = _read(root / "proc/self/mountinfo"), _read(root / "proc/self/cgroup")
    for folder, files in cgroup_folders(mounts, paths):
        place = root / folder.relative_to("/")
        limit, used = _read(place / files.limit), _read(place / files.used)
        left.append(left_in_cgroup(limit, used, _read(place / "memory.stat"), files.reclaimable))
    return min((number for number in left if number is not None), default=sys.maxsize)


def _read(path: Path) -> str:
    """The text, empty where there is none to be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def mem_available(meminfo: str) -> int | None:
    """Bytes, from the text of ``/proc/meminfo``; None where it does not say."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def left_in_cgroup(limit: str, used: str, stat: str, reclaimable: str) -> int | None:
    """Bytes that a cgroup leaves, from the texts of its files; None without a limit.

    Args:
        limit: a number of bytes, or ``max``.
        used: a number of bytes.
        stat: lines of a name and a number, of which ``reclaimable`` can be had back.
        reclaimable: that name.
    """
    if not limit.strip().isdecimal() or not used.strip().isdecimal():
        return None
    found = re.search(rf"^{reclaimable} (\d+)$", stat, re.MULTILINE)
    cache = int(found[1]) if found else 0
    return max(0, int(limit) - max(0, int(used) - cache))


def cgroup_folders(mountinfo: str, cgroup: str) -> Iterator[tuple[PurePosixPath, _Files]]:
    """Folders of the process's memory cgroup and of its parents, innermost first.

    Args:
        mountinfo: the text of ``/proc/self/mountinfo``.
        cgroup: the text of ``/proc/self/cgroup``.
    """
    paths = dict(_cgroup_paths(cgroup))
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        head, tail = before.split(), after.split()
        if len(head) < 5 or len(tail) < 3:
            continue
        kind, options = tail[0], tail[2].split(",")
        if kind == "cgroup2":
            files, path = _V2, paths.get("")
        elif kind == "cgroup" and "memory" in options:
            files, path = _V1, paths.get("memory")
        else:
            continue
        top = PurePosixPath(_unescaped(head[4]))
        if path is None or not top.is_absolute():
            continue
        inside = top / _below(path, _unescaped(head[3]))
        yield from ((folder, files) for folder in (inside, *inside.parents) if _is_in(folder, top))


def _cgroup_paths(cgroup: str) -> Iterator[tuple[str, str]]:
    """Of each controller, and under the empty name of version 2, the process's path."""
    for line in cgroup.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        yield from ((name, path) for name in controllers.split(","))


def _below(path: str, mounted: str) -> PurePosixPath:
    """``path`` as seen from ``mounted``, the part of the hierarchy that is visible here."""
    whole = PurePosixPath(path)
    if ".." in whole.parts or not _is_in(whole, PurePosixPath(mounted)):
        return PurePosixPath()  # a container, whose own cgroup is what it sees
    return whole.relative_to(mounted)


def _is_in(path: PurePosixPath, folder: PurePosixPath) -> bool:
    return path.is_relative_to(folder)


def _unescaped(field: str) -> str:
    """A path as it is: the kernel writes a blank as its octal code."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)
