"""The contract of a transport, to subclass; see `tallyroll.collector.ext.testing.transports`."""

from tallyroll.collector.ext.testing.transports import *  # noqa: F403
from tallyroll.collector.ext.testing.transports import __all__ as __all__
