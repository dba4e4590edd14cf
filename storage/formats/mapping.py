"""Files mapped side by side, so that a column of many files is one array.

Address space is reserved by an anonymous map, of which Python's `mmap` object is the
owner: it unmaps all of it when the last array on it is gone. Files are mapped over it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

Access: TypeAlias = Literal["read", "write", "private"]
"""How rows are mapped; what is written to a private map stays in this process."""

# Not named by Python 3.11. Without it Linux counts a private map against free memory.
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
PAGE_NBYTES = mmap.ALLOCATIONGRANULARITY
"""What is mapped over a region begins and ends at multiples of it."""

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
    """The flags and the protection of a map."""
    shared = access != "private"
    flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | _MAP_NORESERVE
    return flags, mmap.PROT_READ | (0 if access == "read" else mmap.PROT_WRITE)


def map_file(file: int, nbytes: int, access: Access) -> mmap.mmap:
    """The first ``nbytes`` bytes of a file, or all with 0, mapped.

    Raises:
        ValueError: it is shorter.
        OSError: the system refuses.
    """
    flags, prot = _mode(access)
    return mmap.mmap(file, nbytes, flags=flags, prot=prot)


class Region:
    """Address space for ``nbytes`` bytes, into which files are mapped one behind the other.

    Args:
        nbytes: a multiple of `PAGE_NBYTES`. It costs nothing until files are mapped.
        access: how they are mapped.

    Raises:
        OSError: the system does not give that much.
    """

    def __init__(self, nbytes: int, access: Access) -> None:
        self.nbytes = nbytes
        self.mapped = 0
        """Bytes from the start that are files."""
        self._access = access
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._area = mmap.mmap(-1, nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self._address = int(np.frombuffer(self._area, np.uint8).ctypes.data)

    def add(self, file: int, nbytes: int) -> None:
        """Map the first ``nbytes`` bytes of ``file`` behind what is mapped.

        The file may be closed afterwards.

        Raises:
            OSError: the system refuses.
        """
        flags, prot = _mode(self._access)
        if self.mapped + nbytes > self.nbytes:
            raise ValueError(f"{nbytes} bytes behind {self.mapped} do not fit into {self.nbytes}.")
        where = self._address + self.mapped
        if _libc.mmap(where, nbytes, prot, flags | _MAP_FIXED, file, 0) == _FAILED:
            code = ctypes.get_errno()
            # The kernel may have unmapped what was there: no hole is left to others.
            cover = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
            _libc.mmap(where, nbytes, _PROT_NONE, cover, -1, 0)
            raise OSError(code, os.strerror(code))
        self.mapped += nbytes

    def array(self, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> np.ndarray:
        """An array from the start, no longer than what is mapped; it keeps the region alive."""
        found: np.ndarray = np.ndarray(shape, dtype, buffer=self._area)
        if found.nbytes > self.mapped:
            raise ValueError(f"{found.nbytes} bytes of {self.mapped} that are mapped.")
        if self._access == "read":
            found.flags.writeable = False  # the pages are not
        return found

    def sync(self, start: int) -> None:
        """Return when the files from byte ``start`` on are on the disk; ``start`` may be early."""
        start -= start % PAGE_NBYTES
        if self.mapped > start:
            self._area.flush(start, self.mapped - start)


def maps_left() -> int:
    """Number of maps that this process may still make, with some kept back for others."""
    try:
        most = int(Path("/proc/sys/vm/max_map_count").read_text())
        with open("/proc/self/maps", "rb") as maps:
            used = sum(1 for _ in maps)
    except (OSError, ValueError):
        most, used = _DEFAULT_MOST_MAPS, 0
    return max(0, most - used - _MAPS_FOR_OTHERS)
