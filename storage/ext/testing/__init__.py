"""Base classes for tests of storages, readers and exchange formats, and a state machine.

Call ``pytest.register_assert_rewrite("tallyroll.storage.testing")`` in a ``conftest.py`` before
the first import, so that pytest explains failed assertions.
"""

try:
    import hypothesis as _hypothesis  # noqa: F401
    import pytest as _pytest  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"tallyroll.storage.testing needs {error.name}: pip install 'tallyroll[testing]'"
    ) from error

from tallyroll.storage.ext.testing.exchange_contract import ExchangeContract
from tallyroll.storage.ext.testing.reader_contract import ReaderContract
from tallyroll.storage.ext.testing.state_machine import StorageMachine
from tallyroll.storage.ext.testing.storage_contract import StorageContract

__all__ = ["ExchangeContract", "ReaderContract", "StorageContract", "StorageMachine"]
