"""Fork server of worker processes: it imports torch and TorchRL once, and forks each worker.

`multiprocessing` has one fork server per program. User code may already use it, with other
preloaded modules and another environment. Workers therefore have a separate server. The parent
reaches it through a socket pair, which has no name. The server ends when its parent closes the
other socket or is killed.
"""

import errno
import io
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import (
    forkserver,
    get_all_start_methods,
    parent_process,
    popen_forkserver,
    process,
    reduction,
    resource_tracker,
    spawn,
    util,
)
from multiprocessing.connection import wait
from multiprocessing.context import set_spawning_popen
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tallyroll.collector.compat import (
    choose_render_device,
    interpreter_flags,
    preloaded_modules,
    run_sent,
    set_openblas_threads,
)
from tallyroll.collector.workers.local.lifetime import IGNORED

PRELOADED = "tallyroll.collector.workers.local.process_main"
"""The module that the server imports, with everything that workers need of torch and TorchRL."""
_START_SECONDS = 120.0
"""Seconds that the server may take to import."""
_FORK_SECONDS = 30.0
_ALONE = {
    # Keep libraries from starting threads when they are loaded: a fork keeps only one thread.
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    # TorchRL counts the GPUs when it is imported; a process in which CUDA began cannot be forked.
    "CUDA_VISIBLE_DEVICES": "",
}


def default_start_method() -> str:
    """Return ``"forkserver"``, or ``"spawn"`` if our server is not usable.

    Our server is not used in a child of multiprocessing, such as a data loader's worker, because
    each child would start its own server. It is not used in a program that preloads modules either,
    because the program expects a fork server to have these modules.
    """
    refused = (
        "forkserver" not in get_all_start_methods()
        or parent_process() is not None
        or modules_of_caller()
        or hasattr(sys, "frozen")  # an executable that cannot run other code
    )
    return "spawn" if refused else "forkserver"


def modules_of_caller() -> list[str]:
    """Return the modules that the program preloads in multiprocessing's fork server."""
    return [each for each in preloaded_modules() if each not in ("__main__", PRELOADED)]


class ForkServer:
    """A process that forks workers. It starts with the first worker, and again if it died."""

    _control: socket.socket | None = None
    """Our end of the socket pair; None until the server is ready."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget the server, which belongs to the process that forked this one."""
        self._lock = threading.RLock()  # a thread that does not exist here may hold the old lock
        self._pid = 0
        self._drop()

    def _drop(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    def stop(self) -> None:
        """End the server, if there is one, and wait for it. Processes that it forked continue."""
        with self._lock:
            self._drop()
            with suppress(ChildProcessError):
                if self._pid and os.waitpid(self._pid, os.WNOHANG) == (0, 0):
                    os.kill(self._pid, signal.SIGKILL)  # it may hang
                    os.waitpid(self._pid, 0)
            self._pid = 0

    def start(self) -> None:
        """Start the server unless it runs, and wait until it has imported its modules.

        Raises:
            OSError: the server could not be started.
        """
        with self._lock:
            if self._control is not None and not self._ended():
                return
            self.stop()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                with theirs:
                    self._pid = _launched(theirs.fileno())
                if not wait([ours], _START_SECONDS) or not ours.recv(1):
                    raise OSError(errno.EAGAIN, "the fork server did not start")
            except BaseException:
                ours.close()  # this ends the server
                raise
            self._control = ours

    def fork(self, files: Sequence[int]) -> tuple[int, int, int]:
        """Start a process that inherits ``files``.

        Returns:
            The reading end of a pipe with its exit status, the writing end of a pipe for its
            pickled content, and its process id.

        Raises:
            OSError: a limit of the system was reached.
        """
        with self._lock:
            self.start()
            try:
                return self._fork(files)
            except ConnectionError:  # it died after the check in `start`
                self.start()
                return self._fork(files)

    def _fork(self, files: Sequence[int]) -> tuple[int, int, int]:
        assert self._control is not None
        _share_limits(self._pid)
        status, their_status = os.pipe()
        their_content, content = os.pipe()
        tracker: Any = resource_tracker.getfd()
        sent = [their_content, their_status, tracker, *files]
        try:
            try:
                socket.send_fds(self._control, [bytes([len(sent)])], sent, socket.MSG_NOSIGNAL)
            finally:
                os.close(their_content)
                os.close(their_status)
            if not wait([status], _FORK_SECONDS):
                raise OSError(errno.EAGAIN, "the fork server did not answer")
            return status, content, forkserver.read_signed(status)
        except BaseException as error:
            os.close(status)
            os.close(content)
            if not isinstance(error, EOFError):
                raise
            if self._ended():
                raise ConnectionResetError("the fork server died") from error
            raise OSError(errno.EAGAIN, "the fork server could not fork") from error

    def _ended(self) -> bool:
        """Return True if the server has closed its end of the socket."""
        assert self._control is not None
        return bool(wait([self._control], 0))


SERVER = ForkServer()
os.register_at_fork(after_in_child=SERVER.forget)


class ForkedProcess(process.BaseProcess):
    """A process of multiprocessing that :data:`SERVER` forks."""

    _start_method = "forkserver"

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _Popen(process_obj)


class _Popen(popen_forkserver.Popen):
    """Sends a process object to :data:`SERVER`, while its base class uses another server."""

    _fds: list[int]

    def _launch(self, process_obj: Any) -> None:
        content = io.BytesIO()
        set_spawning_popen(self)
        try:
            # The state is unpickled first, before the main module is imported.
            data = {"state": State(), **spawn.get_preparation_data(process_obj.name)}
            reduction.dump(data, content)
            reduction.dump(process_obj, content)
        finally:
            set_spawning_popen(None)
        self.sentinel, writes, self.pid = SERVER.fork(self._fds)
        # While this is open, `multiprocessing.parent_process()` of the worker counts as alive.
        alive = os.dup(writes)
        self.finalizer = util.Finalize(self, _close, (alive, self.sentinel))
        with open(writes, "wb") as file:
            file.write(content.getbuffer())


def _close(*files: int) -> None:
    for file in files:
        os.close(file)


class State:
    """State of the parent, which a forked process applies when it unpickles this object.

    It consists of environment variables, umask, standard output and error. Random generators get
    new seeds.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        outputs = {number: reduction.DupFd(number) for number in (1, 2) if _is_open(number)}
        return _set_state, ({**os.environ}, _umask(), outputs)


def _set_state(environment: dict[str, str], umask: int, outputs: dict[int, Any]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    os.umask(umask)
    for number, output in outputs.items():
        file = output.detach()
        os.dup2(file, number)
        os.close(file)
    # Loaded libraries do not read these variables again. The job sets the number for torch.
    set_openblas_threads(int(environment.get("OPENBLAS_NUM_THREADS", "1")))
    choose_render_device()
    # Reseed these generators, which a fork copies. Python reseeds its own.
    np.random.seed()
    torch.default_generator.seed()


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _umask() -> int:
    """Return the umask. os.umask would have to change it for all threads."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("\nUmask:")[2].split(maxsplit=1)[0], 8)


def _share_limits(pid: int) -> None:
    """Apply the limits and the CPU affinity of this process to another process."""
    with suppress(OSError, ValueError):
        for name in (each for each in dir(resource) if each.startswith("RLIMIT_")):
            limit = getattr(resource, name)
            resource.prlimit(pid, limit, resource.getrlimit(limit))
        os.sched_setaffinity(pid, os.sched_getaffinity(0))


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block a terminal's signals in processes that start inside the context."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- server process -------------------------------------------------------------------------------


def _launched(control: int) -> int:
    """Start the server, with the import path of this process."""
    paths = [each for each in sys.path if isinstance(each, str)]
    code = (
        f"import os, sys; os.environ.update({_ALONE}); sys.path[:] = {paths}; "
        f"from {__name__} import serve; serve({control})"
    )
    program: Any = spawn.get_executable()
    resource_tracker.ensure_running()  # it unblocks signals when it starts
    with signals_blocked():
        return util.spawnv_passfds(program, [program, *interpreter_flags(), "-c", code], [control])


def serve(control: int) -> None:
    """Fork a process for each message, and report exit statuses, until the parent has ended."""
    with suppress(ImportError):  # each worker raises the error itself
        import_module(PRELOADED)
    wakes, wake = os.pipe()
    os.set_blocking(wakes, False)
    os.set_blocking(wake, False)
    before = signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler, no wakeup occurs
    signal.set_wakeup_fd(wake)
    channel = socket.socket(fileno=control)
    with open(os.devnull, "r+b") as null:  # or pipes that others wait for would stay open
        for number in range(3):
            os.dup2(null.fileno(), number)
    statuses: dict[int, int] = {}
    waiting = select.poll()
    waiting.register(wakes, select.POLLIN)
    waiting.register(channel, select.POLLIN)
    channel.send(b"\0")
    while True:
        ready = [file for file, _ in waiting.poll()]
        if wakes in ready:
            os.read(wakes, 2**16)
            _report_ended(statuses)
        if channel.fileno() not in ready:
            continue
        count, files, _, _ = socket.recv_fds(channel, 1, 250)
        if not count:
            os._exit(0)
        try:
            pid = os.fork() if len(files) == count[0] else None
        except OSError:
            pid = None  # the parent reads an end of file instead of a status
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, before)
            for file in (control, wakes, wake, files.pop(1), *statuses.values()):
                os.close(file)
            _run(files)
        if pid is not None:
            statuses[pid] = files.pop(1)
            _write(statuses[pid], pid)
        for file in files:
            os.close(file)


def _run(files: list[int]) -> None:
    """Run the process that the first of ``files`` describes, and exit."""
    code = 1
    try:
        for file in files:
            os.set_inheritable(file, False)
        code = run_sent(*files)
    except BaseException:  # noqa: BLE001  no caller could handle it
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _report_ended(statuses: dict[int, int]) -> None:
    """Send the exit status of each process that ended."""
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        file = statuses.pop(pid)
        _write(file, os.waitstatus_to_exitcode(status))
        os.close(file)


def _write(file: int, number: int) -> None:
    with suppress(BrokenPipeError):  # the parent does not read it
        forkserver.write_signed(file, number)
