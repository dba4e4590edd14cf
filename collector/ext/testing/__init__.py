"""The contract of an environment system, as tests: subclass `SystemContract` and run pytest.

    class TestMySystem(SystemContract):
        def make(self, lanes, seeds):
            return MySystem(lanes, seeds)

It steps the system by hand, compares what it does with what it declares, and compares the rows that
a collector makes of it, bit for bit, with another instance that is stepped by hand. Before it is
imported, ``pytest.register_assert_rewrite("tallyroll.collector.testing")`` in a ``conftest.py``
makes pytest say what differs.
"""

from tallyroll.collector.ext.testing.ability_contract import AbilityContract
from tallyroll.collector.ext.testing.collected_contract import CollectedContract
from tallyroll.collector.ext.testing.declaration_contract import DeclarationContract
from tallyroll.collector.ext.testing.hand import Hand
from tallyroll.collector.ext.testing.reset_contract import ResetContract

__all__ = ["Hand", "SystemContract"]


class SystemContract(DeclarationContract, ResetContract, AbilityContract, CollectedContract):
    """Tests that every environment system passes. Subclass it, and say how yours is made."""
