"""Tables and texts for the reports of all commands."""

import io
import math
import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tallyroll.collector.batches.run_loop import Collector
from tallyroll.collector.cli.escaped_text import visible

FILE_WIDTH = 160


class _Plain(Console):
    """Makes everything visible that it is given as text; styles are its own."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)


def plain_console() -> Console:
    """For a report to stdout, made as text first; see :func:`text_of`.

    What goes to a file or a pipe is not folded to 80 columns.
    """
    on_terminal = sys.stdout.isatty()
    return _Plain(
        file=io.StringIO(),
        force_terminal=on_terminal,
        width=None if on_terminal else FILE_WIDTH,
        markup=False,
        highlight=False,
        emoji=False,
    )


def text_of(console: Console) -> str:
    """The text that was printed to a :func:`plain_console`."""
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def readable_bytes(count: float) -> str:
    """``count`` bytes for people: 37.1 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def times(count: int) -> str:
    """A number of times in words: once, 2 times."""
    return "once" if count == 1 else f"{count} times"


def clock(seconds: float) -> str:
    """A duration for people: 1:02:03, 0:07, -:-- where it is NaN."""
    if math.isnan(seconds):
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def ledger_table(collector: Collector) -> Table:
    """The ledger of a run, a line a count."""
    ledger = collector.ledger
    rows = [
        ("slots", ledger.slots, "= executed + reset slots"),
        ("  executed", ledger.executed, "= stored + discarded + carried + lost"),
        ("    stored", ledger.stored, "transitions in the storage"),
        ("    discarded", ledger.discarded, "beyond the budget or given up"),
        ("    carried", ledger.carried, "waiting for a next batch"),
        ("    lost", ledger.lost, "died with a process, uncommitted"),
        ("  reset slots", ledger.reset_slots, "never stored, never counted"),
        ("ticks", ledger.ticks, "of the simulator, in stored transitions"),
        ("episodes complete", ledger.episodes_complete, _returns(collector)),
        ("episodes cut", ledger.episodes_cut, "left unfinished"),
    ]
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    for name, count, meaning in rows:
        table.add_row(name, f"{count:,}", meaning)
    table.add_row("seed", str(ledger.seed), "")
    return table


def _returns(collector: Collector) -> str:
    last = min(100, len(collector.episodes))
    if not last:
        return ""
    metrics = collector.metrics(last)
    return (
        f"the last {last}: mean return {metrics['return_mean']:.5g}, "
        f"mean length {metrics['length_mean']:.5g}"
    )
