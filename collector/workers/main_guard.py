"""Scripts that lack ``if __name__ == "__main__":``.

A process that is not forked imports the main module again, to find there what it is sent. What
stands in it without that guard runs again too: each worker would start workers of its own.
Source: "Safe importing of main module" in the documentation of ``multiprocessing``.
"""

import os
import sys
from typing import Final

from tallyroll.collector.compat import is_starting
from tallyroll.collector.errors import ArgumentError

UNGUARDED: Final = 78
"""The exit status of a worker that came to the collector's construction itself."""


def require_guard() -> None:
    """End this process if it is a worker that is still importing its main module.

    Raises:
        ArgumentError: workers could not import the main module, which came from stdin.
    """
    if is_starting():
        os._exit(UNGUARDED)  # the parent says why; a fork server would make another status of it
    if getattr(sys.modules.get("__main__"), "__file__", None) == "<stdin>":
        raise ArgumentError(
            "expected a program that worker processes can import, got one that was read from "
            "stdin; save it in a file, and run that"
        )
