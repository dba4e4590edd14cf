"""Errors for workers that cannot be started, or that failed: the cause, the lanes, the remedy."""

import errno
import os
import pickle
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from gymnasium.error import UnregisteredEnv

from tallyroll.collector.compat import is_starting
from tallyroll.collector.envs.gymnasium.make import NOT_REGISTERED
from tallyroll.collector.errors import (
    ArgumentError,
    CollectorError,
    WorkerDied,
    WorkerError,
    WorkerHung,
    WorkerRaised,
)
from tallyroll.collector.workers.messages import Raised

if TYPE_CHECKING:
    from tallyroll.collector.workers.processes import Member

_SHOWN = 16
"""Lanes whose seeds and actions a message shows."""
_UNGUARDED: Final = 78
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
        os._exit(_UNGUARDED)  # the parent says why; a fork server would make another status of it
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


def worker_error(member: "Member", report: Raised) -> Exception:
    """The error for an exception in a worker."""
    original = _unpickled(report.error)
    if isinstance(original, CollectorError):
        original.add_note(f"raised in {member.who}:\n{report.traceback}")
        return original
    lane = None if report.lane is None else member.lanes[report.lane]
    details = _details(member, lane)
    hint = f"\n{NOT_REGISTERED}" if isinstance(original, UnregisteredEnv) else ""
    error = WorkerRaised(
        f"{member.who} raised {report.kind} while {report.doing or 'getting ready'}: "
        f"{report.message}{details}{hint}\nIts traceback:\n{report.traceback}",
        **_facts(member, lane),
        worker_traceback=report.traceback,
    )
    error.__cause__ = original
    return error


def died(member: "Member") -> WorkerError:
    """The error for a worker whose process ended."""
    code = member.process.exitcode
    how = "ended"
    if code is not None and code < 0:
        how = f"was killed by {_signal(-code)}"
    elif code is not None:
        how = f"exited with status {code}"
    if code == _UNGUARDED:
        text = (
            'expected the collector to be made under `if __name__ == "__main__":`, because each '
            f"worker imports the main module again; {member.who} came to it too. Write\n\n"
            '    if __name__ == "__main__":\n'
            "        with MultiprocessCollector(...) as collector:\n"
            "            ..."
        )
    elif not member.ready:
        text = f"{member.who} {how} before it was ready. What it wrote to stderr may say why"
    else:
        text = (
            f"{member.who} {how}{_details(member, None)}\nWhat was committed is safe; "
            'on_worker_death="respawn" goes on with a new worker'
        )
        if code == -signal.SIGKILL:
            text += ". Where nobody killed it, the machine may be out of memory"
    return WorkerDied(text, **_facts(member, None), exitcode=code)


def hung(member: "Member", seconds: float) -> WorkerError:
    """The error for a worker that made no progress for so many seconds."""
    if not member.ready:
        text = f"{member.who} was not ready after start_timeout={seconds:g} seconds, and was ended"
    else:
        text = (
            f"{member.who} completed no step within step_timeout={seconds:g} seconds, and was ended"
            f"{_details(member, None)}\nWhat was committed is safe; make step_timeout "
            'larger, or pass on_worker_death="respawn" to go on with a new worker'
        )
    return WorkerHung(text, **_facts(member, None))


def _details(member: "Member", lane: int | None) -> str:
    """Lane, seed and last action, as far as they are known."""
    facts = _facts(member, lane)
    seeds, last = facts["seeds"], facts["action"]
    if lane is not None:
        of = f"; lane {lane}"
        of += f" (seed {seeds[0]})" if seeds else ""
        return of + ("" if last is None else f", last action {last!r:.400}")
    text = ""
    if seeds:
        more = ", …" if len(seeds) > _SHOWN else ""
        text += f"; seeds {str(list(seeds[:_SHOWN]))[1:-1]}{more}"
    return text + ("" if last is None else f"; last actions {last!r:.400}")


def _facts(member: "Member", lane: int | None) -> dict[str, Any]:
    seeds, action = list(member.seeds), member.last_action
    if lane is not None:
        at = member.lanes.index(lane)
        seeds = seeds[at : at + 1]
        action = None if action is None else action[at]
    last = None if action is None else action.tolist()
    return {
        "worker": member.index,
        "lanes": member.lanes,
        "lane": lane,
        "seeds": seeds,
        "action": last,
    }


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _unpickled(error: bytes | None) -> BaseException | None:
    """The exception as it was raised, or None where it does not travel."""
    if error is None:
        return None
    try:
        found = pickle.loads(error)
    except Exception:  # noqa: BLE001  its text has to do
        return None
    return found if isinstance(found, BaseException) else None
