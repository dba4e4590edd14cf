"""Progress display: a bar on a terminal or in a notebook, and occasional plain lines elsewhere.

The command shows it, and collectors with ``progress=True``.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn

from tallyroll.storage.rows.pages import visible

if TYPE_CHECKING:  # commands that only read need no collector
    from tallyroll.collector.base import Collector
    from tallyroll.collector.options import Options

BAR_SECONDS = 0.1
LINE_SECONDS = 5.0
"""Seconds between lines. Lines suit logs, where a bar's control codes are noise."""
_RATE_SECONDS = 60.0
_MOST_SECONDS = 10**9


class Display:
    """Progress display. Call it with the amount done and the total.

    Args:
        bar: bar for terminals. It also estimates the remaining time.
        what: noun for the counted items, or a past participle such as "finalized" for bytes.
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
        self._line: int | None = None
        """The amount done in the last line."""

    def __call__(
        self,
        done: int,
        total: int | None,
        details: Callable[[], Sequence[str]] = list,
        last: bool = False,
    ) -> None:
        """Show the progress and ``details``; ``total`` is None if there is no limit.

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
        counts = [self._number(each) for each in (done, total) if each is not None]
        if not self._bar.disable:
            shown = " ".join(["/".join(counts), *details(), *[clock] * (total is not None)])
            self._bar.update(self._task.id, description=shown)
            return
        if last and done == self._line:
            return
        self._line = done
        share = f"{' of '.join(counts)} {self._what}"
        if total is not None:
            share, clock = f"{share} ({100 * done // max(1, total)} %)", f"{clock} left"
        said = [share, *details(), *[clock] * (total is not None)]
        sys.stderr.write(visible(f"tallyroll: {', '.join(said)}") + "\n")

    def add(self, more: int, total: int) -> None:
        """Show the progress after ``more`` was done, of ``total`` in all."""
        self(self.done + more, total)


@contextlib.contextmanager
def shown_progress(
    what: str, quiet: bool, number: Callable[[int], str] = decimal, *, stays: bool = False
) -> Iterator[Display]:
    """Yield a display that suits stderr, or the notebook.

    If ``stays`` is True, the bar remains on the terminal after the context.
    """
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
        disable=quiet or not (console.is_terminal or _draws_in_notebooks(console)),
    )
    with contextlib.nullcontext() if bar.disable else bar:
        yield Display(bar, what, quiet, number)


def _draws_in_notebooks(console: Console) -> bool:
    """Return True in a notebook with the widgets that rich draws on; others get lines."""
    return console.is_jupyter and find_spec("ipywidgets") is not None


def run_details(collector: Collector, rate: str, nbytes: int | None) -> list[str]:
    """Return the details of a run: its rate, finished episodes, mean return, and size on disk."""
    mean = collector.metrics()["return_mean"]
    return [
        rate,
        f"{collector.ledger.episodes_complete:,} ep",
        *([] if math.isnan(mean) else [f"return {mean:.4g}"]),
        *([] if nbytes is None else [decimal(nbytes)]),
    ]


class RunProgress:
    """Display of a run's progress, from the first `show` until the last one or `close`.

    Args:
        options: the options of the collector.
        began: number of transitions that the run had before this collector.
    """

    def __init__(self, options: Options, began: int) -> None:
        self._options, self._began, self._started = options, began, time.monotonic()
        self._open = contextlib.ExitStack()
        self._display: Display | None = None

    def show(self, collector: Collector, last: bool = False) -> None:
        """Show the state of the run; if it is the ``last`` call, leave the display as it is."""
        options, ledger = self._options, collector.ledger
        if self._display is None:
            if last:
                return
            what = "episodes" if options.total_episodes is not None else "frames"
            shown = shown_progress(what, False, "{:,}".format, stays=True)
            self._display = self._open.enter_context(shown)
        total = options.total_frames
        done = ledger.agent_transitions if options.by_agent else ledger.stored
        if options.total_episodes is not None:
            done, total = ledger.episodes_complete, options.total_episodes
        fresh = (ledger.stored - self._began) / max(1e-9, time.monotonic() - self._started)
        self._display(done, total, lambda: run_details(collector, f"{fresh:,.0f}/s", None), last)
        if last:
            self.close()

    def close(self) -> None:
        """Leave the display as it is. A later call of `show` begins another one."""
        self._display = None
        self._open.close()
