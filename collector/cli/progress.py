"""Progress of a run: a bar on a terminal, a plain line now and then elsewhere."""

import contextlib
import math
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tallyroll.collector.batches.run_loop import Collector
from tallyroll.collector.cli.plan import Plan
from tallyroll.collector.cli.report import clock, readable_bytes
from tallyroll.collector.cli.streams import say
from tallyroll.storage.storages import DiskStorage

BAR_SECONDS = 0.1
LINE_SECONDS = 5.0
_WINDOW = 50


@dataclass(frozen=True)
class Snapshot:
    """The progress of a run at one moment."""

    done: int
    total: int
    unit: str
    frames: int
    rate: float
    """Frames a second."""
    remaining: float
    """Seconds to go, NaN where that is unknown."""
    episodes: int
    mean_return: float
    """Of the last 100 episodes, NaN before the first."""
    nbytes: int

    @property
    def counts(self) -> str:
        """The unit that the bar counts."""
        return f"{self.done:,}/{self.total:,}" + (" ep" if self.unit == "episodes" else "")

    @property
    def details(self) -> str:
        """The rest, short."""
        parts = [f"{self.rate:,.0f}/s"]
        if self.unit == "frames":
            parts.append(f"{self.episodes:,} ep")
        if not math.isnan(self.mean_return):
            parts.append(f"return {self.mean_return:.4g}")
        return " ".join([*parts, readable_bytes(self.nbytes), clock(self.remaining)])

    @property
    def line(self) -> str:
        """All of it in words."""
        mean = "" if math.isnan(self.mean_return) else f", mean return {self.mean_return:.4g}"
        share = 100 * self.done // self.total
        return (
            f"{self.done:,} of {self.total:,} {self.unit} ({share} %), {self.rate:,.0f} frames/s, "
            f"{self.episodes:,} episodes{mean}, {readable_bytes(self.nbytes)}, "
            f"{clock(self.remaining)} left"
        )


class Meter:
    """Reads a collector's counts, and from their change the rate."""

    def __init__(self, collector: Collector, plan: Plan, storage: DiskStorage) -> None:
        self._collector, self._storage = collector, storage
        self._episodes_wanted = plan.episodes
        self._total = plan.frames or plan.episodes or 1
        self._seen: deque[tuple[float, int, int]] = deque(maxlen=_WINDOW)
        self._look(time.monotonic())

    def _look(self, now: float) -> tuple[int, int]:
        ledger = self._collector.ledger
        done = ledger.episodes_complete if self._episodes_wanted else ledger.stored
        self._seen.append((now, ledger.stored, done))
        return ledger.stored, done

    def read(self) -> Snapshot:
        """The progress now; the rate is that of the last few readings."""
        now = time.monotonic()
        frames, done = self._look(now)
        then, frames_then, done_then = self._seen[0]
        passed = max(now - then, 1e-9)
        pace = (done - done_then) / passed
        return Snapshot(
            done=done,
            total=self._total,
            unit="episodes" if self._episodes_wanted else "frames",
            frames=frames,
            rate=(frames - frames_then) / passed,
            remaining=(self._total - done) / pace if pace else math.nan,
            episodes=self._collector.ledger.episodes_complete,
            mean_return=self._collector.metrics()["return_mean"],
            nbytes=self._storage.nbytes,
        )


class Display(ABC):
    """Shows a run; costs nothing while it is not time to show it again."""

    seconds = math.inf

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._next = 0.0

    def update(self) -> None:
        """A batch has come."""
        if time.monotonic() >= self._next:
            self.show(self._meter.read())
            self._next = time.monotonic() + self.seconds

    @abstractmethod
    def show(self, now: Snapshot) -> None:
        """Show where the run stands."""

    def __enter__(self) -> Self:
        """Begin."""
        self._next = time.monotonic() + self.seconds
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Show the last state."""
        self.show(self._meter.read())


class Silence(Display):
    """Nothing."""

    def show(self, now: Snapshot) -> None:
        """Show nothing."""


class Lines(Display):
    """A line on stderr every few seconds: for logs, where a bar's control codes are noise."""

    seconds = LINE_SECONDS

    def show(self, now: Snapshot) -> None:
        """Write a line."""
        with contextlib.suppress(OSError):  # a run outlives whoever watched it
            say(f"tallyroll: {now.line}")
        sys.stderr.flush()


class Bar(Display):
    """A bar that is redrawn a few times a second."""

    seconds = BAR_SECONDS

    def __init__(self, meter: Meter, console: Console) -> None:
        super().__init__(meter)
        self._bar = Progress(
            BarColumn(bar_width=None),
            TextColumn("{task.description}", markup=False),
            console=console,
            expand=True,
            refresh_per_second=1 / BAR_SECONDS,
        )
        self._task = self._bar.add_task("")

    def show(self, now: Snapshot) -> None:
        """Redraw it."""
        self._bar.update(
            self._task,
            completed=now.done,
            total=now.total,
            description=f"{now.counts} {now.details}",
        )

    def __enter__(self) -> Self:
        """Draw it for the first time."""
        self.show(self._meter.read())
        self._bar.start()
        return super().__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave its last state on the screen."""
        super().__exit__(kind, error, trace)
        self._bar.stop()


def progress_for(collector: Collector, plan: Plan, storage: DiskStorage, quiet: bool) -> Display:
    """The progress display that suits stderr."""
    meter, console = Meter(collector, plan, storage), Console(stderr=True)
    if quiet:
        return Silence(meter)
    return Bar(meter, console) if console.is_terminal else Lines(meter)


@contextlib.contextmanager
def reading_progress(what: str, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Shows how many bytes of how many were read, to a callable that is told so."""
    console = Console(stderr=True)
    if quiet:
        yield None
    elif console.is_terminal:
        bar = Progress(
            TextColumn(what),
            BarColumn(bar_width=None),
            TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(),
            console=console,
            expand=True,
            transient=True,
        )
        task = bar.add_task("")
        with bar:
            yield lambda done, total: bar.update(
                task, completed=done, total=total, description=readable_bytes(total)
            )
    else:
        yield _Reading(what)


class _Reading:
    """A line on stderr every few seconds, none for what is quick."""

    def __init__(self, what: str) -> None:
        self._what, self._next = what, time.monotonic() + LINE_SECONDS

    def __call__(self, done: int, total: int) -> None:
        """``done`` bytes of ``total`` were read."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LINE_SECONDS
        share = f"{readable_bytes(done)} of {readable_bytes(total)} ({100 * done // total} %)"
        with contextlib.suppress(OSError):
            say(f"tallyroll: {self._what}: {share}")
