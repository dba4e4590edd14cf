"""Rate limit: the number of rows drawn per row written, across processes and threads."""

from __future__ import annotations

import fcntl
import math
import os
import struct
import threading
import time
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tallyroll.storage.errors import RateStalled, ReadOnlyStorage, StateMismatch
from tallyroll.storage.ext.overlays.overlaid_storage import storage_of_rows
from tallyroll.storage.files.paths import translated
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.sampling.sampled_storage import require_storage

_NAME: Final = b"tallyroll drawn "
_BLOCK: Final = struct.Struct("<32s64s4QI")
_MAGIC: Final = _NAME + b"1\n"
MOST: Final = 2**53
"""Upper bound of rows drawn or written, so that sums of a few counts fit into 64 bits."""


@dataclass(frozen=True, slots=True)
class RateCounts:
    """Counts since the file was created."""

    first_row: int = 0
    """The row from which rows are counted."""
    drawn: int = 0
    """The number of rows drawn."""
    most_drawn: int = 0
    """The largest number of rows in one request to draw."""
    most_written: int = 0
    """The largest number of rows in one request to write."""


def _packed(owner: str, counts: RateCounts) -> bytes:
    told = (counts.first_row, counts.drawn, counts.most_drawn, counts.most_written)
    block = _BLOCK.pack(_MAGIC, owner.encode(), *told, 0)
    return block[:-4] + zlib.crc32(block[:-4]).to_bytes(4, "little")


def _unpacked(block: bytes, owner: str) -> RateCounts:
    """Parse a block; raise ValueError if it is invalid or has another owner."""
    if len(block) != _BLOCK.size:
        raise ValueError(f"expected {_BLOCK.size} bytes, got {len(block)}")
    name, whose, *told, check = _BLOCK.unpack(block)
    if name.rstrip(b"\0") != _MAGIC:
        raise ValueError("it has another version, or Tallyroll did not write it")
    if zlib.crc32(block[:-4]) != check:
        raise ValueError("its checksum does not match")
    if whose.rstrip(b"\0") != owner.encode():
        raise ValueError("it belongs to another storage")
    if max(told) >= MOST:
        raise ValueError("its counts are out of range")
    return RateCounts(*told)


class RateFile:
    """File of the counts, which the first change opens or creates.

    Args:
        inside: the directory of the file.
        path: the file.
        owner: the id of the storage.
        first_row: the row from which this process counts rows. The file stores the smallest one of
            all processes.
    """

    def __init__(self, inside: Inside, path: Path, owner: str, first_row: int) -> None:
        self.path = path
        self._inside, self._owner, self._first_row = inside, owner, first_row
        self._turn = threading.Lock()
        self._file = self._process = -1

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        with self._turn:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1

    def change(
        self, change: Callable[[RateCounts], RateCounts]
    ) -> tuple[RateCounts, str | None] | None:
        """Replace the counts by the result of ``change``.

        Returns:
            None if another thread or process is changing the counts: try again. Otherwise the new
            counts, and the reason why counting was restarted, which is None unless the file was
            unusable.

        Raises:
            NotWritable, StorageFull: the file cannot be written.
        """
        if self._process not in (-1, os.getpid()):  # a thread of the parent may hold `_turn`
            self._turn = threading.Lock()
        if not self._turn.acquire(blocking=False):
            return None
        try:
            with translated(self.path, _BLOCK.size):
                return self._change(change)
        finally:
            self._turn.release()

    def _change(
        self, change: Callable[[RateCounts], RateCounts]
    ) -> tuple[RateCounts, str | None] | None:
        if self._file < 0 or self._process != os.getpid():  # a forked child would share the lock
            self._open()
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        try:
            if not os.fstat(self._file).st_nlink:  # removed: the next call creates another file
                os.close(self._file)
                self._file = -1
                return None
            block, why = os.pread(self._file, _BLOCK.size + 1, 0), None
            try:
                was = _unpacked(block, self._owner) if block else RateCounts(self._first_row)
            except ValueError as error:
                was, why = RateCounts(self._first_row), str(error)
            was = replace(was, first_row=min(was.first_row, self._first_row))
            now = change(was)
            packed = _packed(self._owner, now)
            if packed != block:
                os.pwrite(self._file, packed, 0)
                os.ftruncate(self._file, len(packed))
            return now, why
        finally:
            if self._file >= 0:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _open(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._file = self._inside.open(self.path, os.O_RDWR | os.O_CREAT)
        self._process = os.getpid()


_PAUSES: Final = (0.00005, 0.005)
"""The first and the longest pause between two attempts, in seconds."""


class RateLimit:
    """Limiter that keeps learning and collecting in step, by samples per inserted row::

        limit = RateLimit(storage, samples_per_insert=8, min_rows=1_000)
        while collector.collect(64):
            limit.wait_to_insert(64)  # in the process that collects

        while learning:  # in the process that learns, over the same storage
            limit.wait_to_sample(256)
            batch = storage.get(torch.randint(len(storage), (256,)))

    The side that is ahead waits for the other: `wait_to_sample` blocks while too few rows have been
    written, and `wait_to_insert` blocks while too few have been drawn. If the other side makes no
    progress for ``timeout`` seconds, a `RateStalled` error reports the position of each side.
    Several processes may draw. They share the counts in a file next to the rows, which also
    survives a restart. Pass the same arguments in all of them.

    Rows that existed when the first `RateLimit` was created do not count. After ``min_rows`` rows,
    the number of rows drawn is ``samples_per_insert`` for each further row, within ``slack``.

    Args:
        storage: a storage on disk, opened in any mode, in whose directory this process may write.
        samples_per_insert: rows drawn for each row written, above 0. 8 allows one batch of 256 rows
            for each 32 new rows.
        min_rows: the number of new rows before the first draw. Until then inserting does not wait.
        slack: the lead that one side may have, in rows drawn. None uses the largest request so far,
            which always lets one of the two sides proceed.
        timeout: seconds without progress of the other side after which waiting fails.

    Raises:
        TypeError: the storage has another type.
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        storage: Any,
        samples_per_insert: float,
        *,
        min_rows: int = 1,
        slack: float | None = None,
        timeout: float = 60.0,
    ) -> None:
        require_storage(
            storage,
            "RateLimit",
            "A storage of TorchRL is in the memory of one process. Use a storage on disk.",
        )
        self.storage = storage
        self.samples_per_insert = _above_0("samples_per_insert", samples_per_insert)
        if type(min_rows) is not int or not 1 <= min_rows < MOST:
            raise ValueError(
                f"min_rows: expected a number of rows of at least 1, got {min_rows!r}."
            )
        self.min_rows = min_rows
        self.slack = None if slack is None else _above_0("slack", slack)
        self.timeout = _above_0("timeout", timeout)
        self._file: RateFile | None = None
        self._first_row = int(storage.head) if storage.reader.initialised else 0

    # --- blocking calls ---------------------------------------------------------------------------

    def wait_to_sample(self, rows: int) -> None:
        """Block until ``rows`` more rows may be drawn, and count them as drawn.

        Raises:
            RateStalled: no row was written for ``timeout`` seconds.
            ValueError: ``slack`` is too small for the requests of both sides.
        """
        _require_count(rows)

        def drawn(counts: RateCounts) -> RateCounts:
            counts = replace(counts, most_drawn=max(counts.most_drawn, rows))
            ahead = counts.drawn + rows - self._due(counts, 0)
            slack = self._slack_of(counts)
            if self._early(counts) or ahead > slack:
                return counts
            return replace(counts, drawn=counts.drawn + rows)

        self._wait(drawn, lambda was, now: now.drawn > was.drawn, rows, "draw")

    def wait_to_insert(self, rows: int) -> None:
        """Block until ``rows`` more rows may be written. The storage itself counts them.

        Raises:
            RateStalled: no row was drawn for ``timeout`` seconds.
            ValueError: ``slack`` is too small for the requests of both sides.
        """
        _require_count(rows)
        allowed = False

        def written(counts: RateCounts) -> RateCounts:
            nonlocal allowed
            counts = replace(counts, most_written=max(counts.most_written, rows))
            ahead = self._due(counts, rows) - counts.drawn
            slack = self._slack_of(counts)
            allowed = self._early(counts) or ahead <= slack
            return counts

        self._wait(written, lambda was, now: allowed, rows, "write")

    # --- counts and state -------------------------------------------------------------------------

    @property
    def drawn(self) -> int:
        """The number of rows drawn so far by all processes."""
        return self._now().drawn

    @property
    def written(self) -> int:
        """The number of rows that all processes wrote since the first `RateLimit` was created."""
        return self._written(self._now())

    def state_dict(self) -> dict[str, Any]:
        """Return the counts for a checkpoint."""
        counts = self._now()
        return {"first_row": counts.first_row, "drawn": counts.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; rows that the storage has gained since then count as written.

        Raises:
            StateMismatch: the state is not from a rate limit, or counts rows that do not exist.
        """
        first_row, drawn = (state.get(name, -1) for name in ("first_row", "drawn"))
        if any(type(each) is not int or not 0 <= each < MOST for each in (first_row, drawn)):
            raise StateMismatch(
                "state: expected the state of a rate limit, got one without counts of rows."
            )
        if first_row > (head := self.storage.head):
            raise StateMismatch(
                f"this state counts rows from row {first_row} on, but {self.storage.path} has "
                f"{head} rows. Restore the storage from a copy that is as new as the state."
            )
        self._changed(lambda counts: replace(counts, first_row=first_row, drawn=drawn))

    def close(self) -> None:
        """Close the file. The next wait opens it again."""
        if self._file is not None:
            self._file.close()

    def __repr__(self) -> str:
        return (
            f"RateLimit({self.storage.path}, {self.samples_per_insert:g} samples an insert, "
            f"min_rows={self.min_rows})"
        )

    # --- internals --------------------------------------------------------------------------------

    def _written(self, counts: RateCounts) -> int:
        return max(0, int(self.storage.head) - counts.first_row)

    def _early(self, counts: RateCounts) -> bool:
        return self._written(counts) < self.min_rows or not len(self.storage)

    def _due(self, counts: RateCounts, more: int) -> float:
        """Return how many draws correspond to the rows written plus ``more`` rows."""
        return self.samples_per_insert * (self._written(counts) + more - self.min_rows)

    def _slack_of(self, counts: RateCounts) -> float:
        """Return the permitted lead of one side; raise ValueError if neither side could proceed."""
        inserts = self.samples_per_insert * counts.most_written
        if self.slack is None:
            return max(inserts, counts.most_drawn)
        if 2 * self.slack < inserts + counts.most_drawn:
            raise ValueError(
                f"slack: expected at least {(inserts + counts.most_drawn) / 2:g}, got "
                f"{self.slack:g}. With {counts.most_drawn} rows per draw, {counts.most_written} "
                f"rows per insert and {self.samples_per_insert:g} samples per inserted row, "
                "neither side could proceed."
            )
        return self.slack

    def _wait(
        self,
        change: Callable[[RateCounts], RateCounts],
        done: Callable[[RateCounts, RateCounts], bool],
        rows: int,
        what: str,
    ) -> None:
        pause, longest = _PAUSES
        moved, seen = time.monotonic(), None
        while True:
            was = RateCounts()

            def noted(counts: RateCounts) -> RateCounts:
                nonlocal was
                was = counts
                return change(counts)

            now = self._try(noted)
            if now is not None and done(was, now):
                return
            head = self.storage.head
            other = head if what == "draw" else None if now is None else now.drawn
            if other is not None and other != seen:
                moved, seen = time.monotonic(), other
            if time.monotonic() - moved > self.timeout:
                raise RateStalled(self._stalled(rows, what, now))
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _stalled(self, rows: int, what: str, now: RateCounts | None) -> str:
        if now is None:
            return (
                f"waited {self.timeout:g} s to {what} {rows} rows: another process holds the lock "
                f"on the counts of {self.storage.path}. Check whether that process is suspended."
            )
        so_far = (
            f"waited {self.timeout:g} s to {what} {rows} rows: {self._written(now)} rows were "
            f"written to {self.storage.path} and {now.drawn} rows were drawn, at "
            f"{self.samples_per_insert:g} samples per inserted row after the first "
            f"{self.min_rows} rows"
        )
        if what == "write":
            return f"{so_far}. No row was drawn meanwhile. Is the learner still running?"
        writes = self.storage.mode != "read" or self.storage.reader.is_written
        hint = (
            "Is the collector still running?"
            if writes
            else "No process has the storage open for writing."
        )
        return f"{so_far}. No row was written meanwhile. {hint}"

    def _now(self) -> RateCounts:
        return self._changed(lambda counts: counts)

    def _changed(self, change: Callable[[RateCounts], RateCounts]) -> RateCounts:
        """Change the counts, and retry while another process changes them."""
        deadline = time.monotonic() + self.timeout
        while (now := self._try(change)) is None:
            if time.monotonic() > deadline:
                raise RateStalled(self._stalled(0, "count", None))
            time.sleep(_PAUSES[0])
        return now

    def _try(self, change: Callable[[RateCounts], RateCounts]) -> RateCounts | None:
        """Change the counts; return None if another process is changing them."""
        reader = storage_of_rows(self.storage).reader
        reader.require_open()
        if not reader.initialised:  # there are no files and no rows yet
            return change(RateCounts())
        if self._file is None:
            if not isinstance(reader, FileReader):
                raise ReadOnlyStorage(
                    f"a rate limit keeps its counts in a file next to the rows, and {reader.path} "
                    "does not support such a file. Give the storage to which the rows are written."
                )
            files = reader.format
            self._file = RateFile(files.inside, files.drawn_path, str(reader.id), self._first_row)
        result = self._file.change(change)
        if result is None:
            return None
        now, why = result
        if why is not None:
            warnings.warn(
                f"{self._file.path} is not used: {why}. Counting restarts at row {now.first_row}, "
                "with no rows drawn.",
                stacklevel=5,
            )
        return now


def _above_0(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"{name}: expected a number above 0, got {value!r}.")
    return number


def _require_count(rows: Any) -> None:
    if type(rows) is not int or not 1 <= rows < MOST:
        raise ValueError(f"rows: expected a number of rows of at least 1, got {rows!r}.")
