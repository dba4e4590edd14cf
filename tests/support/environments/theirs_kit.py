"""TorchRL's own collector over the same environment, policy and seed."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.collectors import Collector
from torchrl.envs import EnvBase

from tallyroll.collector.counting.numbering import driver_seed, lane_seeds


def theirs(env: EnvBase, policy: Any, *, seed: int = 0, **options: Any) -> TensorDictBase:
    """All that it yields ``[lane, time]`` or ``[time]``, seeded as ours of one lane does it."""
    env.set_seed(lane_seeds(seed, 1, 0)[0])
    collector = Collector(env, policy, auto_register_policy_transforms=False, **options)
    torch.manual_seed(int(driver_seed(seed, 0).generate_state(1)[0]))
    try:
        batches = [batch.clone() for batch in collector]
    finally:
        collector.shutdown()
    return torch.cat(batches, -1)
