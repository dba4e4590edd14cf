"""End workers with their parent, and by signals to their groups, not by the terminal's."""

import fcntl
import os
import signal
from multiprocessing.connection import wait

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""A terminal, a shell and a batch system send these to whole groups: the parent decides."""


def _nothing(number: int, frame: object) -> None:
    """A handler and not SIG_IGN, which the environment's own processes would inherit."""


def end_with_parent(alive: int) -> None:
    """Lead a process group of our own, which the kernel kills when the parent dies.

    So nothing of us is left, whatever we do then: not a step that hangs, not the processes that
    an environment started. ``alive`` is what :func:`kill_when_closed` was given.
    """
    for number in IGNORED:
        signal.signal(number, _nothing)
        signal.siginterrupt(number, False)
    os.setpgid(0, 0)
    # They were blocked since before we were born, so that none hit us while we imported.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    # The same pipe, opened again: what the parent sets on its own may come before or after.
    again = os.open(f"/proc/self/fd/{alive}", os.O_RDONLY | os.O_CLOEXEC)
    kill_when_closed(again, -os.getpgrp())
    if wait([alive], 0):  # the parent died meanwhile
        os.killpg(os.getpgrp(), signal.SIGKILL)


def kill_when_closed(pipe: int, owner: int) -> None:
    """Let the kernel kill ``owner`` when ``pipe``, a reading end, has no writer any more.

    ``owner`` is a process, or minus a process group. What is set belongs to all who have got
    ``pipe`` from one another.
    """
    fcntl.fcntl(pipe, fcntl.F_SETOWN, owner)
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def kill_group(pid: int) -> None:
    """Kill a worker and all that its environment started."""
    for kill in (os.killpg, os.kill):  # it may not lead a group yet
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
