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

from tallyroll.collector.ext.testing.ability_contract import AbilityContract
from tallyroll.collector.ext.testing.collected_contract import CollectedContract
from tallyroll.collector.ext.testing.declaration_contract import DeclarationContract
from tallyroll.collector.ext.testing.hand import Hand
from tallyroll.collector.ext.testing.reset_contract import ResetContract

__all__ = ["Hand", "SystemContract"]


class SystemContract(DeclarationContract, ResetContract, AbilityContract, CollectedContract):
    """Tests that every environment system must pass. Subclass it and define ``make``."""
