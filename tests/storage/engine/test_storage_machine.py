"""Compare random operations on storages of every format and on rings with a NumPy model."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings

from tallyroll.storage import H5Storage, MemmapStorage, ZarrStorage

from storage_machine import StorageMachine


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
    # No shrinking: it takes minutes, and few steps are printed.
    case.settings = settings(
        max_examples=10,
        stateful_step_count=20,
        deadline=None,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
    )
del case  # otherwise pytest would run it again


@pytest.mark.parametrize(
    ("emptied", "more", "share", "left"),
    [
        ("empty", 6, 0.9, range(5, 10)),
        ("rewind", 7, 0.4, range(5, 5)),  # to where the previous rewind left no row
    ],
)
def test_a_ring_that_was_emptied_gets_no_row_back(
    emptied: str, more: int, share: float, left: range
) -> None:
    """The model once restored rows, if a rewind followed more writes than the ring has slots."""
    state = RingMachine()
    try:
        state.create(steps=1, capacity=9)
        state.extend(count=5, as_arrays=False, record=None)
        if emptied == "empty":
            state.empty()
        else:
            for _ in range(2):
                state.extend(count=5, as_arrays=False, record=None)
            state.rewind(share=1 / 3)
        state.extend(count=more, as_arrays=False, record=None)
        state.rewind(share=share)
        assert state.model.span == left
        state.holds_the_rows_of_the_model()
    finally:
        state.teardown()
