"""How often rows are drawn for each that is written, where two processes or threads do that."""

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
"""More rows than are ever drawn or written: sums of a few such counts have a word."""


@dataclass(frozen=True, slots=True)
class RateCounts:
    """Counts since the file was made."""

    first_row: int = 0
    """The row from which rows are counted."""
    drawn: int = 0
    """Rows drawn."""
    most_drawn: int = 0
    """The most that were asked for at once."""
    most_written: int = 0
    """The most that were to be written at once."""


def _packed(owner: str, counts: RateCounts) -> bytes:
    told = (counts.first_row, counts.drawn, counts.most_drawn, counts.most_written)
    block = _BLOCK.pack(_MAGIC, owner.encode(), *told, 0)
    return block[:-4] + zlib.crc32(block[:-4]).to_bytes(4, "little")


def _unpacked(block: bytes, owner: str) -> RateCounts:
    """Return what a block says; raise ValueError if it is none of this owner."""
    if len(block) != _BLOCK.size:
        raise ValueError(f"it has {len(block)} bytes, and not {_BLOCK.size}")
    name, whose, *told, check = _BLOCK.unpack(block)
    if name.rstrip(b"\0") != _MAGIC:
        raise ValueError("it is of another version, or another file")
    if zlib.crc32(block[:-4]) != check:
        raise ValueError("its checksum does not fit")
    if whose.rstrip(b"\0") != owner.encode():
        raise ValueError("it is of another storage")
    if max(told) >= MOST:
        raise ValueError("its counts cannot be")
    return RateCounts(*told)


class RateFile:
    """The file, opened when it is first changed, and made if it is not there.

    Args:
        inside: the directory of the file.
        path: the file.
        owner: the id of the storage.
        first_row: the row from which this process counts rows. The file keeps the first of all.
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
        """Replace the counts by what ``change`` makes of them.

        Returns:
            None if another thread or process is changing them just now: ask again. Otherwise the
            new counts, and why the counts begin again, None unless the file could not be used.

        Raises:
            NotWritable, StorageFull: it cannot be written.
        """
        if self._process not in (-1, os.getpid()):  # a thread of the parent may hold it
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
            if not os.fstat(self._file).st_nlink:  # removed: another one is made
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
"""Seconds between two looks: the first pause, and the longest one."""


class RateLimit:
    """Keeps learning and collecting in step: so many samples for each inserted row::

        limit = RateLimit(storage, samples_per_insert=8, min_rows=1_000)
        while collector.collect(64):
            limit.wait_to_insert(64)  # in the process that collects

        while learning:  # in the process that learns, over the same storage
            limit.wait_to_sample(256)
            batch = storage.get(torch.randint(len(storage), (256,)))

    Who is ahead waits for the other: `wait_to_sample` while too few rows have come, and
    `wait_to_insert` while too few were drawn. Neither waits for ever: when the other side has not
    moved for ``timeout`` seconds, a `RateStalled` says how far each is. Several processes may
    draw: they count together, in a file beside the rows, and also after a restart. Give all of
    them the same arguments.

    Rows that were there when the first `RateLimit` was made do not count. Once ``min_rows`` have
    come, the rows drawn are ``samples_per_insert`` for each row beyond these, give or take
    ``slack``.

    Args:
        storage: a storage on disk, opened in any mode, where this process may write a file.
        samples_per_insert: rows drawn for each row written, above 0. 8 are batches of 256 rows
            after each 32 new ones.
        min_rows: rows that must have come before any is drawn; until then inserting does not wait.
        slack: how many rows drawn one side may be ahead. None is as many as the largest wait for
            so far asked for, which always lets one of the two go on.
        timeout: seconds without a move of the other side after which waiting ends.

    Raises:
        TypeError: another kind of storage.
        ValueError: a number out of range.
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
        require_storage(storage, "RateLimit", "TorchRL's are in the memory of one process.")
        self.storage = storage
        self.samples_per_insert = _above_0("samples_per_insert", samples_per_insert)
        if type(min_rows) is not int or not 1 <= min_rows < MOST:
            raise ValueError(f"min_rows is a number of rows of at least 1, got {min_rows!r}.")
        self.min_rows = min_rows
        self.slack = None if slack is None else _above_0("slack", slack)
        self.timeout = _above_0("timeout", timeout)
        self._file: RateFile | None = None
        self._first_row = int(storage.head) if storage.reader.initialised else 0

    # --- what the two sides call ------------------------------------------------------------------

    def wait_to_sample(self, rows: int) -> None:
        """Return when ``rows`` more may be drawn, which then count as drawn.

        Raises:
            RateStalled: no row came for ``timeout`` seconds.
            ValueError: ``slack`` is too small for what both sides ask for at once.
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
        """Return when ``rows`` more may be written. It is the storage that counts them.

        Raises:
            RateStalled: no row was drawn for ``timeout`` seconds.
            ValueError: ``slack`` is too small for what both sides ask for at once.
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

    # --- what there is to know --------------------------------------------------------------------

    @property
    def drawn(self) -> int:
        """Rows drawn so far, by all processes."""
        return self._now().drawn

    @property
    def written(self) -> int:
        """Rows written since the file was made, by all processes."""
        return self._written(self._now())

    def state_dict(self) -> dict[str, Any]:
        """Return what was drawn, for a checkpoint."""
        counts = self._now()
        return {"first_row": counts.first_row, "drawn": counts.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; rows that are in the storage since then count as written.

        Raises:
            StateMismatch: it is no state of a rate limit, or of rows that are not there.
        """
        first_row, drawn = (state.get(name, -1) for name in ("first_row", "drawn"))
        if any(type(each) is not int or not 0 <= each < MOST for each in (first_row, drawn)):
            raise StateMismatch(
                "expected the state of a rate limit, got one without counts of rows."
            )
        if first_row > (head := self.storage.head):
            raise StateMismatch(
                f"this state counts rows from {first_row} on, and {self.storage.path} has {head}."
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

    # --- how --------------------------------------------------------------------------------------

    def _written(self, counts: RateCounts) -> int:
        return max(0, int(self.storage.head) - counts.first_row)

    def _early(self, counts: RateCounts) -> bool:
        return self._written(counts) < self.min_rows or not len(self.storage)

    def _due(self, counts: RateCounts, more: int) -> float:
        """Return how many rows are to be drawn for those that are written, and ``more``."""
        return self.samples_per_insert * (self._written(counts) + more - self.min_rows)

    def _slack_of(self, counts: RateCounts) -> float:
        """Return how far one side may be ahead; raise ValueError if neither could go on."""
        inserts = self.samples_per_insert * counts.most_written
        if self.slack is None:
            return max(inserts, counts.most_drawn)
        if 2 * self.slack < inserts + counts.most_drawn:
            raise ValueError(
                f"slack is {self.slack:g}, and {counts.most_drawn} rows are drawn at once and "
                f"{counts.most_written} written: at {self.samples_per_insert:g} samples an insert "
                f"neither could go on. Give at least {(inserts + counts.most_drawn) / 2:g}."
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
                f"waited {self.timeout:g} s for a turn to {what} {rows} rows: another process "
                f"holds the lock of the counts of {self.storage.path}. Is it stopped?"
            )
        so_far = (
            f"waited {self.timeout:g} s to {what} {rows} rows: {self._written(now)} were written "
            f"to {self.storage.path} and {now.drawn} drawn, at {self.samples_per_insert:g} samples "
            f"an insert from {self.min_rows} rows on"
        )
        if what == "write":
            return f"{so_far}, and none was drawn meanwhile. Does the learner still run?"
        writes = self.storage.mode != "read" or self.storage.reader.is_written
        hint = "Does it still collect?" if writes else "No process has it open to write."
        return f"{so_far}, and none came meanwhile. {hint}"

    def _now(self) -> RateCounts:
        return self._changed(lambda counts: counts)

    def _changed(self, change: Callable[[RateCounts], RateCounts]) -> RateCounts:
        """Change the counts, as soon as no other process does."""
        deadline = time.monotonic() + self.timeout
        while (now := self._try(change)) is None:
            if time.monotonic() > deadline:
                raise RateStalled(self._stalled(0, "count", None))
            time.sleep(_PAUSES[0])
        return now

    def _try(self, change: Callable[[RateCounts], RateCounts]) -> RateCounts | None:
        """Change the counts; return None if another process does so now."""
        reader = storage_of_rows(self.storage).reader
        reader.require_open()
        if not reader.initialised:  # there are no files yet, nor rows
            return change(RateCounts())
        if self._file is None:
            if not isinstance(reader, FileReader):
                raise ReadOnlyStorage(
                    f"a rate limit counts in a file beside the rows, and {reader.path} is of a "
                    "kind beside which none is written. Give a storage on disk."
                )
            files = reader.format
            self._file = RateFile(files.inside, files.drawn_path, str(reader.id), self._first_row)
        result = self._file.change(change)
        if result is None:
            return None
        now, why = result
        if why is not None:
            warnings.warn(
                f"{self._file.path} is not used: {why}. Rows are counted from "
                f"{now.first_row} on, and none counts as drawn.",
                stacklevel=5,
            )
        return now


def _above_0(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"{name} is a number above 0, got {value!r}.")
    return number


def _require_count(rows: Any) -> None:
    if type(rows) is not int or not 1 <= rows < MOST:
        raise ValueError(f"expected a number of rows of at least 1, got {rows!r}.")
