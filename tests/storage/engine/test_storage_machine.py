"""Random operations on storages of every format, and on rings, against a model in plain NumPy."""

from __future__ import annotations

from hypothesis import Phase, settings

from tallyroll.storage import H5Storage, MemmapStorage, ZarrStorage
from tallyroll.storage.testing import StorageMachine


class MemmapMachine(StorageMachine):
    storage_class = MemmapStorage


class RingMachine(StorageMachine):
    storage_class = MemmapStorage
    max_size = 9


class H5Machine(StorageMachine):
    storage_class = H5Storage


class ZarrMachine(StorageMachine):
    storage_class = ZarrStorage


TestMemmap = MemmapMachine.TestCase
TestRing = RingMachine.TestCase
TestH5 = H5Machine.TestCase
TestZarr = ZarrMachine.TestCase
for case in (TestMemmap, TestRing, TestH5, TestZarr):
    # No shrinking: it takes minutes, and the steps that are printed are few.
    case.settings = settings(
        max_examples=10,
        stateful_step_count=20,
        deadline=None,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
    )
del case  # or pytest would run it once more
