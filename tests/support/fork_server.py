"""Multiprocessing's fork server with slow imports preloaded, shared by all tests.

Each worker imports all modules that the server lacks. These imports took most of the time of tests
that start workers.
"""

from __future__ import annotations

import errno
import os
import sys
from multiprocessing import forkserver, reduction
from typing import Any
from unittest.mock import patch

from tallyroll.collector.workers.local.process_main import main

SERVER: Any = forkserver._forkserver
IN_SERVER = "TALLYROLL_TEST_FORK_SERVER"
# tensordict imports pandas, if it is installed, when it first makes zeros of a spec.
KITS = ("worker_kit", "worker_faults_kit", "killed_storages_kit", "ledger_legs")
PRELOADED = (__name__, "pandas", main.__module__, *KITS)


def warm_fork_server(*modules: str) -> None:
    """Replace the server, if needed, by one that has imported the kits and `modules`."""
    loaded = SERVER._preload_modules
    wanted = dict.fromkeys([*loaded, *PRELOADED, *modules])
    if len(wanted) == len(loaded) and SERVER._forkserver_pid is not None:
        return
    SERVER._stop()
    SERVER.set_forkserver_preload([*wanted])
    # While the server imports these modules, it does not use our `sys.path`.
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), IN_SERVER: "1"}
    with patch.dict(os.environ, paths):
        SERVER.ensure_running()


def outlive_clients() -> None:
    """Keep the fork server alive when a client is killed during its request.

    Python's fork server would end, but this one serves many clients.
    """
    receive = reduction.recvfds

    def recvfds(*args: Any) -> Any:
        try:
            return receive(*args)
        except EOFError as error:
            raise OSError(errno.ECONNABORTED, "the client was killed") from error

    reduction.recvfds = recvfds


if IN_SERVER in os.environ:
    outlive_clients()
