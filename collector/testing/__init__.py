"""Contracts to subclass; see `tallyroll.collector.ext.testing`."""

import sys
from contextlib import suppress

if "tallyroll.collector.ext.testing" not in sys.modules:
    with suppress(ImportError):  # without pytest, the contracts say what to install
        import pytest

        # So that a failing contract shows values, as the caller's own tests do.
        pytest.register_assert_rewrite("tallyroll.collector.ext.testing")

from tallyroll.collector.ext.testing import *  # noqa: F403
from tallyroll.collector.ext.testing import __all__ as __all__
