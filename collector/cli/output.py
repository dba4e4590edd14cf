"""Output of commands: on stdout and stderr, which may be closed, full, or no longer read.

Text from a storage is made safe for a terminal. A manifest, a file name or a column's name may
hold anything: codes that a terminal obeys, marks that turn the direction of reading, line ends
that make one line look like two.
"""

import contextlib
import math
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from tallyroll.collector.errors import CollectorError

_MOST_LETTERS = 2000
_NOT_SHOWN = (
    "(the command is not shown: a name in it holds control characters; put it together yourself, "
    "from names that you know)"
)


class CommandError(CollectorError):
    """The command cannot be carried out; the message says what to do. Nothing was changed.

    ``command`` is one to be pasted instead, shown below the message.
    """

    def __init__(self, message: str, command: str = "") -> None:
        super().__init__(message)
        self.command = command


class OutputFailed(CollectorError):
    """Standard output cannot be written. Everything else that the command did is done."""


def visible(text: str, *, lines: bool = False) -> str:
    r"""``text`` with all that is not printable escaped as in Python: ``\x1b``, ``\u202e``.

    Line ends and tabs too, unless they are to stay (``lines``).
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode()
        for each in text
    )


def shortened(text: str) -> str:
    """``text`` without its middle, where it is as long as values that are given by mistake."""
    most = _MOST_LETTERS // 2
    return text if len(text) <= 2 * most else f"{text[:most]} … {text[-most:]}"


def pasteable(command: str) -> str:
    """A command that does in a shell what it shows, or a sentence that says why there is none."""
    return command if visible(command) == command else _NOT_SHOWN


def emit(text: str) -> None:
    """Write ``text`` to stdout, with letters that its encoding does not have escaped.

    Raises:
        OutputFailed: that failed.
        BrokenPipeError: its reader is gone.
    """
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except KeyboardInterrupt:  # a signal while nothing took it
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
    """Let the interpreter's own flush at exit succeed."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


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


def reopen_closed() -> None:
    """Put something in the place of standard streams that are closed.

    A file that is opened later would take their number, and what is written to stderr would land
    in it. Writing to a stdout that was closed stays an error; the rest is not missed.
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
    """``value``, with text where JSON has no number for it."""
    if isinstance(value, dict):
        return {name: as_json(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(each) for each in value]
    no_number = isinstance(value, float) and not math.isfinite(value)
    return str(value) if no_number or isinstance(value, complex) else value
