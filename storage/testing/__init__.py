"""Contracts to subclass; see `tallyroll.storage.ext.testing`."""

import sys
from contextlib import suppress

if "tallyroll.storage.ext.testing" not in sys.modules:
    with suppress(ImportError):  # without pytest, the contracts say what to install
        import pytest

        # So that a failing contract shows values, as the caller's own tests do.
        pytest.register_assert_rewrite("tallyroll.storage.ext.testing")

from tallyroll.storage.ext.testing import *  # noqa: F403
from tallyroll.storage.ext.testing import __all__ as __all__
