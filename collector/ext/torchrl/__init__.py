"""Tallyroll's collectors under TorchRL's names. A TorchRL script only changes its import.

::

    from tallyroll.collector.ext.torchrl import Collector  # was: from torchrl.collectors import …

Arguments, attributes and methods are those of TorchRL's collectors, and batches have the same
layout (``layout="torchrl"``). The collectors also accept the arguments of
:class:`~tallyroll.collector.SyncCollector` and :class:`~tallyroll.collector.MultiprocessCollector`
(``storage=``, ``resume=``, ``seed=``, …). The intended differences are the purpose of this library:
counts are exact, and every row is a transition. In :mod:`.arguments`, ``NEUTRAL`` lists the
arguments that have no effect, and ``REFUSED`` those that raise, each with the reason.
"""

from tallyroll.collector.ext.torchrl.collectors import (
    AsyncCollector,
    Collector,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
)

# Names before TorchRL 0.11, which scripts still use.
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
