"""Base classes for tests of readers and of exchange formats.

Call ``pytest.register_assert_rewrite("tallyroll.storage.testing")`` in a ``conftest.py`` before
the first import, so that pytest explains failed assertions.
"""

try:
    import hypothesis as _hypothesis  # noqa: F401
    import pytest as _pytest  # noqa: F401
except ImportError as error:
    raise ImportError(
        f'tallyroll.storage.testing needs {error.name}: pip install "tallyroll[testing]"'
    ) from error

from tallyroll.storage.ext.testing.exchange_contract import ExchangeContract
from tallyroll.storage.ext.testing.reader_contract import ReaderContract

__all__ = ["ExchangeContract", "ReaderContract"]
