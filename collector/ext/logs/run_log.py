"""Log of a run: a row of numbers at regular intervals."""

import math
import time
import warnings
from collections import deque
from collections.abc import Mapping
from typing import Protocol, Self

from tallyroll.collector.base import Collector
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.ext.logs.target import Newest, Row, Target, open_target
from tallyroll.collector.options.checks import positive

EVERY = 1000
_MOST_WAITING = 10_000


class LogWarning(UserWarning):
    """Warning: rows of a log cannot be written.

    Collecting continues, and the log keeps the rows to retry.
    """


class _EvaluationResult(Protocol):
    def metrics(self) -> Mapping[str, float]: ...


def _number(name: str, value: float) -> float:
    try:
        return value if type(value) is int else float(value)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"log: expected numbers, got {name}={value!r:.100}") from error


class RunLog:
    """Log that writes a row of a collector's numbers every ``every`` transitions.

    A row has ``frames`` (stored transitions), ``seconds`` since the log began, the other numbers of
    `Collector.metrics`, the run's ``seed``, and the numbers that the caller passed since the
    previous row. The first :meth:`update` at or after each multiple of ``every`` transitions writes
    a row. :meth:`close` writes the last row. It may repeat the number of transitions of the
    previous row, with numbers that were added later. A resumed run appends to the existing rows. If
    a kill prevented a row, the log writes that row first. If `load_checkpoint` removes transitions,
    the log removes their rows (TensorBoard hides them; Weights & Biases and a function keep them).

    A name may first appear in any row. Rows without it have an empty cell in a CSV file, and no
    point in TensorBoard or Weights & Biases, and so have unknown numbers of the log. A number of
    the caller that is NaN is written as NaN.

    If a row cannot be written, the log warns once with :class:`LogWarning` and collecting
    continues. The log retries the row with each later one.

    Args:
        collector: the collector, before it collects.
        target: the path of a CSV file, ``"tensorboard:DIR"``, ``"wandb:PROJECT"`` (offline if
            WANDB_MODE=offline is set), or a function that the log calls with each row as a dict. A
            CSV file or a TensorBoard folder belongs to one run, which locks it while the log is
            open.
        every: transitions between two rows.
        window: number of last episodes over which means are taken.

    Raises:
        ArgumentError: the kind of target is unknown, or the target cannot be opened, has rows of
            another run, or is in use by another run.
        MissingExtra: a package that the target needs is not installed.

    Examples:
        >>> from tallyroll.collector import RunLog, SyncCollector
        >>> rows = []
        >>> with (
        ...     SyncCollector(
        ...         "CartPole-v1", num_envs=8, frames_per_batch=100, total_frames=250, seed=0
        ...     ) as collector,
        ...     RunLog(collector, rows.append, every=200) as log,
        ... ):
        ...     for batch in collector:
        ...         log.update(loss=0.5)
        >>> [(row["frames"], row["loss"]) for row in rows]
        [(200, 0.5), (250, 0.5)]
    """

    def __init__(
        self, collector: Collector, target: Target, *, every: int = EVERY, window: int = 100
    ) -> None:
        self._every, self._window = positive("every", every), positive("window", window)
        self._collector = collector
        self._target = open_target(target)
        try:
            before = self._newest()
        except BaseException:
            self._target.close()
            raise
        frames = collector.ledger.stored
        self._frames = frames if before is None else min(before.frames, frames)
        """Transitions of the run at the last row."""
        self._began = time.monotonic() - (0.0 if before is None else before.seconds)
        self._pending: dict[str, float] = {}
        """Numbers from the caller for the next row."""
        self._waiting: deque[Row] = deque(maxlen=_MOST_WAITING)
        self._loads = collector.restarting.loads
        self._loads_seen = len(self._loads)
        self._to_forget: int | None = None
        """Number of transitions after which the rows in the target were lost; None: none were."""
        self._warned = self._closed = False
        self._reserved = frozenset(self._own_numbers())
        self._next = self._next_after(self._frames)
        if frames >= self._next:  # a kill prevented this row
            self.update()

    def _newest(self) -> Newest | None:
        """Return the last row of the target; raise ArgumentError if another run wrote it."""
        newest, ledger = self._target.newest, self._collector.ledger
        if newest is None:
            return None
        same = ledger.stored and newest.seed in (None, ledger.seed)
        if not same or (newest.frames > ledger.stored and not ledger.incarnation):
            raise ArgumentError(
                f"log: {self._target.name} has rows of another run, up to transition "
                f"{newest.frames:,}, but this run has {ledger.stored:,} transitions. Give another "
                "file or folder, or resume the other run."
            )
        if newest.frames > ledger.stored:  # after a power cut
            self._target.forget_after(ledger.stored)
        return newest

    def _next_after(self, frames: int) -> int:
        return (frames // self._every + 1) * self._every

    def update(self, **numbers: float) -> None:
        """Add numbers to the next row, and write it if it is due.

        If several calls before the row pass the same name, the newest value is written.

        Args:
            **numbers: numbers by name. A name may be new.

        Raises:
            ArgumentError: a value is not a number, or a name is reserved for the log or has a line
                break. The row is written later, without these numbers.
        """
        self._merge(numbers)
        if self._collector.ledger.stored >= self._next:
            self._add()

    def evaluation(self, result: _EvaluationResult) -> None:
        """Add the result of `evaluate` to the next row; `update` or `close` writes it.

        The row gets ``eval_frames`` (transitions stored when this method was called) and the
        numbers of `Evaluation.metrics`: ``eval_episodes``, ``eval_return_mean``,
        ``eval_return_std`` and ``eval_length_mean``.
        """
        numbers = {f"eval_{name}": value for name, value in result.metrics().items()}
        self._merge({"eval_frames": self._collector.ledger.stored, **numbers})

    def _merge(self, numbers: Mapping[str, float]) -> None:
        checked = {name: _number(name, value) for name, value in numbers.items()}
        if reserved := [name for name in checked if name in self._reserved]:
            raise ArgumentError(
                f"log: expected names that are not reserved, got {', '.join(reserved)}. Choose "
                "another name."
            )
        if broken := [name for name in checked if len(name.splitlines()) != 1]:
            raise ArgumentError(
                f"log: expected non-empty names without line breaks, got {broken[0]!r:.100}"
            )
        self._drop_lost()
        self._pending |= checked

    def _drop_lost(self) -> None:
        """Drop the rows of transitions that a load of a checkpoint took back."""
        if new := self._loads[self._loads_seen :]:
            self._loads_seen += len(new)
            frames = min(new)
            if frames < self._frames:
                kept = [row for row in self._waiting if row["frames"] <= frames]
                self._waiting = deque(kept, self._waiting.maxlen)
                self._frames, self._next = frames, self._next_after(frames)
                if self._to_forget is None or frames < self._to_forget:
                    self._to_forget = frames

    def _own_numbers(self) -> dict[str, int | float]:
        numbers, seed = self._collector.metrics(self._window), self._collector.ledger.seed
        return {
            "frames": numbers["frames"],
            "seconds": round(time.monotonic() - self._began, 3),
            **numbers,
            "seed": math.nan if seed is None else seed,
        }

    def _add(self) -> None:
        row = self._own_numbers()
        frames = self._frames = int(row["frames"])
        self._next = self._next_after(frames)
        self._waiting.append({**row, **self._pending})
        self._pending = {}
        self._write()

    def _write(self) -> None:
        waiting = self._waiting
        try:
            if self._to_forget is not None:
                self._target.forget_after(self._to_forget)
                self._to_forget = None
            while waiting:
                self._target.write(waiting[0])
                waiting.popleft()
        except Exception as error:  # noqa: BLE001  a failed write must not end the run
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._target.name} cannot be written ({type(error).__name__}: {error}). "
                "Collecting continues, and the log writes these rows when writing succeeds again.",
                LogWarning,
                stacklevel=4,
            )

    def close(self) -> None:
        """Write the last row if transitions or numbers are pending, and close. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._drop_lost()
        try:
            if self._collector.ledger.stored > self._frames or self._pending:
                self._add()
            else:
                self._write()
        finally:
            try:
                self._target.close()
            except Exception as error:  # noqa: BLE001  as above
                self._warn(error)

    def __enter__(self) -> Self:
        """Return the log. Leaving the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the log."""
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._target.name}, every={self._every:,})"
