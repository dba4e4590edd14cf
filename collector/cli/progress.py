"""Progress: a bar on a terminal, a plain line now and then elsewhere."""

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
"""Between lines: for logs, where a bar's control codes are noise."""
_RATE_SECONDS = 60.0
_MOST_SECONDS = 10**9


class Display:
    """Shows how far something is; called with how much of how much is done.

    Args:
        bar: drawn on a terminal; it also knows how long the rest will take.
        what: is counted, or what was done with the bytes that are counted.
        quiet: show nothing.
        number: how counts are written.
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
        """Show it and its ``details``, but where that was done a moment ago the ``last`` alone."""
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
        """So much more of ``total`` is done."""
        self(self.done + more, total)


@contextlib.contextmanager
def shown_progress(
    what: str, quiet: bool, number: Callable[[int], str] = decimal, *, stays: bool = False
) -> Iterator[Display]:
    """A display as stderr suits it; a bar ``stays`` on the terminal, or goes."""
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
