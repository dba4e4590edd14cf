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
"""The exit status of a worker that came to the collector's construction itself."""
_LIMITS = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
"""Open files, of the process or of all; processes, or memory for one."""


def require_guard() -> None:
    """End this process if it is a worker that is still importing its main module.

    A process that is not forked imports the main module again, to find there what it is sent.
    What stands in it without ``if __name__ == "__main__":`` runs again too: each worker would
    start workers of its own.
    Source: "Safe importing of main module" in the documentation of ``multiprocessing``.

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


@contextmanager
def limits_named(num_workers: int) -> Iterator[None]:
    """Say which limit of the system it was that kept workers from being started.

    Raises:
        ArgumentError: instead of the system's error.
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
            f"num_workers: {num_workers} workers could not be started ({error.strerror}), where "
            f"this process may have {_spelt(files)} open files (ulimit -n) and its user "
            f"{_spelt(processes)} processes (ulimit -u); use fewer workers, or raise the limit"
        ) from error


def _spelt(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else f"{limit:,}"
