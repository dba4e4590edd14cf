"""Blocks of objects, kept in memory and in a folder: of each no more bytes than its budget."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Final

from tallyroll.storage.files.safe_files import Inside

_SUFFIX: Final = ".block"
_LOCK: Final = "lock"


class MemoryBlocks:
    """The blocks that were used last; threads may use it at a time."""

    def __init__(self, nbytes: int) -> None:
        self._most, self._lock = nbytes, threading.Lock()
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self.nbytes = 0
        """Bytes that are kept."""

    def get(self, name: str) -> bytes | None:
        """Return a block that is kept."""
        with self._lock:
            if (found := self._kept.get(name)) is not None:
                self._kept.move_to_end(name)
            return found

    def put(self, name: str, content: bytes) -> None:
        """Keep a block, in the place of those that were not used for the longest time."""
        self.drop(name)
        with self._lock:
            if len(content) > self._most:
                return
            while self.nbytes + len(content) > self._most:
                self.nbytes -= len(self._kept.popitem(last=False)[1])
            self._kept[name] = content
            self.nbytes += len(content)

    def drop(self, name: str) -> None:
        """Keep a block no longer."""
        with self._lock:
            self.nbytes -= len(self._kept.pop(name, b""))


class DiskBlocks:
    """Blocks in a folder that several processes share.

    The folder is counted before each block that is added, under a lock that ends with the
    process: so the budget is that of all together, also after a kill. A block that cannot be kept,
    because another process adds one just now or the disk is full, is read from the store again:
    keeping it is of use, and never needed.

    Args:
        folder: made where it is missing, readable by its user alone.
        nbytes: the most bytes of files in it.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self._folder, self._most, self._inside = folder, nbytes, Inside(folder)
        self._turn = threading.Lock()

    def _path(self, name: str) -> Path:
        return self._folder / (name + _SUFFIX)

    def get(self, name: str, nbytes: int) -> bytes | None:
        """Return a block of so many bytes; None where there is none."""
        path = self._path(name)
        with contextlib.suppress(OSError):
            content = self._inside.read(path, nbytes)
            if len(content) == nbytes:
                os.utime(path, follow_symlinks=False)
                return content
        return None

    def put(self, name: str, content: bytes) -> None:
        """Keep a block, in the place of those that were not used for the longest time."""
        if len(content) > self._most:
            return
        with self._turn, contextlib.suppress(OSError):
            lock = self._inside.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._make_room(len(content))
                self._inside.write_aside(self._path(name), content)
            finally:
                os.close(lock)

    def _make_room(self, nbytes: int) -> None:
        found = []
        for each in os.scandir(self._folder):
            if each.name != _LOCK and each.is_file(follow_symlinks=False):
                stat = each.stat(follow_symlinks=False)
                found.append((stat.st_mtime_ns, stat.st_size, each.name))
        left = sum(size for _, size, _ in found) + nbytes - self._most
        for _, size, name in sorted(found):
            if left <= 0:
                break
            if _SUFFIX in name:  # no file of another program
                self._inside.remove(self._folder / name)
                left -= size
        if left > 0:
            raise OSError("there is no room")

    def drop(self, name: str) -> None:
        """Keep a block no longer."""
        with contextlib.suppress(OSError):
            self._inside.remove(self._path(name))
