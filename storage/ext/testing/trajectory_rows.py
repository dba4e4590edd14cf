"""Rows of one lane whose values are all derived from the row number."""

from __future__ import annotations

import torch
from tensordict import TensorDict


def trajectory_rows(start: int, count: int, *, steps: int) -> TensorDict:
    """Return rows ``[start, start + count)`` of trajectories with ``steps`` rows each."""
    number = torch.arange(start, start + count)
    done = (number % steps == steps - 1)[:, None]
    after = {
        "observation": number[:, None] + torch.where(done, 0.5, 1.0),  # finals are unique
        "reward": number[:, None].float(),
        "done": done,
        "terminated": done,
        "truncated": torch.zeros_like(done),
    }
    trajectory = {
        "traj_ids": number // steps,
        "step": number % steps,
        "lane": torch.zeros(count, dtype=torch.int32),
    }
    columns = {"observation": number[:, None].float(), "next": after, "collector": trajectory}
    return TensorDict(columns, [count])
