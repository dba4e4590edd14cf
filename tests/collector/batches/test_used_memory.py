"""Batches of much memory: it is used again when a batch was dropped, and never before."""

from __future__ import annotations

import numpy as np
import pytest

from tallyroll.collector import SyncCollector
from tallyroll.collector.errors import TransitionError

from counting_kit import LANES, SLOTS, WIDE, Counting


def collector(*bad: float, batches: int = 6) -> SyncCollector:
    frames = LANES * SLOTS
    return SyncCollector(
        lambda: Counting(*bad),  # type: ignore[arg-type]
        None,
        frames_per_batch=frames,
        total_frames=batches * frames,
    )


def test_batches_that_are_held_stay_as_they_are() -> None:
    with collector() as made:
        held, kept, dropped = [], [], set()
        for index, batch in enumerate(made):
            seen = batch["next", "observation"]
            wanted = np.arange(1, SLOTS + 1) + index * SLOTS
            assert np.array_equal(seen[:SLOTS, 0].numpy(), wanted)
            if index < 2:
                held.append(batch)
            elif index == 2:
                kept.append(seen[5:9, 3])  # a view of a view
            else:
                dropped.add(seen.data_ptr())
            del batch, seen
        assert len(dropped) < 3, "memory of dropped batches was used again"
    for index, batch in enumerate(held):
        for key, first in ((("next", "observation"), 1), (("observation",), 0)):
            wanted = np.tile(np.arange(SLOTS) + first + index * SLOTS, LANES)
            assert np.array_equal(batch[key].numpy(), np.repeat(wanted[:, None], WIDE, 1))
    assert kept[0].tolist() == [2 * SLOTS + number for number in (6, 7, 8, 9)]


@pytest.mark.parametrize(
    ("bad", "high"),
    [*((bad, 1e6) for bad in (np.nan, -1.0, 2e6, np.inf)), (np.nan, np.inf), (-1.0, np.inf)],
)
def test_a_value_outside_is_found_wherever_it_is(bad: float, high: float) -> None:
    for at in (1, SLOTS - 1, 2 * SLOTS):
        with (
            pytest.raises(TransitionError, match=rf"lane 3, step {at - 1} .*at \[{WIDE - 1}\]"),
            collector(at, bad, high, batches=2) as made,
        ):
            list(made)
