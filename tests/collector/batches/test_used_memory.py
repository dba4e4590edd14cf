"""The memory of large batches is reused after a batch was dropped, and never before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tallyroll.collector import SyncCollector
from tallyroll.collector.errors import TransitionError
from tallyroll.storage import fast_paths, open_storage

from collect_kit import assert_same
from counting_kit import LANES, SLOTS, WIDE, Counting
from pairs import in_gate


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


@pytest.mark.parametrize(
    ("slots", "off"),
    in_gate([1, 2, 3, 4, 5], [(), ("fast-collect",), ("kernel",), ("kernel", "fast-collect")]),
)
def test_a_batch_that_is_written_to_changes_no_later_row(
    slots: int, off: tuple[str, ...], tmp_path: Path
) -> None:
    stored = []
    for writes in (False, True):
        path = tmp_path / str(writes)
        options: dict[str, Any] = {"frames_per_batch": 4 * slots, "total_frames": 24 * slots}
        with fast_paths.switched_off(*off):
            made = SyncCollector("CartPole-v1", num_envs=4, seed=0, storage=path, **options)
            with made:
                for batch in made:
                    for leaf in batch.values(True, True) if writes else ():
                        leaf.zero_()
        with open_storage(path) as storage:
            stored.append(storage.get(slice(None)).clone())
    assert_same(*stored)
