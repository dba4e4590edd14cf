"""The durable copy of a ring in device memory."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from contextlib import suppress
from typing import Final, NamedTuple, NoReturn

from tallyroll.storage.engine.columns import ArrayRows
from tallyroll.storage.errors import NotAnAppend, StorageError, WriteError
from tallyroll.storage.storages import MemmapStorage
from tallyroll.storage.stores.row_writer import RowWriter

_CHECK_SECONDS: Final = 1.0
"""Time between two checks whether the thread still runs."""


class _Append(NamedTuple):
    rows: ArrayRows
    at: int
    record: bytes | None


class Mirror:
    """Storage on disk that gets the rows of a ring in the same order, and commits them.

    Args:
        storage: the storage on disk, open for writing.
        lag: maximum number of rows that the ring may be ahead. With 0, each append is committed
            before the call returns. Otherwise, a thread commits the appends, and a writer waits
            until its rows fit within the lag.
        owned: True to close the storage with the mirror.
    """

    def __init__(self, storage: MemmapStorage, lag: int, *, owned: bool) -> None:
        assert isinstance(storage.writer, RowWriter)
        self.storage, self.writer, self.lag = storage, storage.writer, lag
        self._owned, self._closed = owned, False
        self._changed = threading.Condition()
        """Lock of the fields below, which is notified when one of them changes."""
        self._queue: deque[_Append] = deque()
        self._uncommitted = 0
        """Number of rows that were put in the queue and are not committed."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        _open.add(self)

    @property
    def committed(self) -> int:
        """Number of rows ever committed to the disk."""
        return self.storage.reader.last_head

    def put(self, rows: ArrayRows, at: int, record: bytes | None) -> None:
        """Queue rows for the thread. The caller has called :meth:`admit`.

        The arrays must not change later.
        """
        with self._changed:
            self._queue.append(_Append(rows, at, record))
            self._uncommitted += rows.count
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._commit_queue, name="tallyroll-mirror", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def admit(self, count: int) -> None:
        """Wait until ``count`` more rows fit within the lag.

        Raises:
            WriteError: the disk has refused earlier rows.
        """
        self._wait_until_uncommitted(self.lag - count)

    def wait(self) -> None:
        """Wait until all rows are committed.

        Raises:
            WriteError: the disk has refused rows.
        """
        self._wait_until_uncommitted(0)

    def close(self) -> None:
        """Commit the queued rows and stop the thread; close the storage if the mirror owns it.

        A second call has no effect.

        Raises:
            WriteError: the disk has refused rows.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
        finally:
            thread = self._thread
            with self._changed:
                self._changed.notify_all()
            if thread is not None:
                thread.join()
            if self._owned:
                self.storage.close()

    def _wait_until_uncommitted(self, limit: int) -> None:
        """Wait until at most ``limit`` queued rows are not committed."""
        with self._changed:
            while self._error is None and self._uncommitted > limit:
                self._changed.wait(_CHECK_SECONDS)
                if self._error is None and self._uncommitted > limit and not self._is_running:
                    self._error = RuntimeError("the thread that writes has ended")
            if self._error is not None:
                self._refuse(self._error)

    @property
    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _refuse(self, error: BaseException) -> NoReturn:
        raise WriteError(
            f"mirror: {self.storage.path} has committed {self.committed:,} rows and refused the "
            f"next ones ({type(error).__name__}: {error}). Later rows are only on the device. "
            "Correct the cause, make the DeviceStorage again and resume the run."
        ) from error

    def require_next(self, at: int) -> None:
        """Raise `NotAnAppend` if the next row on the disk has another number than ``at``."""
        if at != self.writer.reader.head:
            raise NotAnAppend(
                f"mirror: expected {self.storage.path} to have {at:,} rows, got "
                f"{self.writer.reader.head:,}, because something else has written to it. Nothing "
                "was written. Write only to the DeviceStorage, and make it again to continue."
            )

    def _commit_queue(self) -> None:
        """Commit queued appends until the mirror is closed; the target of the thread."""
        while True:
            with self._changed:
                while not self._queue:
                    if self._closed:
                        return
                    self._changed.wait()
                append = self._queue[0]
            try:
                self.require_next(append.at)
                self.writer.append(append.rows, append.record)
            except BaseException as error:  # noqa: BLE001 - the next call of the writer raises it
                with self._changed:
                    self._error = error
                    self._queue.clear()
                    self._changed.notify_all()
                return
            with self._changed:
                self._queue.popleft()
                self._uncommitted -= append.rows.count
                self._changed.notify_all()


_open: weakref.WeakSet[Mirror] = weakref.WeakSet()


@atexit.register  # after that of the storages, so that it runs before it
def _close_all() -> None:
    for mirror in list(_open):
        with suppress(StorageError):  # no caller is left
            mirror.close()
