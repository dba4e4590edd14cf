"""``python -m tallyroll.collector.cli``."""

import sys

from tallyroll.collector.cli import main

sys.exit(main())
