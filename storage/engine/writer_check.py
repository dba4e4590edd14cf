"""Check that this process may still write to a storage, whose lock file may disappear."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tallyroll.storage.errors import DiskFailed, ReadOnlyStorage, StorageLocked, WriterForked
from tallyroll.storage.files.lock import WriterLock

LOOK_SECONDS = 0.05
"""Seconds between two checks that the lock file of a writer still exists."""


class WritePermission:
    """The writer's lock, and a periodic check that its file still exists.

    A check costs as much as copying five columns, so it is not made for every commit.

    Args:
        lock: the lock that this process holds, or None for a reader.
        path: the path of the storage, for messages.
    """

    def __init__(self, lock: WriterLock | None, path: Path) -> None:
        self._lock, self._path = lock, path
        self.look_at = 0.0
        """The time from which :meth:`look` checks again; 0 if this process may not write."""

    def drop(self) -> None:
        """Refuse further writes of this process."""
        self.look_at = 0.0

    @property
    def may_write(self) -> bool:
        """True if this process may write."""
        return self._lock is not None and not self._lock.lost and self._lock.is_in_place

    def look(self) -> None:
        """Raise a `WriteError` if a check is due and this process may not write."""
        if (now := time.monotonic()) >= self.look_at:
            self.require()
            self.look_at = now + LOOK_SECONDS

    def require(self) -> None:
        """Raise a `WriteError` unless this process may write."""
        if self._lock is None:
            raise ReadOnlyStorage(
                f'{self._path} was opened with mode="read". Open it with mode="append" to write.'
            )
        if self._lock.lost:
            raise WriterForked(
                f"this is a forked child of the process that writes to {self._path}. Write from "
                'the parent, or open the storage in the child with mode="read".'
            )
        if not self._lock.is_in_place:
            self._require_there()
            raise StorageLocked(
                f"the lock file of {self._path} was removed while this process was writing, so "
                "another process may be writing too. Committed rows are intact, and this process "
                "writes no more. Open the storage again, and never remove the lock file."
            )

    def require_there(self) -> None:
        """Raise `DiskFailed` if this process may write and the storage has disappeared."""
        if self._lock is not None and not self._lock.lost:
            self._require_there()

    def _require_there(self) -> None:
        if not os.path.lexists(self._path):
            raise DiskFailed(
                f"{self._path} was deleted or moved while this process was writing to it. "
                "Committed rows moved with it, and this process writes no more."
            )
