"""Our collectors under TorchRL's names: a script of TorchRL's changes the line that imports them.

::

    from tallyroll.collector.ext.torchrl import Collector  # was: from torchrl.collectors import …

Arguments, attributes and methods are those of TorchRL's collectors, batches are laid out as theirs
(``layout="torchrl"``), and arguments of :class:`~tallyroll.collector.SyncCollector` and
:class:`~tallyroll.collector.MultiprocessCollector` (``storage=``, ``resume=``, ``seed=``, …) are
taken beside them. What is different on purpose is what this library is for: counts are exact, and
every row is a transition. ``NEUTRAL`` in :mod:`.arguments` names what needs nothing done here,
``REFUSED`` what raises, each with its reason.
"""

from tallyroll.collector.ext.torchrl.collectors import (
    AsyncCollector,
    Collector,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
)

# As they were called before 0.11, and by scripts since.
SyncDataCollector = Collector
MultiSyncDataCollector = MultiSyncCollector
MultiAsyncDataCollector = MultiaSyncDataCollector = MultiAsyncCollector
aSyncDataCollector = AsyncCollector

__all__ = [
    "AsyncCollector",
    "Collector",
    "MultiAsyncCollector",
    "MultiAsyncDataCollector",
    "MultiCollector",
    "MultiSyncCollector",
    "MultiSyncDataCollector",
    "MultiaSyncDataCollector",
    "SyncDataCollector",
    "aSyncDataCollector",
]
