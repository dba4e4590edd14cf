"""Standard streams that are closed, full, or no longer read."""

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from tallyroll.collector.cli.escaped_text import encodable, visible
from tallyroll.collector.errors import CollectorError


class OutputFailed(CollectorError):
    """Standard output cannot be written. Everything else that the command did is done."""


def reopen_closed() -> None:
    """Put something in the place of standard streams that are closed.

    A file that is opened later would take their number, and what somebody writes to stderr would
    land in it. Writing to a stdout that was closed stays an error, and nobody misses the rest.
    """
    for number, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # takes the lowest number that is free
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def emit(text: str) -> None:
    """Write ``text`` to stdout.

    Raises:
        OutputFailed: that failed.
        BrokenPipeError: nobody reads it any more.
    """
    try:
        sys.stdout.write(encodable(text, sys.stdout.encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputFailed(
            f"cannot write to standard output ({error.strerror}); the report is incomplete"
        ) from error


def say(text: str, *, below: str = "", lines: bool = False) -> None:
    """Write one line to stderr, with what a terminal would obey made visible.

    Args:
        text: the line; of several where ``lines`` is True.
        below: a line of its own behind it, indented.
        lines: keep line ends.
    """
    shown = visible(text, lines=lines) + (f"\n    {visible(below)}" if below else "")
    sys.stderr.write(shown + "\n")


@contextlib.contextmanager
def visible_warnings() -> Iterator[None]:
    """Within it, a warning that Python shows has nothing in it that a terminal would obey."""
    before: Any = warnings.formatwarning

    def formatted(message: object, *where: Any, **more: Any) -> str:
        return str(before(visible(str(message)), *where, **more))

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = before


def abandon_stdout() -> None:
    """Let the interpreter's own flush at exit succeed."""
    try:
        number = sys.stdout.fileno()
    except (io.UnsupportedOperation, ValueError):
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)
