"""Numbers of which NumPy would warn are rows like others: here warnings are errors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from tallyroll.collector import SyncCollector
from tallyroll.storage import MemmapStorage, open_storage, verify, ways
from tallyroll.storage.testing.trajectory_rows import trajectory_rows

# NaNs that no computation makes: the highest bit of their fraction is not set.
SIGNALLING = {
    torch.float16: np.array([0x7D01], np.uint16),
    torch.bfloat16: np.array([0x7F81], np.uint16),
    torch.float32: np.array([0x7F800001], np.uint32),
    torch.float64: np.array([0x7FF0000000000001], np.uint64),
}


def signalling(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.from_numpy(SIGNALLING[dtype]).view(dtype).expand(shape).clone()


def infinite(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    found = torch.full(shape, torch.inf, dtype=dtype)
    found[::2] = -torch.inf
    return found


@pytest.mark.parametrize("numbers", [signalling, infinite])
def test_whatever_looks_at_rows(tmp_path: Path, numbers: Callable[..., torch.Tensor]) -> None:
    batch = trajectory_rows(0, 12, steps=4)
    batch["action"] = numbers(torch.float32, 12, 2)
    batch["observation"] = numbers(torch.float32, 12, 1)
    for name in ("observation", "reward"):
        batch["next", name] = numbers(torch.float32, 12, 1)
    for dtype in SIGNALLING:
        batch["next", str(dtype)[6:]] = numbers(dtype, 12, 2)
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(batch)
    with open_storage(tmp_path / "rows") as storage:
        storage.statistics()
        storage.export(tmp_path / "lerobot", "lerobot")
        storage.pack(tmp_path / "packed")
        assert [str(each) for each in storage.trajectories.table["return"]] == ["nan"] * 3
    for path in ("rows", "packed"):
        verify(tmp_path / path)


class Signs(gymnasium.Env[Any, Any]):
    """Rewards that are infinite, of both signs in each episode of five steps."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, **_: Any) -> Any:
        self.at = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.at += 1
        return np.zeros(1, np.float32), np.inf * (-1) ** self.at, self.at == 5, False, {}


@pytest.mark.parametrize("frames", [3, 30])
@pytest.mark.parametrize("off", [(), ("kernel",)])
def test_returns_of_both_signs(frames: int, off: tuple[str, ...], tmp_path: Path) -> None:
    env = SyncVectorEnv([Signs] * 3, autoreset_mode=AutoresetMode.DISABLED)
    with (
        ways.switched_off(*off),
        SyncCollector(
            env, frames_per_batch=frames, total_frames=30, seed=0, storage=tmp_path / "rows"
        ) as collector,
    ):
        assert sum(len(batch) for batch in collector) == 30
        assert [str(each.total_return) for each in collector.episodes] == ["nan"] * 6
    env.close()
