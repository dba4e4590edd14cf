"""The command ``tallyroll``, also as ``python -m tallyroll`` if its folder is not on the path.

This module imports nothing large, so that it handles Ctrl-C from the start.
"""

import contextlib
import os
import signal
import sys
from types import FrameType

_STOPPED = "tallyroll: stopped by Ctrl-C during start-up; nothing was changed\n"


def main() -> int:
    """Run the command line of this process, and return the exit status.

    Until the command is imported, Ctrl-C ends the process at once. A `KeyboardInterrupt` in the
    middle of an import would print a traceback, or be caught by the imported library.
    """
    before = signal.getsignal(signal.SIGINT)
    handles = before is signal.default_int_handler  # otherwise the parent ignores Ctrl-C
    if handles:
        signal.signal(signal.SIGINT, _stop)

    def ready() -> None:
        if handles:
            signal.signal(signal.SIGINT, before)

    from tallyroll.collector.cli import main as command  # imported now that Ctrl-C is handled

    return command(ready=ready)


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C prints no second line
    with contextlib.suppress(OSError):  # stderr is closed
        erase = "\r\x1b[K" if os.isatty(2) else ""  # the line that the command shows meanwhile
        os.write(2, f"{erase}{_STOPPED}".encode())
    os._exit(128 + signal.SIGINT)


if __name__ == "__main__":  # a worker process that is spawned imports this too
    sys.exit(main())
