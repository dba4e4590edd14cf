"""An episode's return includes the rewards of discarded transitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

from tallyroll.collector import SyncCollector

from collect_kit import ByObservation
from oracles import length_of, reward_of
from pairs import each_pair
from worker_kit import (
    DISABLED,
    LANES,
    LENGTHS,
    NEXT,
    SAME,
    collect_all,
    in_threads,
    sync_collector,
    ticking,
    worker_collector,
)


def whole_return(lane: int, episode: int) -> float:
    """Return the episode's return under the policy that acts by the sum of its observation."""
    steps = range(length_of(LENGTHS, lane, episode))
    return sum(reward_of(lane, episode, step, (lane + episode + step) % 2) for step in steps)


@each_pair(source=[DISABLED, NEXT, SAME, "torch"], size=[7, 11], workers=[0, 2])
def test_returns_and_lengths_include_what_was_discarded(
    source: str, size: int, workers: int
) -> None:
    """Ends must be in a batch. Some episodes began, or earned rewards, outside of all batches."""
    options: dict[str, Any] = {"frames_per_batch": size, "total_frames": 150, "surplus": "discard"}
    with in_threads():
        if workers:
            run = collect_all(worker_collector(source, workers, ByObservation(), **options))
        else:
            run = collect_all(sync_collector(source, ByObservation(), **options))
    rows = torch.cat(run.batches)
    ends = rows[rows["next", "done"].reshape(-1) & ~rows["collector", "cut"]]
    seen = {
        traj_id: (lane, episode)
        for traj_id, (lane, episode, _) in zip(
            ends["collector", "traj_ids"].tolist(),
            ends["observation"].long().tolist(),
            strict=True,
        )
    }
    assert len(run.episodes) == len(seen) == len(ends)
    for each in run.episodes:
        lane, episode = seen[each.traj_id]
        assert each.lane == lane
        assert each.length == length_of(LENGTHS, lane, episode)
        assert each.total_return == pytest.approx(whole_return(lane, episode))
    in_batches = np.bincount(rows["collector", "traj_ids"].numpy())
    assert any(each.length > in_batches[each.traj_id] for each in run.episodes)


@pytest.mark.parametrize("mode", [AutoresetMode.DISABLED, AutoresetMode.SAME_STEP])
def test_reset_ticks_are_those_of_episodes_with_a_first_row(
    mode: AutoresetMode,
) -> None:
    """A trajectory that begins in mid-episode has no reset of its own."""
    collector = SyncCollector(
        ticking(0, LANES, mode),
        ByObservation(),
        info_keys=["tick"],
        frame_skip="tick",
        frames_per_batch=7,
        total_frames=150,
        surplus="discard",
    )
    rows = torch.cat(collect_all(collector).batches)
    began = int((rows["observation"][:, 2] == 0).sum())
    opened = int((rows["collector", "step"] == 0).sum())
    assert 0 < began < opened
    assert collector.ledger.reset_ticks == 3 * began
    assert collector.ledger.ticks == 4 * 150
