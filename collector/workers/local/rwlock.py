"""Many readers or one writer, of any processes, for as long as they live."""

import contextlib
import fcntl
import os
import re
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from tallyroll.collector.errors import SharedMemoryBusy
from tallyroll.storage.files.lock import acquire, held


class FileLock:
    """A lock on an open file, by ``flock(2)``. The kernel releases it when its holder dies.

    Whatever was written before a release is seen after the acquisition that follows it, on every
    machine. A forked child has a lock of its own.

    Args:
        fd: a file descriptor of the file, a memfd for example; it stays the caller's.
        what: the file, in words, for messages.
        seconds: how long to wait at most.
    """

    def __init__(self, fd: int, what: str, seconds: float) -> None:
        self._what, self._seconds = what, seconds
        self._open(fd)
        held.add(self)

    def _open(self, fd: int) -> None:
        # Opened afresh: a duplicate of fd would share its locks with all other duplicates.
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._fd)
        # The threads of this process share our lock on the file.
        self._threads = threading.RLock()

    def close(self) -> None:
        """Close the file; done once is done."""
        self._close()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Hold it beside other readers, while no writer has it.

        Raises:
            SharedMemoryBusy: a writer did not come to an end in time.
        """
        with self._held(fcntl.LOCK_SH, "reading"):
            yield

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold it alone, without readers or other writers.

        Raises:
            SharedMemoryBusy: another one did not come to an end in time.
        """
        with self._held(fcntl.LOCK_EX, "writing"):
            yield

    @contextlib.contextmanager
    def _held(self, kind: int, purpose: str) -> Iterator[None]:
        deadline = time.monotonic() + self._seconds
        if not self._threads.acquire(timeout=self._seconds):
            raise self._busy(purpose)
        try:
            try:
                acquire(self._fd, kind, deadline - time.monotonic())
            except BlockingIOError:
                raise self._busy(purpose) from None
            yield
        finally:
            # Whatever came in between, a Ctrl-C for example: to release what is free is no harm.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self._threads.release()

    def _busy(self, purpose: str) -> SharedMemoryBusy:
        inside = " and ".join(map(_described, self._holders())) or "an unknown process"
        return SharedMemoryBusy(
            f"expected {self._what} for {purpose}, got no turn within {self._seconds:g} s: "
            f"{inside} "
            "holds the lock; let that process go on, or kill it"
        )

    def _holders(self) -> list[int]:
        file = os.fstat(self._fd)
        try:
            locks = Path("/proc/locks").read_text()
        except OSError:
            return []
        return holders(locks, file.st_dev, file.st_ino)

    def forked(self) -> None:
        """Give up the parent's lock, in a child that it forked, and have one of its own."""
        old, closed = self._fd, self._close.detach() is None
        if not closed:
            self._open(old)
            os.close(old)


def holders(locks: str, device: int, inode: int) -> list[int]:
    """Processes that hold a ``flock`` on a file, from the text of ``/proc/locks``."""
    file = f"{os.major(device):02x}:{os.minor(device):02x}:{inode}"
    lines = re.findall(r"^\d+: FLOCK +\w+ +\w+ +(\d+) (\S+)", locks, re.MULTILINE)
    return [int(process) for process, where in lines if where == file]


def _described(process: int) -> str:
    """The process, and what it is doing."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return f"process {process}"
    found = re.search(r"^State:\s+\w \(([\w ]+)\)$", status, re.MULTILINE)
    return f"process {process} ({found[1]})" if found else f"process {process}"
