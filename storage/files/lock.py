"""Locks on open files with ``flock(2)``, which end with their process.

A forked child does not keep its parent's locks. The writer of a storage holds the lock of that
storage. Locks also protect the weights that workers share.

`open_existing` and `create_new` take the lock of a storage, `ShardedWriter` that of a sharded
storage, and `lock_overlay` that of an overlay. If a writer dies, its lock is released immediately.
The next writer removes what was left: `Engine.__init__`, `OpenedFiles._finish_rewind`,
`Header.begin_writing`, and `AcknowledgedFile._open` for a sharded storage.

`WritePermission` (``storage/engine/writer_check.py``) refuses a forked child, and a writer whose
lock file was removed. Within a process, `RunClaim` (``storage/stores/run_claim.py``) keeps a second
run out.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import platform
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tallyroll.storage.errors import NotWritable, StorageLocked, UnsupportedPlatform
from tallyroll.storage.files.paths import FULL, OTHER_KINDS, failed
from tallyroll.storage.files.safe_files import Inside

try:
    import fcntl
except ImportError as error:  # Windows
    raise UnsupportedPlatform(
        "tallyroll.storage needs POSIX file locks and shared maps, which this platform does not "
        "have. Use Linux."
    ) from error


_ORDERED = ("x86_64", "AMD64")
_PATIENCE_SECONDS = 0.01
_PAUSES = (0.00005, 0.002)
"""The first and the longest pause between two tries, in seconds."""


class ForkAware(Protocol):
    """Object in `held` whose `forked` is called in every child that this process forks."""

    def forked(self) -> None:
        """Drop the parent's lock, which the child would otherwise keep after the parent's end."""


held: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def _drop_inherited_locks() -> None:
    for lock in list(held):
        lock.forked()


os.register_at_fork(after_in_child=_drop_inherited_locks)


def _caller() -> str:
    """Return the file and line outside this package that called into it."""
    frame = inspect.currentframe()
    while frame and frame.f_back and frame.f_globals.get("__name__", "").startswith("tallyroll."):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "an unknown location"


def _identity_of(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def acquire(file: int, kind: int, seconds: float) -> None:
    """Lock an open file, shared (LOCK_SH) or exclusive (LOCK_EX); retry for up to ``seconds``.

    Raises:
        BlockingIOError: another process held the lock for all of that time.
        OSError: the file system refuses.
    """
    deadline = time.monotonic() + seconds
    pause, longest = _PAUSES
    while True:
        try:
            return fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(pause)
        pause = min(2 * pause, longest)


def is_held(inside: Inside, path: Path) -> bool:
    """Return True if a living writer holds the lock, or if the lock cannot be tested."""
    try:
        file = inside.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError as error:
        return error.errno not in OTHER_KINDS
    try:
        # While this lock is held, for a moment, no writer can acquire its own. A writer therefore
        # retries in `acquire`.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        with contextlib.suppress(OSError):  # the file is closed even if this fails
            os.close(file)
    return False


class WriterLock:
    """Exclusive right to write, held from construction until `release`.

    In a forked child, `lost` is set and the lock is dropped, so that the lock ends with the parent
    process.

    Raises:
        StorageLocked: another writer holds the lock.
        NotWritable: the lock file cannot be opened for writing.
        UnsupportedPlatform: the file system does not support locks.
    """

    def __init__(self, inside: Inside, path: Path) -> None:
        self.lost = self.made = self.released = False
        """`made` is True if the lock file was missing. If another writer's lock file was removed,
        that writer may still be writing."""
        self.when_lost: Callable[[], None] | None = None
        """Callback that `forked` calls in a forked child, or None."""
        self._inside, self._path = inside, os.fspath(path)
        self._file = -1
        try:
            self._open(path)
            while not self.is_in_place:  # a failed creation removed the file before it was locked
                self._close()
                self._open(path)
            self.opened_at = _caller()
            held.add(self)
        except BaseException:
            self._close()
            raise

    def _open(self, path: Path) -> None:
        try:
            self.made = self.made or not os.path.lexists(path)
            self._file = self._inside.open(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno in OTHER_KINDS | FULL:
                raise failed(path, error, 0) from error
            raise NotWritable(
                f"{path} cannot be opened for writing ({error.strerror}). Open the storage with "
                'mode="read", or as a user who has write permission.'
            ) from error
        self._acquire(path)
        self.identity = _identity_of(os.fstat(self._file))

    def _close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    @property
    def is_in_place(self) -> bool:
        """True if the lock file that this process holds is still at its path.

        If the file was moved or deleted, another writer can create a new one and start.
        """
        try:
            return _identity_of(os.lstat(self._path)) == self.identity
        except OSError:
            return False

    def _acquire(self, path: Path) -> None:
        try:
            # A reader may hold the lock for a moment, see `is_held`.
            acquire(self._file, fcntl.LOCK_EX, _PATIENCE_SECONDS)
        except BlockingIOError as error:
            if (other := self._own_lock()) is not None:
                raise StorageLocked(
                    f"{path} is locked by this process itself: a storage has one writer at a time, "
                    f"and the one that was opened at {other.opened_at} is not closed. Use that "
                    "object, close it first (a collector that was given a path closes it in "
                    'shutdown()), or open the storage with mode="read".'
                ) from error
            holder = os.pread(self._file, 32, 0).decode(errors="replace").strip()
            raise StorageLocked(
                f"{path} is locked: a storage has one writer at a time, and "
                f"{f'process {holder}' if holder else 'another process'} is writing to it. Wait "
                'for it to close the storage, or open the storage with mode="read". The lock is '
                "released when that process ends: never remove the file."
            ) from error
        except OSError as error:
            raise UnsupportedPlatform(
                f"the file system of {path} cannot lock files ({error.strerror}), and without "
                "locks two writers would destroy each other's rows. Use a local file system."
            ) from error
        # The process id is used only in messages, so a full disk must not prevent writing.
        with contextlib.suppress(OSError):
            os.pwrite(self._file, f"{os.getpid():<31}\n".encode(), 0)

    def _own_lock(self) -> WriterLock | None:
        # Compare files instead of process ids, which another container may reuse.
        wanted = _identity_of(os.fstat(self._file))
        locks = (each for each in list(held) if isinstance(each, WriterLock) and each is not self)
        return next((each for each in locks if each.identity == wanted), None)

    def release(self) -> None:
        """Release the lock, so that the next writer can acquire it."""
        self.released = True
        held.discard(self)
        self.when_lost = None
        if not self.lost:
            self._close()

    def forked(self) -> None:
        """Drop the parent's lock in a forked child."""
        held.discard(self)
        self.lost = True
        self._close()
        if self.when_lost is not None:
            self.when_lost()

    def call_when_lost(self, follow: Callable[[], None]) -> None:
        """Call ``follow`` in a forked child, which loses the lock."""
        self.when_lost = follow


class ReaderLock:
    """Lock that keeps writers away from a ring that is being read, if the CPU requires this.

    A reader that checks ``reserve`` again after copying must see stores in the order in which the
    writer made them. x86-64 guarantees this order, so the lock does nothing there. Other CPUs do
    not guarantee it.

    Raises:
        UnsupportedPlatform: a writer holds the storage.
    """

    def __init__(self, inside: Inside, path: Path) -> None:
        self._file = -1
        if platform.machine() in _ORDERED:
            return
        with contextlib.suppress(OSError):
            self._file = inside.open(path, os.O_RDONLY)
            try:
                fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError as error:
                self.release()
                raise UnsupportedPlatform(
                    f"{path.parent} is a ring that is being written, and on {platform.machine()} a "
                    "reader might see half-overwritten rows. Read it after the writer has closed "
                    "it, or use a storage that keeps every row."
                ) from error

    def release(self) -> None:
        """Release the lock, so that writers can start."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
