"""Collectors under TorchRL's names; see `tallyroll.collector.ext.torchrl`."""

from tallyroll.collector.ext.torchrl import *  # noqa: F403
from tallyroll.collector.ext.torchrl import __all__ as __all__
