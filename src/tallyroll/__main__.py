"""The command, as ``python -m tallyroll``, for the interpreter whose ``bin`` is not on the path."""

import sys

from tallyroll.collector.cli import main

if __name__ == "__main__":  # a worker process that is spawned imports this too
    sys.exit(main())
