"""Explain errors of the system's limits, for example of open files, by their numbers."""

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from tallyroll.collector.errors import ArgumentError

_LIMITS = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
"""Open files, of the process or of all; processes, or memory for one."""


@contextmanager
def limits_named(num_workers: int) -> Iterator[None]:
    """Say which limit it was that kept workers from being started.

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
