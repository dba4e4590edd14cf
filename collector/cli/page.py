"""Page on which a command writes its report."""

import io
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tallyroll.collector.cli.output import visible
from tallyroll.collector.counting.ledger import known_ticks

FILE_WIDTH = 160
_LEDGER = {
    "slots": ("slots", "= executed + reset slots"),
    "executed": ("  executed", "= stored + discarded + carried + lost"),
    "stored": ("    stored", "transitions in the storage"),
    "discarded": ("    discarded", "beyond the budget or given up"),
    "carried": ("    carried", "waiting for a next batch"),
    "lost": ("    lost", "died with a process, uncommitted"),
    "reset_slots": ("  reset slots", "never stored, never counted"),
    "ticks": ("ticks", "of the simulator, in stored transitions"),
    "episodes_complete": ("episodes complete", ""),
    "episodes_cut": ("episodes cut", "left unfinished"),
}
"""Counts that are always shown, with their labels and meanings."""
_AGENTS = ("agent transitions", "of agents that lived or had their turn, in stored transitions")


class Page(Console):
    """Console that formats a report as text for stdout, and escapes control characters.

    Text for a file or a pipe is not wrapped to 80 columns. Only this class applies styles.
    """

    def __init__(self) -> None:
        on_terminal = sys.stdout.isatty()
        super().__init__(
            file=io.StringIO(),
            force_terminal=on_terminal,
            width=None if on_terminal else FILE_WIDTH,
            soft_wrap=True,
            markup=False,
            highlight=False,
            emoji=False,
        )

    def render_str(self, text: str, **options: Any) -> Text:
        """Convert a string to escaped text."""
        return super().render_str(visible(text), **options)

    def head(self, text: str) -> None:
        """Begin a section."""
        self.print()
        self.print(text, style="bold")

    def table(self, header: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
        """Print a table with a column of names and right-aligned columns of values."""
        name, *values = header
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column(name, no_wrap=True)
        for value in values:
            table.add_column(value, justify="right", overflow="fold")
        for row in rows:
            table.add_row(*(f"{each:,}" if type(each) is int else str(each) for each in row))
        self.print(table)

    def ledger(self, counts: Mapping[str, int], episodes: str = "") -> None:
        """Print the counts of a run, one per line; ``episodes`` is the text for complete ones."""
        shown = {**_LEDGER, "episodes_complete": ("episodes complete", episodes)}
        for name, count in counts.items():
            if count and name not in ("incarnation", "respawned"):
                plain = (name.replace("_", " "), "")
                shown.setdefault(name, _AGENTS if name == "agent_transitions" else plain)
        for name, (label, meaning) in shown.items():
            known = name != "ticks" or known_ticks(counts) is not None
            shown_count = f"{counts.get(name, 0):,}" if known else "unknown"
            self.print(f"{label:<17} {shown_count:>15}  {meaning}".rstrip())
        if respawned := counts.get("respawned", 0):
            self.print(
                f"workers were replaced {times(respawned)}; what they had not handed over is lost, "
                "and was collected again"
            )
        # Replacing a worker counts as a start too.
        if (resumed := counts.get("incarnation", 0) - respawned) > 0:
            self.print(
                f"resumed {times(resumed)}; of a process that was killed, the counts are those of "
                "its last commit"
            )

    @property
    def text(self) -> str:
        """Text printed so far."""
        assert isinstance(self.file, io.StringIO)
        return self.file.getvalue()


def times(count: int) -> str:
    """Format a number of times in words: once, 2 times."""
    return "once" if count == 1 else f"{count} times"
