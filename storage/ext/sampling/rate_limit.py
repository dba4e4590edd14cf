"""How often rows are drawn for each that is written, where two processes or threads do that."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from tallyroll.storage.errors import RateStalled, ReadOnlyStorage, StateMismatch
from tallyroll.storage.ext.overlays.overlaid_storage import storage_of_rows
from tallyroll.storage.ext.sampling.drawn_file import MOST, Counts, DrawnFile
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.sampling.drawn_from import require_storage

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
        self._file: DrawnFile | None = None
        self._first_row = int(storage.head) if storage.reader.initialised else 0

    # --- what the two sides call ------------------------------------------------------------------

    def wait_to_sample(self, rows: int) -> None:
        """Return when ``rows`` more may be drawn, which then count as drawn.

        Raises:
            RateStalled: no row came for ``timeout`` seconds.
            ValueError: ``slack`` is too small for what both sides ask for at once.
        """
        _require_count(rows)

        def drawn(counts: Counts) -> Counts:
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

        def written(counts: Counts) -> Counts:
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
            raise StateMismatch("this state is none of a rate limit: it has no counts of rows.")
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

    def _written(self, counts: Counts) -> int:
        return max(0, int(self.storage.head) - counts.first_row)

    def _early(self, counts: Counts) -> bool:
        return self._written(counts) < self.min_rows or not len(self.storage)

    def _due(self, counts: Counts, more: int) -> float:
        """Return how many rows are to be drawn for those that are written, and ``more``."""
        return self.samples_per_insert * (self._written(counts) + more - self.min_rows)

    def _slack_of(self, counts: Counts) -> float:
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
        change: Callable[[Counts], Counts],
        done: Callable[[Counts, Counts], bool],
        rows: int,
        what: str,
    ) -> None:
        pause, longest = _PAUSES
        moved, seen = time.monotonic(), None
        while True:
            was = Counts()

            def noted(counts: Counts) -> Counts:
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

    def _stalled(self, rows: int, what: str, now: Counts | None) -> str:
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

    def _now(self) -> Counts:
        return self._changed(lambda counts: counts)

    def _changed(self, change: Callable[[Counts], Counts]) -> Counts:
        """Change the counts, as soon as no other process does."""
        deadline = time.monotonic() + self.timeout
        while (now := self._try(change)) is None:
            if time.monotonic() > deadline:
                raise RateStalled(self._stalled(0, "count", None))
            time.sleep(_PAUSES[0])
        return now

    def _try(self, change: Callable[[Counts], Counts]) -> Counts | None:
        """Change the counts; return None if another process does so now."""
        reader = storage_of_rows(self.storage).reader
        reader.require_open()
        if not reader.initialised:  # there are no files yet, nor rows
            return change(Counts())
        if self._file is None:
            if not isinstance(reader, FileReader):
                raise ReadOnlyStorage(
                    f"a rate limit counts in a file beside the rows, and {reader.path} is of a "
                    "kind beside which none is written. Give a storage on disk."
                )
            files = reader.format
            self._file = DrawnFile(files.inside, files.drawn_path, str(reader.id), self._first_row)
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
