"""TorchRL's own collector, run on the same environment, policy and seed."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.collectors import Collector
from torchrl.envs import EnvBase

from tallyroll.collector.counting.numbering import driver_seed, lane_seeds


def theirs(env: EnvBase, policy: Any, *, seed: int = 0, **options: Any) -> TensorDictBase:
    """Return all that TorchRL's collector yields, as ``[lane, time]`` or ``[time]``.

    The seeds are those of our collector of one lane.
    """
    env.set_seed(lane_seeds(seed, 1, 0)[0])
    collector = Collector(env, policy, auto_register_policy_transforms=False, **options)
    torch.manual_seed(int(driver_seed(seed, 0).generate_state(1)[0]))
    try:
        batches = [batch.clone() for batch in collector]
    finally:
        collector.shutdown()
    return torch.cat(batches, -1)
