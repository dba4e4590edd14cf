"""Lifetime of worker processes: they end with their parent, and ignore a terminal's signals.

Workers in threads are part of the parent's process, and Ray ends the actors of a program that
ended.
"""

import fcntl
import os
import signal
from multiprocessing.connection import wait

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that a terminal, a shell or a batch system sends to whole groups.

The parent handles them.
"""


def _nothing(number: int, frame: object) -> None:
    """Ignore a signal. An environment's own processes would inherit SIG_IGN, but not a handler."""


def end_with_parent(alive: int) -> None:
    """Make this process the leader of a group that the kernel kills when the parent dies.

    The group includes processes that an environment started, and ends even if a step hangs.
    ``alive`` is the pipe that was given to :func:`kill_when_closed`.
    """
    for number in IGNORED:
        signal.signal(number, _nothing)
        signal.siginterrupt(number, False)
    os.setpgid(0, 0)
    # The signals were blocked before this process started, so that none interrupted its imports.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    # Open the same pipe again, so that the parent cannot change its settings.
    again = os.open(f"/proc/self/fd/{alive}", os.O_RDONLY | os.O_CLOEXEC)
    kill_when_closed(again, -os.getpgrp())
    if wait([alive], 0):  # the parent died meanwhile
        os.killpg(os.getpgrp(), signal.SIGKILL)


def kill_when_closed(pipe: int, owner: int) -> None:
    """Let the kernel kill ``owner`` when all writing ends of a pipe are closed.

    ``pipe`` is the reading end of that pipe.

    ``owner`` is a process id, or the negative of a process group. The setting belongs to the open
    file description, which all processes that inherited ``pipe`` share.
    """
    fcntl.fcntl(pipe, fcntl.F_SETOWN, owner)
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def kill_group(pid: int) -> None:
    """Kill a worker and all processes that its environment started."""
    for kill in (os.killpg, os.kill):  # the worker may not lead a group yet
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
