"""Page on which a command writes its report."""

import io
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tallyroll.storage.rows.pages import cell, visible

FILE_WIDTH = 160


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
            table.add_row(*map(cell, row))
        self.print(table)

    @property
    def text(self) -> str:
        """Text printed so far."""
        assert isinstance(self.file, io.StringIO)
        return self.file.getvalue()
