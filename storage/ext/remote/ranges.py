"""Read ranges of objects in blocks, with caches in memory and on disk and with prefetching."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from tallyroll.storage.ext.remote.address import S3Path
from tallyroll.storage.ext.remote.objects import ListedObject, Objects
from tallyroll.storage.files.safe_files import Inside

_SUFFIX: Final = ".block"
_LOCK: Final = "lock"


class MemoryBlocks:
    """An LRU cache of blocks in memory. It is thread-safe."""

    def __init__(self, nbytes: int) -> None:
        self._most, self._lock = nbytes, threading.Lock()
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self.nbytes = 0
        """The size in bytes of all blocks in the cache."""

    def get(self, name: str) -> bytes | None:
        """Return a block from the cache, or None."""
        with self._lock:
            if (found := self._kept.get(name)) is not None:
                self._kept.move_to_end(name)
            return found

    def put(self, name: str, content: bytes) -> None:
        """Add a block, and evict the least recently used ones."""
        self.drop(name)
        with self._lock:
            if len(content) > self._most:
                return
            while self.nbytes + len(content) > self._most:
                self.nbytes -= len(self._kept.popitem(last=False)[1])
            self._kept[name] = content
            self.nbytes += len(content)

    def drop(self, name: str) -> None:
        """Remove a block."""
        with self._lock:
            self.nbytes -= len(self._kept.pop(name, b""))


class DiskBlocks:
    """A cache of blocks in a folder that several processes share.

    Before the cache adds a block, it sums the file sizes in the folder. It holds a lock meanwhile,
    which the system releases when the process ends. The budget thus covers all processes, also
    after a kill. A block is not kept if another process is adding one, or if the disk is full.
    Readers then read the block from the store again.

    Args:
        folder: the folder. A missing folder is created, readable by its user only.
        nbytes: the maximum size in bytes of all files in the folder.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self._folder, self._most, self._inside = folder, nbytes, Inside(folder)
        self._turn = threading.Lock()

    def _path(self, name: str) -> Path:
        return self._folder / (name + _SUFFIX)

    def get(self, name: str, nbytes: int) -> bytes | None:
        """Return a block of ``nbytes`` bytes, or None if it is not in the cache."""
        path = self._path(name)
        with contextlib.suppress(OSError):
            content = self._inside.read(path, nbytes)
            if len(content) == nbytes:
                os.utime(path, follow_symlinks=False)
                return content
        return None

    def put(self, name: str, content: bytes) -> None:
        """Add a block, and evict the least recently used ones."""
        if len(content) > self._most:
            return
        with self._turn, contextlib.suppress(OSError):
            lock = self._inside.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._make_room(len(content))
                self._inside.write_atomically(self._path(name), content)
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
            if _SUFFIX in name:  # spare the files of other programs
                self._inside.remove(self._folder / name)
                left -= size
        if left > 0:
            raise OSError("the cache has no room for the block")

    def drop(self, name: str) -> None:
        """Remove a block."""
        with contextlib.suppress(OSError):
            self._inside.remove(self._path(name))


class ObjectFiles:
    """`ShardFiles` for the objects of a dataset, as listed when the dataset was opened.

    Args:
        objects: the objects of the dataset.
    """

    def __init__(self, objects: Objects) -> None:
        self.root: S3Path = objects.place
        self.objects, options = objects, objects.options
        self.listed: dict[str, ListedObject] = objects.listed()
        self._size, self._options = options.block_nbytes, options
        self.memory = MemoryBlocks(options.memory_nbytes)
        folder = options.folder
        self.disk = None if folder is None else DiskBlocks(Path(folder), options.disk_nbytes)
        self._lock = threading.Lock()
        self._coming: dict[str, Future[bytes]] = {}
        self._distrusted: Counter[str] = Counter()
        """The number of times that each block was damaged. The copy on disk may be at fault."""
        self._pool: ThreadPoolExecutor | None = None
        self.requests = self.nbytes = 0
        """The number of blocks requested so far, and their total size in bytes."""

    def open(self, path: Path) -> str:
        """Return the name of an object."""
        name = "/".join(path.parts[len(self.root.parts) :])
        if name not in self.listed:
            raise FileNotFoundError(f"{path} does not exist")
        return name

    def size(self, file: str) -> int:
        """Return the size of an object in bytes."""
        return self.listed[file].nbytes

    def close(self, file: str) -> None:
        """Do nothing: objects hold no connection."""

    def read(self, file: str, nbytes: int, begin: int) -> bytes:
        """Read bytes of an object. The result is shorter at the end of the object."""
        self.objects.require_own_process()
        stop = min(begin + nbytes, self.size(file))
        blocks = [*self._blocks(file, begin, stop)]
        for number, name in blocks[1:]:
            self._ask(file, number, name)
        found = b"".join(self._block(file, number, name) for number, name in blocks)
        first = begin - blocks[0][0] * self._size if blocks else 0
        return found[first : first + stop - begin]

    def _blocks(self, file: str, begin: int, stop: int) -> Iterator[tuple[int, str]]:
        """Yield the number of each block in a range, and the name of the block in the caches."""
        if begin >= stop:
            return
        listed = self.listed[file]
        known = (self._options.url, str(self.root / file), listed.etag, listed.nbytes, self._size)
        # The name depends on the version of the object.
        name = hashlib.sha256(repr(known).encode()).hexdigest()[:40]
        for number in range(begin // self._size, -(-stop // self._size)):
            yield number, f"{name}-{number}"

    def _block(self, file: str, number: int, name: str) -> bytes:
        found = self.memory.get(name)
        return self._ask(file, number, name).result() if found is None else found

    def _ask(self, file: str, number: int, name: str) -> Future[bytes]:
        """Return the future of a block. Concurrent readers share one request."""
        with self._lock:
            coming = self._coming.get(name)
            if coming is None:
                if (kept := self.memory.get(name)) is not None:
                    coming = Future()
                    coming.set_result(kept)
                    return coming
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(
                        self._options.requests, thread_name_prefix="tallyroll-objects"
                    )
                coming = self._coming[name] = self._pool.submit(
                    self._fetch, file, number, name, self._distrusted[name]
                )
            return coming

    def _fetch(self, file: str, number: int, name: str, distrusted: int) -> bytes:
        found = None
        try:
            listed = self.listed[file]
            begin = number * self._size
            stop = min(begin + self._size, listed.nbytes)
            if self.disk is not None and not distrusted:
                found = self.disk.get(name, stop - begin)
            if found is None:
                with self._lock:
                    self.requests, self.nbytes = self.requests + 1, self.nbytes + stop - begin
                found = self.objects.read(file, begin, stop, listed)
                if self.disk is not None:
                    self.disk.put(name, found)
            return found
        finally:
            with self._lock:
                if self._distrusted[name] == distrusted:  # otherwise another request is in progress
                    self._coming.pop(name, None)
                    if found is not None:
                        self.memory.put(name, found)

    def will_read(self, file: str, nbytes: int, begin: int) -> None:
        """Prefetch blocks, as long as those in flight fit into half of the memory budget."""
        self.objects.require_own_process()
        stop = min(begin + nbytes, self.size(file))
        for number, name in self._blocks(file, begin, stop):
            # More blocks could evict each other before they are read.
            if 2 * len(self._coming) * self._size < self._options.memory_nbytes:
                self._ask(file, number, name)

    def distrust(self, file: str, nbytes: int, begin: int) -> bool:
        """Drop all copies of damaged bytes, and return True: a retry reads them from the store."""
        for _, name in self._blocks(file, begin, min(begin + nbytes, self.size(file))):
            with self._lock:  # a request in flight may have read the same copy
                self._distrusted[name] += 1
                self._coming.pop(name, None)
                self.memory.drop(name)
            if self.disk is not None:
                self.disk.drop(name)
        return True

    def whole(self, path: Path, limit: int) -> bytes:
        """Return an object of at most ``limit`` bytes. The caches do not keep it.

        Raises:
            FileNotFoundError: there is no such object.
            ValueError: the object is larger.
        """
        file = self.open(path)
        listed = self.listed[file]
        if listed.nbytes > limit:
            raise ValueError(f"it has {listed.nbytes:,} bytes, expected at most {limit:,}")
        return self.objects.read(file, 0, listed.nbytes, listed)

    def end(self) -> None:
        """Stop the threads after their current requests."""
        pool, self._pool = self._pool, None
        if pool is not None and self.objects.is_of_this_process:
            pool.shutdown(wait=True, cancel_futures=True)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a reader of an object store cannot be pickled: open its address in each process"
        )
