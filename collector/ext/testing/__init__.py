"""Contract tests for an environment system. Subclass `SystemContract` and run pytest.

    class TestMySystem(SystemContract):
        def make(self, lanes, seeds):
            return MySystem(lanes, seeds)

The tests step the system by hand and compare its behaviour with its declaration. They also compare
the rows that a collector makes of it, bit for bit, with another instance that is stepped by hand.
To make pytest show differing values, call
``pytest.register_assert_rewrite("tallyroll.collector.testing")`` in a ``conftest.py`` before the
import.
"""

from tallyroll.collector.ext.testing.hand import Hand
from tallyroll.collector.ext.testing.system_contract import SystemContract

__all__ = ["Hand", "SystemContract"]
