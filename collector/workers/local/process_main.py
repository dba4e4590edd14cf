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
    """Run a worker's process; ``job`` holds a pickled :class:`~messages.Job`.

    ``unblocked``: its output is not to block, as that of its parent is not. ``_state`` was set when
    it arrived.
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
    os._exit(status)  # taking the interpreter down takes seconds, for which a parent would wait
