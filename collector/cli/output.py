"""Output of commands to stdout and stderr, which may be closed, full, or no longer read.

Text from a storage is escaped for terminals. A manifest, a file name or a column name may contain
terminal control codes, marks that change the reading direction, and line breaks that make one line
look like two.
"""

import contextlib
import math
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from tallyroll.collector.errors import CollectorError
from tallyroll.storage.rows.pages import visible as visible

_MOST_LETTERS = 2000
_NOT_SHOWN = (
    "(the command is not shown, because a name in it holds control characters; write the command "
    "yourself, with names that you know)"
)


class CommandError(CollectorError):
    """The command cannot be carried out. Nothing has changed, and the message says what to do.

    ``command`` is an alternative command to paste, shown below the message.
    """

    def __init__(self, message: str, command: str = "") -> None:
        super().__init__(message)
        self.command = command


class OutputFailed(CollectorError):
    """Standard output cannot be written. Everything else that the command did is complete."""


def shortened(text: str) -> str:
    """Remove the middle of ``text`` if it is very long, such as a value passed by mistake."""
    most = _MOST_LETTERS // 2
    return text if len(text) <= 2 * most else f"{text[:most]} … {text[-most:]}"


def pasteable(command: str) -> str:
    """Return ``command`` if it is safe to paste into a shell, otherwise an explanation."""
    return command if visible(command) == command else _NOT_SHOWN


def emit(text: str) -> None:
    """Write ``text`` to stdout, escaping letters that its encoding lacks.

    Raises:
        OutputFailed: stdout cannot be written.
        BrokenPipeError: the reader has closed the pipe.
    """
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except KeyboardInterrupt:  # a signal during a blocked write
        _abandon_stdout()
        raise
    except OSError as error:
        _abandon_stdout()
        if isinstance(error, BrokenPipeError):
            raise
        raise OutputFailed(
            f"cannot write to standard output ({error.strerror}); the report is incomplete"
        ) from error


def _abandon_stdout() -> None:
    """Redirect stdout to /dev/null, so that the interpreter's flush at exit succeeds."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def say(text: str, *, below: str = "", lines: bool = False) -> None:
    """Write one line to stderr, with terminal control characters escaped.

    Args:
        text: the line, or several if ``lines`` is True.
        below: a second line, indented.
        lines: keep line breaks.
    """
    shown = visible(text, lines=lines) + (f"\n    {visible(below)}" if below else "")
    sys.stderr.write(shown + "\n")


@contextlib.contextmanager
def visible_warnings() -> Iterator[None]:
    """Escape terminal control characters in warnings within this context."""
    before: Any = warnings.formatwarning

    def formatted(message: object, *where: Any, **more: Any) -> str:
        return str(before(visible(str(message)), *where, **more))

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = before


def reopen_closed() -> None:
    """Open replacements for standard streams that are closed.

    Otherwise a file opened later would get the file descriptor of a closed stream, and output to
    stderr would be written to that file. Writing to a stdout that was closed remains an error.
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


def as_json(value: Any) -> Any:
    """Convert ``value`` to JSON values, with text for numbers that JSON lacks."""
    if isinstance(value, dict):
        return {name: as_json(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(each) for each in value]
    no_number = isinstance(value, float) and not math.isfinite(value)
    return str(value) if no_number or isinstance(value, complex) else value
