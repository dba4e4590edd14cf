"""Contiguous maps of several files, so that a column of many files is one array.

An anonymous map reserves the address space, and files are mapped over it. Python's `mmap` object
owns the map and unmaps all of it when the last array on it is freed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

Access: TypeAlias = Literal["read", "write", "private"]
"""The access mode of mapped rows. Changes to a private map stay in this process."""

# Python 3.11 lacks the name. Without the flag, Linux counts a private map against free memory.
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
PAGE_NBYTES = mmap.ALLOCATIONGRANULARITY
"""The granularity of maps. The map of a file in a region begins and ends at a multiple of it."""

_PROT_NONE = 0
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value
_DEFAULT_MOST_MAPS = 65530
_MAPS_FOR_OTHERS = 4096

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]


def _mode(access: Access) -> tuple[int, int]:
    """Return the flags and the protection of a map."""
    shared = access != "private"
    flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | _MAP_NORESERVE
    return flags, mmap.PROT_READ | (0 if access == "read" else mmap.PROT_WRITE)


def map_file(file: int, nbytes: int, access: Access) -> Region:
    """Map the first ``nbytes`` bytes of a file, or the whole file if ``nbytes`` is 0.

    The file may be closed afterwards.

    Raises:
        ValueError: the file is shorter, or empty.
        OSError: the system refuses.
    """
    size = os.fstat(file).st_size
    if not size or size < nbytes:
        raise ValueError(f"cannot map {nbytes} bytes of a file that has {size}")
    region = Region(nbytes or size, access)
    region.add(file, region.nbytes)
    return region


def pages(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


class Region:
    """Address space for ``nbytes`` bytes, into which files are mapped one after the other.

    A region holds no file descriptors. One `mmap` object per file would duplicate a descriptor for
    each of them.

    Args:
        nbytes: the size, which takes no memory until files are mapped.
        access: the access mode of the maps.

    Raises:
        OSError: the system does not provide that much address space.
    """

    def __init__(self, nbytes: int, access: Access) -> None:
        self.nbytes = nbytes
        self.mapped = self.maps = 0
        """The end of the last mapped file in bytes, and the number of mapped files."""
        self._access = access
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self.memory = mmap.mmap(-1, nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        """The whole region. Unmapped parts are zeros. Parts that are mapped for reading must not be
        written."""
        self.address = int(np.frombuffer(self.memory, np.uint8).ctypes.data)

    def add(self, file: int, nbytes: int, at: int | None = None) -> None:
        """Map the first ``nbytes`` bytes of ``file`` at byte ``at``, or after the mapped part.

        The file may be closed afterwards.

        Raises:
            OSError: the system refuses.
        """
        flags, prot = _mode(self._access)
        at = pages(self.mapped) if at is None else at
        if at + nbytes > self.nbytes:
            raise ValueError(
                f"{nbytes} bytes at offset {at} do not fit into a region of {self.nbytes} bytes."
            )
        where = self.address + at
        if _libc.mmap(where, nbytes, prot, flags | _MAP_FIXED, file, 0) == _FAILED:
            code = ctypes.get_errno()
            # The kernel may have unmapped the previous map. Cover the hole, so that it is not
            # reused.
            cover = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
            _libc.mmap(where, nbytes, _PROT_NONE, cover, -1, 0)
            raise OSError(code, os.strerror(code))
        self.mapped, self.maps = max(self.mapped, at + nbytes), self.maps + 1

    def array(self, dtype: np.dtype[np.generic], shape: tuple[int, ...], at: int = 0) -> np.ndarray:
        """Return an array from byte ``at``, within the mapped part. It keeps the region alive."""
        found: np.ndarray = np.ndarray(shape, dtype, buffer=self.memory, offset=at)
        if at + found.nbytes > self.mapped:
            raise ValueError(
                f"the array ends at byte {at + found.nbytes}, but only {self.mapped} bytes are "
                "mapped."
            )
        if self._access == "read":
            found.flags.writeable = False  # its pages are read-only
        return found

    def sync(self, start: int) -> None:
        """Wait until the files from byte ``start``, rounded down to a page, are on the disk."""
        start -= start % PAGE_NBYTES
        if self.mapped > start:
            self.memory.flush(start, self.mapped - start)

    def renew(self) -> bool:
        """Discard all changes to a private region, so that it shows the files again.

        Return False if the system does not support this.
        """
        if sys.platform != "linux":  # elsewhere the advice is only a hint
            return False
        try:
            self.memory.madvise(mmap.MADV_DONTNEED)
        except (OSError, ValueError):  # ValueError: closed at the exit of the interpreter
            return False
        return True


@dataclass(frozen=True, slots=True)
class Area:
    """All columns of a storage in one private region."""

    region: Region
    starts: tuple[int, ...]
    """The byte at which each column begins."""
    room: int
    """The number of mapped rows of each column."""


def maps_left() -> int:
    """Return the number of maps that this process may still make, minus a reserve for others."""
    try:
        most = int(Path("/proc/sys/vm/max_map_count").read_text())
        with open("/proc/self/maps", "rb") as maps:
            used = sum(1 for _ in maps)
    except (OSError, ValueError):
        most, used = _DEFAULT_MOST_MAPS, 0
    return max(0, most - used - _MAPS_FOR_OTHERS)
