"""Ray workers as forks of one process with all imports done, so that none imports torch again.

Each worker is a process that registers with Ray, like one that Ray starts. Ray starts workers with
`sys.executable`, so a script in its place sends the request here:

    python warm_actors.py serve SOCKET    imports, and forks until its standard input ends
    python warm_actors.py ask SOCKET ...  requests a worker; runs Ray's other programs normally
"""

from __future__ import annotations

import json
import os
import socket
import sys

MODULES = ("tallyroll.collector.ext.ray.actor", "pandas", "worker_faults_kit")


def ask(path: str, words: list[str]) -> None:
    """Request a fork for the worker that Ray wants to start with these words."""
    if not words[0].endswith("default_worker.py"):
        os.execv(sys.executable, [sys.executable, *words])
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        server.sendall(json.dumps([words, dict(os.environ)]).encode())


def serve(path: str) -> None:
    """Fork a worker for each request, until standard input ends."""
    import select
    import signal

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(64)
        while sys.stdin not in select.select([sys.stdin, server], [], [])[0]:
            client, _ = server.accept()
            with client, client.makefile() as file:
                words, environment = json.load(file)
            if MODULES[0] not in sys.modules:
                _warm(environment)
            if os.fork() == 0:
                server.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _work(words, environment)


def _warm(environment: dict[str, str]) -> None:
    """Import all modules in the first worker's environment, which Ray reads during its import."""
    import gc
    from importlib import import_module
    from importlib.util import find_spec

    os.environ.update(environment)
    for module in MODULES:
        if module != "pandas" or find_spec(module):  # tensordict imports pandas if it is installed
            import_module(module)
    gc.freeze()


def _work(words: list[str], environment: dict[str, str]) -> None:
    """Run a worker of Ray. This function does not return."""
    import runpy
    import traceback

    code = 1
    try:
        os.environ.clear()
        os.environ.update(environment)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit:
        code = 0
    except BaseException:  # noqa: BLE001  it is printed, and the process ends
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        ask(sys.argv[2], sys.argv[3:])
