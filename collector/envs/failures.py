"""Errors that explain why an environment failed, if the error of its library does not.

If a process of a vector environment dies, the library raises an ``EOFError`` without a message. If
an environment follows gym's API before 0.26, unpacking its results raises some unrelated Python
error.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from inspect import currentframe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import Empty
from threading import Thread
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import Any, Final
from weakref import WeakSet, ref

from tallyroll.collector.compat import gym_like_info, is_waiting, lane_in, trace_of_process
from tallyroll.collector.envs.calls.objects import own_attribute
from tallyroll.collector.envs.gymnasium.sequential_step import SequentialStep
from tallyroll.collector.envs.system import System
from tallyroll.collector.errors import EnvironmentDied, EnvironmentRefused
from tallyroll.collector.user_code import user_code


class env_code(user_code):
    """Context manager that raises the error of :func:`explain` if an environment's call fails.

    Args:
        place: the name of the call; see :class:`UserCode`.
        lane: lane number in the run, if the call concerns a single lane.
    """

    def __init__(self, place: str, lane: int | None = None) -> None:
        super().__init__(place)
        self._lane = lane

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raise the error that explains ``error``, if there is one."""
        super().__exit__(kind, error, trace)
        if error is not None and (found := explain(error, self._lane)) is not None:
            raise found from error


def explain(error: BaseException, lane: int | None = None) -> Exception | None:
    """Return an error that explains why an environment raised ``error``.

    Return None if ``error`` needs no explanation.

    Args:
        error: the exception, with its traceback.
        lane: lane number in the run, used if the traceback does not identify the lane.
    """
    if (died := death_of(error)) is not None:
        return died
    if isinstance(error, Exception):
        _end_waiting(error)
    return old_api_of(error, lane)


def lane_of(error: BaseException) -> int | None:
    """Return the lane of a vector environment whose step or reset raised ``error``, if any."""
    found = None
    for frame in _frames(error):
        lane = lane_in(frame, SequentialStep)
        if lane is not None:
            found = lane
            # A call within AsyncVectorEnv.step_wait may name another lane.
            if frame.f_code.co_name != "step_wait":
                break
    return found


def _frames(error: BaseException) -> Iterator[FrameType]:
    return (frame for frame, _ in walk_tb(error.__traceback__))


def _first_lane(error: BaseException) -> int:
    """Return the number in the run of the first lane of the system that raised ``error``."""
    owners = (frame.f_locals.get("self") for frame in _frames(error))
    return next((each.first_lane for each in owners if isinstance(each, System)), 0)


# --- processes that die ---------------------------------------------------------------------------

_EXIT_SECONDS: Final = 2.0
"""Timeout for the exit of a process whose pipe is closed."""
_OTHERS_SECONDS: Final = 0.1
"""Timeout for the exit of further processes that die in the same step."""
_CAUSES: Final = {
    0: "no error; for example sys.exit or an interrupt",
    1: "usually an exception; see the traceback on stderr",
    -signal.SIGKILL: "usually the kernel's out-of-memory killer; see dmesg",
    -signal.SIGSEGV: "a fault in native code of the environment",
    -signal.SIGABRT: "native code of the environment aborted",
    -signal.SIGBUS: "usually full shared memory; see df /dev/shm",
    -signal.SIGTERM: "another process terminated it",
    -signal.SIGINT: "an interrupt",
}
_watched: WeakSet[Any] = WeakSet()


def _close_others() -> None:
    """Close the pipes of the other lanes of a ``SubprocVecEnv`` in the forked process of a lane.

    A ``SubprocVecEnv`` makes all pipes before the first process. If a lane dies while the vector is
    made and other processes keep its pipe open, a call that waits for the lane never returns.
    """
    frame = currentframe()
    while frame is not None:
        if frame.f_code.co_name == "__init__":
            own = getattr(frame.f_locals.get("self"), "__dict__", {})
            if "work_remotes" in own and "processes" in own:
                for lane, pipe in enumerate(own["work_remotes"]):
                    if lane != len(own["processes"]):
                        pipe.close()
        frame = frame.f_back


os.register_at_fork(after_in_child=_close_others)


def watch_processes(vector: Any) -> None:
    """Make calls of ``vector`` raise ``EOFError`` if they wait for a process that has died.

    Processes that were forked at the wrong moment, by another thread or by the process itself, keep
    the pipe of the dead process open, so that the call would wait forever. A background thread
    waits for the processes and adds no overhead to a step. The function does nothing for vectors
    without processes.
    """
    processes, pipes = _processes_of(vector)
    if not processes or vector in _watched:
        return
    _watched.add(vector)
    exits: dict[int, tuple[Any, ref[Connection]]] = {}
    for process, pipe in zip(processes, pipes, strict=True):
        exits[_exit_handle(process)] = process, ref(pipe)
    Thread(target=_watch, args=(exits,), name="tallyroll-processes", daemon=True).start()


def _exit_handle(process: Any) -> int:
    """Return a file descriptor that is ready once ``process`` has exited."""
    # Forked processes inherit a sentinel, which then stays open. Not every system has pidfd_open.
    with suppress(AttributeError, OSError):
        return os.pidfd_open(process.pid)
    return int(process.sentinel)


def _watch(exits: dict[int, tuple[Any, ref[Connection]]]) -> None:
    with suppress(OSError, ValueError):  # the process object was closed
        while exits:
            ready = wait(list(exits))
            for handle in [each for each in exits if each in ready]:
                process, pipe = exits.pop(handle)
                if handle != process.sentinel:
                    os.close(handle)
                _hang_up(pipe())


def _hang_up(pipe: Connection | None) -> None:
    """End a read of ``pipe`` in another thread. Data that was sent before is still read."""
    with suppress(OSError):  # the pipe was closed
        if pipe is None:
            return
        with socket.socket(fileno=os.dup(pipe.fileno())) as end:
            if not pipe.closed:  # otherwise the descriptor may already belong to another file
                end.shutdown(socket.SHUT_RDWR)


def _end_waiting(error: Exception) -> None:
    """End the processes of a vector if ``error`` interrupted a call that waits for their results.

    The vector's own ``close`` would wait for results that were already read.
    """
    for frame in _frames(error):
        vector: Any = frame.f_locals.get("self")
        if frame.f_code.co_name in ("step_wait", "reset_wait") and is_waiting(vector):
            _end(vector, vector.processes)


def death_of(error: BaseException) -> EnvironmentDied | None:
    """Return the error for a dead process of a vector, if its pipe broke in ``error``.

    The function ends the other processes too, because the vector's own ``close`` would wait for
    their answers.
    """
    if not isinstance(error, (EOFError, OSError)):
        return None
    owners = [frame.f_locals.get("self") for frame in _frames(error)]
    broken = next((each for each in reversed(owners) if isinstance(each, Connection)), None)
    for vector in owners:
        processes, pipes = _processes_of(vector)
        lane = next((i for i, pipe in enumerate(pipes) if pipe is broken), None)
        if broken is not None and lane is not None:
            return _died(error, vector, lane, processes)
    return None


def _processes_of(vector: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the processes of all lanes and the pipes to them; both are empty if there are none."""
    processes = own_attribute(vector, "processes")
    pipes = own_attribute(vector, "parent_pipes") or own_attribute(vector, "remotes")
    ours = isinstance(processes, (list, tuple)) and isinstance(pipes, (list, tuple))
    return (processes, pipes) if ours and len(pipes) == len(processes) else ((), ())


def _died(
    error: BaseException, vector: Any, lane: int, processes: Sequence[Any]
) -> EnvironmentDied:
    raised = _raised_in(vector)
    processes[lane].join(_EXIT_SECONDS)
    until = time.monotonic() + _OTHERS_SECONDS
    while time.monotonic() < until and any(each.exitcode is None for each in processes):
        time.sleep(_OTHERS_SECONDS / 10)
    # A process that is asked to close exits with code 0, or may still be running.
    fine = {None, 0} if any(each.f_code.co_name == "close" for each in _frames(error)) else {None}
    codes = {
        at: each.exitcode
        for at, each in enumerate(processes)
        if at == lane or not (each.exitcode in fine or at in raised)
    }
    _end(vector, processes)
    first = _first_lane(error)
    ends = ", ".join(f"that of lane {first + at} {_ending(code)}" for at, code in codes.items())
    causes = dict.fromkeys(cause for code in codes.values() if (cause := _CAUSES.get(code)))
    why = f" ({'; '.join(causes)})" if causes else ""
    # A SubprocVecEnv sends no exceptions, so the cause may be the API of its environment.
    advice = f" {_ADVICE}" if 1 in codes.values() and hasattr(vector, "remotes") else ""
    found = EnvironmentDied(
        f"{type(vector).__name__}: expected a running process for each lane, but {ends}{why}. Make "
        f"the environment again. To continue a run in a storage, pass resume=True.{advice}",
        lanes=[first + at for at in codes],
        exitcodes=[*codes.values()],
    )
    for at, trace in raised.items():
        found.add_note(f"tallyroll: the process of lane {first + at} raised:\n{trace}")
    return found


def _raised_in(vector: Any) -> dict[int, str]:
    """Return tracebacks of exceptions that other processes sent, by index in the vector."""
    found: dict[int, str] = {}
    queue = own_attribute(vector, "error_queue")
    with suppress(Empty, OSError, ValueError):
        while queue is not None:
            at, *_, trace = queue.get(timeout=_OTHERS_SECONDS)
            found[at] = trace
    return found


def _ending(code: int | None) -> str:
    if code is None:
        return "closed its pipe"
    if code >= 0:
        return f"exited with code {code}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


def _end(vector: Any, processes: Sequence[Any]) -> None:
    """End all processes of a vector and mark the vector as closed."""
    for end in ("terminate", "kill"):
        running = [each for each in processes if each.exitcode is None]
        for each in running:
            getattr(each, end)()
        until = time.monotonic() + _EXIT_SECONDS
        for each in running:
            each.join(max(0.0, until - time.monotonic()))
    vector.closed = True


# --- the API of gym before 0.26 -------------------------------------------------------------------

_LIBRARIES: Final = ("gymnasium", "stable_baselines3", "torchrl", "tallyroll")
"""Packages that call environments. An exception that other code raised is the user's own."""
_STEP = "(observation, reward, terminated, truncated, info) from step"
_RESET = "(observation, info) from reset"
_ADVICE = (
    "If the environment follows gym's API before 0.26, return five values from step and "
    "(observation, info) from reset(seed=, options=), or wrap the environment in "
    "shimmy.GymV21CompatibilityV0(env=env)."
)
_METHOD = "a method reset(seed=, options=)"
_DIFFERENCES: Final = tuple(
    (re.compile(pattern), wanted, got)
    for pattern, wanted, got in (
        (r"reset\(\) got an unexpected keyword argument '(\w+)'", _METHOD, "one without {}"),
        (r"reset\(\) takes no (keyword )?arguments", _METHOD, "one without arguments"),
        (r"\(expected 2, got (\d+)\)", _RESET, "{} value(s)"),
        (r"\(expected 2\)", _RESET, "more values"),
        (r"expected 2 values from an environment, got (\d+)", _RESET, "{} value(s)"),
        (r"\(expected 5, got (\d+)\)", _STEP, "{} value(s)"),
        (r"\(expected 5\)", _STEP, "more values"),
        (r"expected 5 values from an environment, got (\d+)", _STEP, "{} value(s)"),
        (r"four or five element tuple, .* returned: (\d+)", _STEP, "{} value(s)"),
        (r"Expects step result to be a tuple, actual type: <class '(.*)'>", _STEP, "{}"),
        (r"unpack non-iterable (\S+) object", f"{_RESET} or {_STEP}", "{}"),
        (r"'(\S+)' object is not iterable", f"{_RESET} or {_STEP}", "{}"),
        (r"'(\S+)' object has no attribute 'items'", f"{_RESET} or {_STEP}", "{} as the info"),
        (r"string indices must be integers", _RESET, "str as the observation"),
        (r"has no attribute 'seed'", _METHOD, "one without seed"),
    )
)
"""Pattern of the exception's text, the expected interface, and a format for the actual one."""
_CALLS = re.compile("step|reset|seed")
"""Pattern for names of functions that call an environment."""
_FILE = re.compile(r'^  File "(.*)", line \d+', re.MULTILINE)


def old_api_of(error: BaseException, lane: int | None = None) -> EnvironmentRefused | None:
    """Return the error for an environment whose methods do not follow Gymnasium's API.

    For ``lane``, see :func:`explain`. Return None if ``error`` has another cause.
    """
    found = _difference(error)
    if found is None or not _is_raised_by_library(error):
        return None
    at = lane_of(error)
    return refused_api(lane if at is None else _first_lane(error) + at, *found)


def refused_api(lane: int | None, wanted: str, got: str) -> EnvironmentRefused:
    """Return the error for an environment whose interface differs from the expected one."""
    return EnvironmentRefused(
        f"{'the environment' if lane is None else f'lane {lane}'}: expected {wanted}, got {got}. "
        f"{_ADVICE}"
    )


def require_infos(infos: Sequence[Any], first_lane: int) -> None:
    """Validate that resets of all lanes returned infos.

    Raises:
        EnvironmentRefused: an info is not a mapping. The message names the lane.
    """
    for lane, info in enumerate(infos):
        if not isinstance(info, Mapping):
            raise refused_api(first_lane + lane, _RESET, f"{type(info).__name__} as the info")


def _difference(error: BaseException) -> tuple[str, str] | None:
    """Return the expected and the actual interface of an environment; None if not recognized."""
    for info in map(gym_like_info, _frames(error)):
        if info is not None:
            return _RESET, f"{type(info).__name__} as the info"
    before, text = error.__context__, str(error)
    if isinstance(error, AttributeError) and isinstance(before, TypeError):
        found = _difference(before)  # the library tried another method after this error
        if found is not None:
            return found
    for pattern, wanted, got in _DIFFERENCES:
        if (match := pattern.search(text)) is not None:
            return wanted, got.format(*match.groups())
    return None


def _is_raised_by_library(error: BaseException) -> bool:
    """Return True if a library raised ``error`` itself while it stepped, reset or seeded lanes."""
    files = ""
    frames = [*_frames(error)]
    if not any(_CALLS.search(frame.f_code.co_name) for frame in frames):
        return False
    for frame in frames:
        files = trace_of_process(frame) or f'  File "{frame.f_code.co_filename}", line 0'
    names = _FILE.findall(files)
    files_of = (getattr(sys.modules.get(each), "__file__", None) for each in _LIBRARIES)
    places = [f"{Path(each).parent}{os.sep}" for each in files_of if each]
    return bool(names) and names[-1].startswith(tuple(places))
