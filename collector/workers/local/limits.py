"""Reasons why workers cannot be started: a main module without a guard, and system limits."""

import errno
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tallyroll.collector.compat import is_starting
from tallyroll.collector.errors import ArgumentError

UNGUARDED: Final = 78
"""Exit status of a worker that constructs the collector itself."""
_LIMITS = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
"""Error numbers for limits: open files per process and in total, processes, and memory."""


def require_guard() -> None:
    """End this process if it is a worker that is still importing its main module.

    A process that is not forked imports the main module again, to find the objects that it
    receives. Code in it outside of ``if __name__ == "__main__":`` runs again too, so that each
    worker would start its own workers. Source: "Safe importing of main module" in the documentation
    of ``multiprocessing``.

    Raises:
        ArgumentError: the main module was read from stdin, so workers cannot import it.
    """
    if is_starting():
        # The parent reports it; a fork server would change an exception to another status.
        os._exit(UNGUARDED)
    if getattr(sys.modules.get("__main__"), "__file__", None) == "<stdin>":
        raise ArgumentError(
            "expected a program that worker processes can import, got one that was read from "
            "stdin. Save the program in a file, and run that file."
        )


@contextmanager
def limits_named(num_workers: int) -> Iterator[None]:
    """Translate a system error into one that names the limit which prevented workers from starting.

    Raises:
        ArgumentError: a limit of the system was reached.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _LIMITS:
            raise
        files, processes = (
            resource.getrlimit(which)[0]
            for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)
        )
        raise ArgumentError(
            f"num_workers: {num_workers} workers could not be started ({error.strerror}). This "
            f"process may have {_spelt(files)} open files (ulimit -n), and its user "
            f"{_spelt(processes)} processes (ulimit -u). Use fewer workers, or raise the limit."
        ) from error


def _spelt(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else f"{limit:,}"
