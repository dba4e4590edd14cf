"""Ray's workers as forks of one process that has imported everything: none imports torch again.

Each is a process of its own, registered with Ray, as one that Ray starts; what it has imported is
there already. Ray starts workers with `sys.executable`, so that a script in its place asks here:

    python warm_actors.py serve SOCKET    imports, and forks until its standard input ends
    python warm_actors.py ask SOCKET ...  has a worker forked; other programs of Ray start as ever
"""

from __future__ import annotations

import json
import os
import socket
import sys

MODULES = ("tallyroll.collector.ext.ray.actor", "pandas", "worker_faults_kit")


def ask(path: str, words: list[str]) -> None:
    """Have a worker forked that Ray wants to start with these words."""
    if not words[0].endswith("default_worker.py"):
        os.execv(sys.executable, [sys.executable, *words])
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        server.sendall(json.dumps([words, dict(os.environ)]).encode())


def serve(path: str) -> None:
    """Fork a worker for each that asks, until standard input ends."""
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
    """Import everything, in the environment of the first worker: Ray reads it as it is imported."""
    import gc
    from importlib import import_module
    from importlib.util import find_spec

    os.environ.update(environment)
    for module in MODULES:
        if module != "pandas" or find_spec(module):  # tensordict imports it where it is installed
            import_module(module)
    gc.freeze()


def _work(words: list[str], environment: dict[str, str]) -> None:
    """Be a worker of Ray; does not return."""
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
