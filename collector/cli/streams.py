"""Standard streams that are closed, full, or no longer read."""

import io
import os
import sys

from tallyroll.collector.errors import CollectorError


class OutputFailed(CollectorError):
    """Standard output takes no more. What the command did is done."""


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
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputFailed(
            f"standard output takes no more ({error.strerror}), so that not everything was said"
        ) from error


def abandon_stdout() -> None:
    """Let the interpreter's own flush at exit succeed."""
    try:
        number = sys.stdout.fileno()
    except (io.UnsupportedOperation, ValueError):
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)
