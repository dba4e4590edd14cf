"""The right of this process to write to a storage, which it may lose while it writes."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tallyroll.storage.errors import DiskFailed, ReadOnlyStorage, StorageLocked, WriterForked
from tallyroll.storage.files.lock import WriterLock

LOOK_SECONDS = 0.05
"""Seconds between two checks of a writer that its lock file still exists."""


class RightToWrite:
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

    @property
    def held(self) -> bool:
        """True if this process may write."""
        return self._lock is not None and not self._lock.lost and self._lock.stands

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
                f"{self._path} is written by the process that opened it, and this is a forked "
                "child of it. Write from the parent, or open the storage in the child with "
                'mode="read".'
            )
        if not self._lock.stands:
            self._require_there()
            raise StorageLocked(
                f"the lock file of {self._path} was removed while this process writes, so that "
                "another one may be writing too. Committed rows are intact, and nothing more is "
                "written from here; open the storage again, and never remove that file."
            )

    def require_there(self) -> None:
        """Raise `DiskFailed` if this process may write and the storage has disappeared."""
        if self._lock is not None and not self._lock.lost:
            self._require_there()

    def _require_there(self) -> None:
        if not os.path.lexists(self._path):
            raise DiskFailed(
                f"{self._path} was deleted or moved while this process writes to it. Committed "
                "rows moved with it; this process writes no more."
            )
