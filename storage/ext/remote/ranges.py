"""Bytes of objects, read by blocks that are kept, and asked for before they are wanted."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tallyroll.storage.ext.remote.address import S3Path
from tallyroll.storage.ext.remote.blocks import DiskBlocks, MemoryBlocks
from tallyroll.storage.ext.remote.objects import Found, Objects


class ObjectFiles:
    """The objects of a dataset, as they were when it was opened, as `ShardFiles`.

    Args:
        objects: where they are.
    """

    def __init__(self, objects: Objects) -> None:
        self.root: S3Path = objects.place
        self.objects, options = objects, objects.options
        self.listed: dict[str, Found] = objects.listed()
        self._size, self._options = options.block_nbytes, options
        self.memory = MemoryBlocks(options.memory_nbytes)
        folder = options.folder
        self.disk = None if folder is None else DiskBlocks(Path(folder), options.disk_nbytes)
        self._lock = threading.Lock()
        self._coming: dict[str, Future[bytes]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self.requests = self.nbytes = 0
        """Blocks, and their bytes, that were asked for so far."""

    def open(self, path: Path) -> str:
        """Return the name of an object."""
        name = "/".join(path.parts[len(self.root.parts) :])
        if name not in self.listed:
            raise FileNotFoundError(f"{path} is not there")
        return name

    def size(self, file: str) -> int:
        """Return the bytes of an object."""
        return self.listed[file].nbytes

    def close(self, file: str) -> None:
        """Do nothing: no connection is an object's own."""

    def read(self, file: str, nbytes: int, begin: int) -> bytes:
        """Return bytes of an object, fewer where it ends."""
        self.objects.require_own_process()
        stop = min(begin + nbytes, self.size(file))
        blocks = [*self._blocks(file, begin, stop)]
        for number, name in blocks[1:]:
            self._ask(file, number, name)
        found = b"".join(self._block(file, number, name) for number, name in blocks)
        first = begin - blocks[0][0] * self._size if blocks else 0
        return found[first : first + stop - begin]

    def _blocks(self, file: str, begin: int, stop: int) -> Iterator[tuple[int, str]]:
        """Yield the number of each block of a range, and the name by which it is kept."""
        if begin >= stop:
            return
        listed = self.listed[file]
        known = (self._options.url, str(self.root / file), listed.etag, listed.nbytes, self._size)
        # By what it is: another version of the object is another block.
        name = hashlib.sha256(repr(known).encode()).hexdigest()[:40]
        for number in range(begin // self._size, -(-stop // self._size)):
            yield number, f"{name}-{number}"

    def _block(self, file: str, number: int, name: str) -> bytes:
        found = self.memory.get(name)
        return self._ask(file, number, name).result() if found is None else found

    def _ask(self, file: str, number: int, name: str) -> Future[bytes]:
        """Return a block that comes: one request for all who want it."""
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
                coming = self._coming[name] = self._pool.submit(self._fetch, file, number, name)
            return coming

    def _fetch(self, file: str, number: int, name: str) -> bytes:
        try:
            listed = self.listed[file]
            begin = number * self._size
            stop = min(begin + self._size, listed.nbytes)
            found = None if self.disk is None else self.disk.get(name, stop - begin)
            if found is None:
                with self._lock:
                    self.requests, self.nbytes = self.requests + 1, self.nbytes + stop - begin
                found = self.objects.read(file, begin, stop, listed)
                if self.disk is not None:
                    self.disk.put(name, found)
            self.memory.put(name, found)
            return found
        finally:
            with self._lock:
                self._coming.pop(name, None)

    def will_read(self, file: str, nbytes: int, begin: int) -> None:
        """Ask for blocks that are wanted next, as far as half of the memory has room for them."""
        self.objects.require_own_process()
        stop = min(begin + nbytes, self.size(file))
        for number, name in self._blocks(file, begin, stop):
            # Those that come faster than they are read would take the place of each other.
            if 2 * len(self._coming) * self._size < self._options.memory_nbytes:
                self._ask(file, number, name)

    def distrust(self, file: str, nbytes: int, begin: int) -> bool:
        """Keep no copy of these bytes, which are not what was written: they can be read again."""
        for _, name in self._blocks(file, begin, min(begin + nbytes, self.size(file))):
            self.memory.drop(name)
            if self.disk is not None:
                self.disk.drop(name)
        return True

    def whole(self, path: Path, limit: int) -> bytes:
        """Return an object of at most ``limit`` bytes, which is not kept.

        Raises:
            FileNotFoundError: it is not there.
            ValueError: it has more bytes.
        """
        file = self.open(path)
        listed = self.listed[file]
        if listed.nbytes > limit:
            raise ValueError(f"it has {listed.nbytes:,} bytes, and may have {limit:,}")
        return self.objects.read(file, 0, listed.nbytes, listed)

    def end(self) -> None:
        """End the threads; what they ask for just now comes to its end first."""
        pool, self._pool = self._pool, None
        if pool is not None and self.objects.is_of_this_process:
            pool.shutdown(wait=True, cancel_futures=True)

    def __reduce__(self) -> Any:
        raise TypeError("objects of a store are opened in each process by their address")
