"""Test CARL in Gymnasium's vectors, with contexts as part of the observation."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

with warnings.catch_warnings():  # it warns about each missing system
    warnings.simplefilter("ignore")
    from carl.envs import CARLCartPole

    DEFAULT = CARLCartPole.get_default_context()

from gymnasium.vector import AutoresetMode, SyncVectorEnv

from tallyroll.collector import MultiprocessCollector, SyncCollector

pytestmark = pytest.mark.filterwarnings("ignore")

CONTEXTS = {at: {**DEFAULT, "gravity": 5.0 + at, "length": 0.5 + at / 10} for at in range(3)}


def make() -> Any:
    return CARLCartPole(contexts=CONTEXTS, obs_context_as_dict=False)


def vector(mode: AutoresetMode = AutoresetMode.DISABLED, lanes: int = 2) -> SyncVectorEnv:
    return SyncVectorEnv([make] * lanes, autoreset_mode=mode)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_each_episode_has_its_context(mode: AutoresetMode) -> None:
    """A final observation has the context of its episode. The next context follows in turn."""
    with SyncCollector(
        lambda: vector(mode), None, frames_per_batch=150, total_frames=150, seed=0
    ) as collector:
        (rows,) = list(collector)
    assert torch.equal(rows["context"], rows["next", "context"])
    for lane in range(2):
        own = rows[rows["collector", "lane"] == lane]
        ids = own["collector", "traj_ids"].numpy()
        firsts = [own["context"][ids == each][0].numpy() for each in np.unique(ids)]
        assert len(firsts) >= 3
        for one, following in zip(firsts, firsts[3:], strict=False):
            assert np.array_equal(one, following)  # round robin over three contexts
        assert not np.array_equal(firsts[0], firsts[1])
    over = rows["next", "obs"][:, 0].abs() > 2.4
    over |= rows["next", "obs"][:, 2].abs() > 12 * np.pi / 180
    assert torch.equal(rows["next", "terminated"][:, 0], over)


def test_workers() -> None:
    arguments: dict[str, Any] = {"frames_per_batch": 30, "total_frames": 60, "seed": 1}
    with MultiprocessCollector([vector, vector], None, **arguments) as collector:
        rows = torch.cat([batch.clone() for batch in collector])
    assert rows.numel() == 60
    assert rows["collector", "lane"].unique().tolist() == [0, 1, 2, 3]
