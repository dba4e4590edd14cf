"""Entry point of ``python -m tallyroll.collector.cli``."""

import sys

from tallyroll.__main__ import main

if __name__ == "__main__":  # workers import this module under another name
    sys.exit(main())
