"""The command line in real processes that start in milliseconds, and a registered oracle.

Importing torch and torchrl takes seconds. A server process imports them once and forks a child for
each command. The child is a real process with its own id, signals and standard streams. Scripts can
run in this way too, if they do not depend on how their interpreter started and ends.

As a module, it registers ``warm_cli:Oracle-v0``: an `OracleEnv` whose lane numbers count up in the
order in which a process makes them, modulo ``lanes``.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from multiprocessing import process, util
from pathlib import Path
from typing import Any

import gymnasium

import oracles

TESTS = Path(__file__).resolve().parent
LENGTHS = (5, 1, 9, 2, 30)
_made = itertools.count()


def make_oracle(lanes: int = 1, slow: float = 0.0, **kwargs: Any) -> oracles.OracleEnv:
    """Make the next lane. With `slow`, each step takes that many seconds."""
    env = oracles.OracleEnv(next(_made) % lanes, LENGTHS, ends="mixed", **kwargs)
    if slow:
        step = env.step

        def slow_step(action: Any) -> Any:
            time.sleep(slow)
            return step(action)

        env.step = slow_step  # type: ignore[method-assign]
    return env


if __name__ == "warm_cli":  # the server's children import it by this name
    gymnasium.register("Oracle-v0", entry_point="warm_cli:make_oracle", disable_env_checker=True)


@dataclass
class Command:
    """A command in its own process, running or finished."""

    server: WarmServer
    pid: int
    folder: Path

    def kill(self, number: int = signal.SIGKILL, group: bool = False) -> None:
        """Send a signal to the process, or to its process group, as a terminal does."""
        (os.killpg if group else os.kill)(self.pid, number)

    def wait(self, seconds: float = 60.0) -> int:
        """Return the exit status, which is negative for the number of a fatal signal."""
        status = self.server.ask({"wait": self.pid, "seconds": seconds})["status"]
        assert status is not None, f"still running after {seconds} s\n{self.out}\n{self.err}"
        return int(status)

    def wait_for(self, text: str, seconds: float = 60.0) -> None:
        """Wait until the command has written `text` to stderr."""
        deadline = time.monotonic() + seconds
        while text not in self.err:
            assert time.monotonic() < deadline, f"no {text!r} in {self.err!r}"
            time.sleep(0.01)

    @property
    def out(self) -> str:
        """Output on stdout."""
        return (self.folder / "stdout").read_text()

    @property
    def err(self) -> str:
        """Output on stderr."""
        return (self.folder / "stderr").read_text()


class WarmServer:
    """A server that starts commands. It is a context manager.

    Args:
        paths: additional folders to search for modules.
        environment: variables that differ from ours.
    """

    def __init__(self, *paths: Path, **environment: str) -> None:
        ours = (TESTS, TESTS / "environments")
        self.environment: dict[str, str] = {}
        """Variables that differ in the processes started from now on."""
        found = map(str, (*ours, *paths, *filter(None, [os.environ.get("PYTHONPATH")])))
        self._process = subprocess.Popen(
            [sys.executable, str(TESTS / "warm_cli.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment | {"PYTHONPATH": os.pathsep.join(found)},
        )

    def start(
        self,
        folder: Path,
        *argv: object,
        tty: str | None = None,
        stdout: str | None = "stdout",
        stderr: str = "stderr",
    ) -> Command:
        """Start ``tallyroll ARGV`` in `folder`, which becomes its current directory.

        If the first word is ``python``, run ``python SCRIPT …`` or ``python -m MODULE …`` instead.

        Standard streams are files in `folder`, or the terminal at `tty`; None closes stdout. The
        process leads a process group.
        """
        folder.mkdir(exist_ok=True)
        for name in ("stdout", "stderr"):
            (folder / name).write_text("")
        argv_ = [str(word) for word in argv]
        streams = {"tty": tty, "stdout": stdout, "stderr": stderr}
        request = {"argv": argv_, "cwd": str(folder), "more": self.environment, **streams}
        return Command(self, int(self.ask(request)["pid"]), folder)

    def run(self, folder: Path, *argv: object) -> Command:
        """Start a command that must succeed, and wait for it."""
        command = self.start(folder, *argv)
        status = command.wait()
        assert status == 0, f"{argv}: {status}\n{command.out}\n{command.err}"
        return command

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the server died"
        return dict(json.loads(answer))

    def __enter__(self) -> WarmServer:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)  # on a busy machine it may still be importing
        self._process.stdout.close()


# --- the server -----------------------------------------------------------------------------------


def serve() -> None:
    """Answer requests on stdin until it ends."""
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = {"status": _status(request["wait"], request["seconds"])}
        else:
            answer = {"pid": _fork(**request)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _status(pid: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def _fork(argv: list[str], cwd: str, more: dict[str, str], **streams: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        os.chdir(cwd)
        os.environ.update(more)
        tempfile.tempdir = None  # the server may already have set it
        if "PYTHONWARNINGS" in more:
            warnings.simplefilter(more["PYTHONWARNINGS"])  # type: ignore[arg-type]
        _redirect(**streams)
        status = _python(argv[1:]) if argv[:1] == ["python"] else cli.main(argv)
        sys.stdout.flush()
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:  # noqa: BLE001  the child must not go on as a second server
        sys.excepthook(*sys.exc_info())
    finally:
        try:
            util._exit_function()  # as the interpreter does, to remove the names of semaphores
            sys.stderr.flush()
        finally:
            os._exit(status)


def _python(argv: list[str]) -> int:
    if argv[0] == "-m":
        sys.argv, sys.path[0] = argv[1:], ""
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = argv, str(Path(argv[0]).resolve().parent)
        runpy.run_path(argv[0], run_name="__main__")
    return 0


def _redirect(tty: str | None, stdout: str | None, stderr: str) -> None:
    names = ["/dev/null", stdout or "/dev/null", stderr] if tty is None else [tty] * 3
    for number, name in enumerate(names):
        file = os.open(name, os.O_RDWR if tty else os.O_WRONLY if number else os.O_RDONLY)
        os.dup2(file, number)
        os.close(file)
    if stdout is None:  # the state that a closed stdout has at startup
        os.close(1)
        sys.stdout = None  # type: ignore[assignment]


if __name__ == "__main__":
    import torch

    # Commands import these to collect, which would take a sixth of a second each.
    from tallyroll.collector import MultiprocessCollector, SyncCollector, cli  # noqa: F401
    from tallyroll.collector.ext import progress
    from tallyroll.collector.torchrl import Collector  # noqa: F401  TorchRL's own import warns

    progress.LINE_SECONDS = math.inf  # otherwise a command prints a line after some seconds
    # Names of semaphores contain the process id of pytest.
    process.current_process()._config["semprefix"] = f"/mp-{os.getppid()}"  # type: ignore[attr-defined]

    torch.set_num_threads(1)
    serve()
    os._exit(0)  # shutting the interpreter down takes long
