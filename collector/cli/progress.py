"""Progress display: a bar on a terminal, and occasional plain lines elsewhere."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn

from tallyroll.collector.cli.output import say

BAR_SECONDS = 0.1
LINE_SECONDS = 5.0
"""Seconds between lines. Lines suit logs, where a bar's control codes are noise."""
_RATE_SECONDS = 60.0
_MOST_SECONDS = 10**9


class Display:
    """Progress display. Call it with the amount done and the total.

    Args:
        bar: bar for terminals. It also estimates the remaining time.
        what: noun that is counted, or the past participle for counted bytes.
        quiet: show nothing.
        number: function that formats counts.
    """

    def __init__(
        self, bar: Progress, what: str, quiet: bool, number: Callable[[int], str] = decimal
    ) -> None:
        self._bar, self._what, self._quiet, self._number = bar, what, quiet, number
        bar.add_task("", total=None)
        self._task = bar.tasks[0]
        self._seconds, self._next = BAR_SECONDS, 0.0
        if bar.disable:
            self._seconds, self._next = LINE_SECONDS, time.monotonic() + LINE_SECONDS
        self.done = 0

    def __call__(
        self, done: int, total: int, details: Callable[[], Sequence[str]] = list, last: bool = False
    ) -> None:
        """Show the progress and ``details``.

        A call soon after the previous one shows nothing, unless it is the ``last``.
        """
        self.done = done
        now = time.monotonic()
        if self._quiet or (now < self._next and not last):
            return
        self._next = now + self._seconds
        self._bar.update(self._task.id, completed=done, total=total)
        left = self._task.time_remaining
        clock = "-:--:--" if left is None or left > _MOST_SECONDS else f"{timedelta(seconds=left)}"
        counts = self._number(done), self._number(total)
        if not self._bar.disable:
            shown = " ".join(["/".join(counts), *details(), clock])
            self._bar.update(self._task.id, description=shown)
            return
        share = f"{' of '.join(counts)} {self._what} ({100 * done // max(1, total)} %)"
        say(f"tallyroll: {', '.join([share, *details(), clock])} left")

    def add(self, more: int, total: int) -> None:
        """Add ``more`` of ``total`` to the amount done."""
        self(self.done + more, total)


@contextlib.contextmanager
def shown_progress(
    what: str, quiet: bool, number: Callable[[int], str] = decimal, *, stays: bool = False
) -> Iterator[Display]:
    """Yield a display that suits stderr; with ``stays``, a bar remains on the terminal."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn(what),
        BarColumn(bar_width=None),
        TextColumn("{task.description}", markup=False),
        console=console,
        expand=True,
        transient=not stays,
        refresh_per_second=1 / BAR_SECONDS,
        speed_estimate_period=_RATE_SECONDS,
        disable=quiet or not console.is_terminal,
    )
    with contextlib.nullcontext() if bar.disable else bar:
        yield Display(bar, what, quiet, number)
