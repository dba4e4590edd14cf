"""Output pages of reports: plain text, and HTML for notebooks. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import islice
from numbers import Integral
from typing import Any, Final, Protocol

MOST_ROWS: Final = 40
"""Maximum number of rows of an HTML table, and of lines between two tables."""
_LONGEST: Final = 200


class Page(Protocol):
    """Output of a report: lines, headings and tables."""

    def print(self, text: str = "", /) -> Any:
        """Add a line."""

    def head(self, text: str, /) -> Any:
        """Begin a section."""

    def table(self, header: Iterable[str], rows: Iterable[Iterable[object]], /) -> Any:
        """Add a table with a column of names and columns of values."""


class PageSource:
    """Object that writes itself to a `Page`, as text for ``print`` and as HTML for notebooks."""

    __slots__ = ()

    def _show_on_(self, page: Page) -> None:
        raise NotImplementedError

    def __str__(self) -> str:
        page = TextPage()
        self._show_on_(page)
        return page.text

    def _repr_html_(self) -> str:
        page = HtmlPage()
        self._show_on_(page)
        return page.html


class TextPage:
    """Page of plain text, with control characters escaped."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def print(self, text: str = "", /) -> None:
        """Add a line."""
        self._lines.append(visible(text))

    def head(self, text: str, /) -> None:
        """Begin a section, below an empty line."""
        self._lines += ["", visible(text)]

    def table(self, header: Iterable[str], rows: Iterable[Iterable[object]], /) -> None:
        """Add a table. Values are aligned to the right."""
        cells = [[visible(cell(each)) for each in row] for row in (header, *rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for name, *values in cells:
            padded = (v.rjust(width) for v, width in zip(values, widths[1:], strict=True))
            self._lines.append("  ".join([name.ljust(widths[0]), *padded]).rstrip())

    @property
    def text(self) -> str:
        """All lines, without empty lines at the beginning."""
        return "\n".join(self._lines).lstrip("\n")


class HtmlPage:
    """Page of plain HTML without colours, so that it suits light and dark notebooks."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._lines = 0

    def print(self, text: str = "", /) -> None:
        """Add a line, unless there are already `MOST_ROWS` since the last heading or table."""
        self._lines += 1
        if text and self._lines <= MOST_ROWS:
            self._parts.append(f'<div style="white-space: pre-wrap">{_escaped(text)}</div>')
        elif self._lines == MOST_ROWS + 1:
            self._parts.append("<div>…</div>")

    def head(self, text: str, /) -> None:
        """Begin a section."""
        self._lines = 0
        self._parts.append(f"<div><b>{_escaped(text)}</b></div>")

    def table(self, header: Iterable[str], rows: Iterable[Iterable[object]], /) -> None:
        """Add the first `MOST_ROWS` rows of a table."""
        self._lines = 0
        head = "".join(f"<th>{_escaped(each)}</th>" for each in header)
        every = iter(rows)
        body = [
            "".join(f"<td>{_escaped(cell(each))}</td>" for each in row)
            for row in islice(every, MOST_ROWS)
        ]
        lines = "".join(f"<tr>{row}</tr>" for row in body)
        self._parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>")
        if more := sum(1 for _ in every):
            self.print(f"and {more:,} more")

    @property
    def html(self) -> str:
        """All parts in one element."""
        return f"<div>{''.join(self._parts)}</div>"


def cell(value: object) -> str:
    """Format a value of a table; integers have thousands separators."""
    return f"{value:,}" if type(value) is int else str(value)


def visible(text: str, *, lines: bool = False) -> str:
    r"""Escape characters of ``text`` that are not printable, as in Python: ``\x1b``, ``\u202e``.

    If ``lines`` is True, line breaks and tabs are kept.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode()
        for each in text
    )


def times(count: int) -> str:
    """Format a number of times in words: once, 2 times."""
    return "once" if count == 1 else f"{count} times"


def counted(count: object, noun: str) -> str:
    """Format a number of things: 1 lane, 2,000 lanes, 2 trajectories; and ? lanes for others."""
    several = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    number = f"{count:,}" if isinstance(count, Integral) else count
    return f"{number} {noun if count == 1 else several}"


def _escaped(text: str) -> str:
    shown = visible(text)
    return escape(shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}…")
