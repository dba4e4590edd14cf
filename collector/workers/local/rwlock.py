"""A lock among processes for many readers or one writer, released when its holder dies."""

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

    Everything that was written before a release is visible after the next acquisition, on every
    machine. A forked child has its own lock.

    Args:
        fd: a file descriptor of the file, such as a memfd; the caller keeps ownership.
        what: description of the file, for messages.
        seconds: maximum time to wait.
    """

    def __init__(self, fd: int, what: str, seconds: float) -> None:
        self._what, self._seconds = what, seconds
        self._open(fd)
        held.add(self)

    def _open(self, fd: int) -> None:
        # Opened again, because a duplicate of fd would share its locks with all other duplicates.
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._fd)
        # Threads of this process share the lock on the file, and exclude each other by this lock.
        self._threads = threading.RLock()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._close()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Hold the lock together with other readers, while no writer has it.

        Raises:
            SharedMemoryBusy: a writer did not finish in time.
        """
        with self._locked(fcntl.LOCK_SH, "reading"):
            yield

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock exclusively, without readers or other writers.

        Raises:
            SharedMemoryBusy: a reader or a writer did not finish in time.
        """
        with self._locked(fcntl.LOCK_EX, "writing"):
            yield

    @contextlib.contextmanager
    def _locked(self, kind: int, purpose: str) -> Iterator[None]:
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
            # An interrupt may have prevented the lock, but unlocking an unlocked file is harmless.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self._threads.release()

    def _busy(self, purpose: str) -> SharedMemoryBusy:
        inside = " and ".join(map(_described, self._holders())) or "an unknown process"
        return SharedMemoryBusy(
            f"expected {self._what} for {purpose} within {self._seconds:g} s, got no access: "
            f"{inside} holds the lock. Let that process continue, or kill it."
        )

    def _holders(self) -> list[int]:
        file = os.fstat(self._fd)
        try:
            locks = Path("/proc/locks").read_text()
        except OSError:
            return []
        return holders(locks, file.st_dev, file.st_ino)

    def forked(self) -> None:
        """Replace the parent's lock by a new one, in a child that it forked."""
        old, closed = self._fd, self._close.detach() is None
        if not closed:
            self._open(old)
            os.close(old)


def holders(locks: str, device: int, inode: int) -> list[int]:
    """Return the processes that hold a ``flock`` on a file, from the text of ``/proc/locks``."""
    file = f"{os.major(device):02x}:{os.minor(device):02x}:{inode}"
    lines = re.findall(r"^\d+: FLOCK +\w+ +\w+ +(\d+) (\S+)", locks, re.MULTILINE)
    return [int(process) for process, where in lines if where == file]


def _described(process: int) -> str:
    """Describe a process, and its state."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return f"process {process}"
    found = re.search(r"^State:\s+\w \(([\w ]+)\)$", status, re.MULTILINE)
    return f"process {process} ({found[1]})" if found else f"process {process}"
