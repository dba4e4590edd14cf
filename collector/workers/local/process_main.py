"""The main function of a worker process."""

import gc
import os
import sys
from multiprocessing.connection import Connection

import numpy as np

from tallyroll.collector.compat import run_exit_functions
from tallyroll.collector.workers.local.lifetime import end_with_parent
from tallyroll.collector.workers.local.memory import Arena
from tallyroll.collector.workers.local.nonblocking_stdio import drop_output
from tallyroll.collector.workers.local.pipes import PipeChannel
from tallyroll.collector.workers.worker import work


def main(
    connection: Connection, job: Arena, alive: Connection, unblocked: bool, _state: object
) -> None:
    """Run a worker's process.

    Args:
        connection: the worker's end of its pipe.
        job: a pickled :class:`~messages.Job` in shared memory.
        alive: the end of a pipe that closes when the parent dies.
        unblocked: True if the worker's output must not block, because the parent's does not.
        _state: the parent's state. Unpickling this argument has already applied it.
    """
    end_with_parent(alive.fileno())
    if unblocked:
        drop_output()
    gc.freeze()
    status = 0
    try:
        work(PipeChannel(connection), job.array((job.nbytes,), np.uint8))
    except (EOFError, ConnectionError):
        pass  # the parent is gone
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    run_exit_functions()
    sys.stdout.flush()
    sys.stderr.flush()
    # A normal exit of the interpreter takes seconds, for which the parent would wait.
    os._exit(status)
