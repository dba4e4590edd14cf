"""Test numbers that make NumPy warn. They are ordinary rows, and warnings are errors here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import EnvBase

from tallyroll.collector import Evaluation, Ledger, SyncCollector
from tallyroll.collector.cli import main
from tallyroll.collector.counting.episode_log import Episode
from tallyroll.collector.envs.exact import ExactRow, RoundedWarning
from tallyroll.collector.envs.gymnasium.info_entries import _stacked
from tallyroll.collector.envs.stepping.arrays import fitting
from tallyroll.collector.errors import ValueRefused
from tallyroll.collector.ext.replay.comparison import differing_rows, largest
from tallyroll.collector.slab.lossless import cast
from tallyroll.storage import (
    MemmapStorage,
    PrioritizedSampler,
    fast_paths,
    open_storage,
    verify,
    verify_dataset,
)
from tallyroll.storage.ext.sampling.priorities import moved
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows

# NaNs that no computation makes: the highest bit of the fraction is not set.
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
        for kind in ("lerobot", "torchrl", "npz", "d4rl", "hf"):
            storage.export(tmp_path / kind, kind)
            verify_dataset(tmp_path / kind, kind)
        storage.pack(tmp_path / "packed")
        assert [str(each) for each in storage.trajectories.table["return"]] == ["nan"] * 3
    for path in ("rows", "packed"):
        verify(tmp_path / path)


class Signs(gymnasium.Env[Any, Any]):
    """Rewards that are infinite, with both signs in each episode of five steps."""

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
        fast_paths.switched_off(*off),
        SyncCollector(
            env, frames_per_batch=frames, total_frames=30, seed=0, storage=tmp_path / "rows"
        ) as collector,
    ):
        assert sum(len(batch) for batch in collector) == 30
        assert [str(each.total_return) for each in collector.episodes] == ["nan"] * 6
    env.close()


@pytest.mark.parametrize("surplus", ["carry", "discard"])
def test_returns_with_reset_slots(surplus: Any) -> None:
    env = SyncVectorEnv([Signs] * 3, autoreset_mode=AutoresetMode.NEXT_STEP)
    options: dict[str, Any] = {"frames_per_batch": 4, "total_frames": 32, "surplus": surplus}
    with SyncCollector(env, seed=0, **options) as collector:
        assert sum(len(batch) for batch in collector) == 32
    env.close()


class Opposed(EnvBase):
    """Two objectives with infinite rewards of opposite signs, in 4 lanes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(batch_size=[4])
        self.dtype_of_reward = dtype
        self.observation_spec = Composite(observation=Unbounded((4, 1)), shape=[4])
        self.action_spec = Bounded(-1, 1, (4, 1))
        self.reward_spec = Unbounded((4, 2), dtype=dtype)

    def _reset(self, tensordict: Any = None, **_: Any) -> Any:
        found = self.observation_spec.zero()
        return found.update({"done": torch.zeros(4, 1, dtype=torch.bool)})

    def _step(self, tensordict: Any) -> Any:
        found = self._reset()
        reward = torch.tensor([torch.inf, -torch.inf], dtype=self.dtype_of_reward)
        return found.set("reward", reward.expand(4, 2).clone())

    def _set_seed(self, seed: int | None) -> None:
        pass


@pytest.mark.parametrize("off", [(), ("kernel",), ("kernel", "fast-collect")])
@pytest.mark.parametrize("frames", [6, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rewards_of_both_signs_in_one_row(
    dtype: torch.dtype, frames: int, off: tuple[str, ...], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"frames_per_batch": frames, "total_frames": 80, "seed": 0}
    for surplus in ("carry", "discard"):
        with (
            fast_paths.switched_off(*off),
            SyncCollector(
                Opposed(dtype),
                max_frames_per_traj=7,
                surplus=surplus,
                storage=tmp_path / surplus,
                **options,
            ) as collector,
        ):
            assert sum(len(batch) for batch in collector) == 80
            assert {str(each.total_return) for each in collector.episodes} == {"nan"}


BITS = np.array([1.0, 0, 2])


def with_one(value: float | np.ndarray, dtype: Any) -> np.ndarray:
    found = BITS.astype(dtype)
    if isinstance(value, np.ndarray):
        found.view(value.dtype)[1] = value[0]
    else:
        found[1] = value
    return found


STRANGE = {
    "huge": 1e200,
    "largest": np.finfo(np.float64).max,
    "infinite": np.inf,
    "-infinite": -np.inf,
    "nan": np.nan,
    "signalling": SIGNALLING[torch.float64].view(np.uint64),
    "smallest": 5e-324,
}


@pytest.mark.parametrize("shape", [(3,), (3, 1), (1, 3)])
@pytest.mark.parametrize("name", STRANGE)
def test_values_of_environments_on_every_processor(name: str, shape: tuple[int, ...]) -> None:
    """Some BLAS kernels raise floating-point flags that NumPy checks.

    This test raises all of them.
    """
    value = with_one(STRANGE[name], np.float64).reshape(shape)
    row, narrow = np.zeros(shape, np.float32), np.isfinite(value) & (np.abs(value) > 1e39)
    with np.errstate(all="raise"):
        if narrow.any():
            with pytest.raises(ValueRefused, match=r"next/reward at lane"):
                fitting(value, row, ("next", "reward"))
        else:
            found = fitting(value, row, ("next", "reward"))
            assert found.shape == shape
        exact = ExactRow(("x",), shape, np.dtype(np.float32))
        if narrow.any():
            with pytest.raises(ValueRefused, match="got"):
                exact.array(value)
        elif name == "smallest":
            with pytest.warns(RoundedWarning):
                exact.array(value)
        else:
            exact.array(value)


def test_wider_floats_and_mixed_entries() -> None:
    narrow = with_one(SIGNALLING[torch.float32], np.float32)
    with np.errstate(all="raise"):
        found, lost = cast(narrow, np.dtype(np.float64))
        assert lost is None
        assert np.isnan(found).tolist() == [False, True, False]
        mixed = _stacked([narrow, BITS])
    assert mixed is not None
    assert (mixed.dtype, int(np.isnan(mixed).sum())) == (np.float64, 1)


def test_differences_that_no_number_holds() -> None:
    most = np.finfo(np.float64).max
    assert largest(np.array([most]), np.array([-most])) == np.inf
    assert differing_rows(np.array([most]), np.array([-most]), 1.0).tolist() == [0]


def test_returns_that_have_no_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    returns = [np.inf, -np.inf, 1.0]
    episodes = [
        Episode(at, 0, each, 1, "terminated", (0, 0), at) for at, each in enumerate(returns)
    ]
    assert np.isnan(Evaluation(episodes, Ledger()).mean_return)
    rows = trajectory_rows(0, 12, steps=4)
    rows["next", "reward"][0], rows["next", "reward"][5] = torch.inf, -torch.inf
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(rows)
    assert main(["inspect", str(tmp_path / "rows"), "--trajectories"]) == 0
    assert capsys.readouterr().err == ""


def test_priorities_far_apart() -> None:
    """Their quotients exceed float32."""
    with MemmapStorage() as storage:
        storage.extend(trajectory_rows(0, 12, steps=4))
        sampler = PrioritizedSampler(storage, alpha=1, beta=1, eps=1e-30)
        with np.errstate(over="raise", invalid="raise", divide="raise"):
            sampler.update_priority(torch.arange(2), torch.tensor([1e38, 1e-30]))
            weights = sampler.sample(200)["priority_weight"]
            assert weights.isfinite().all()
            # With alpha=0.1, this leaf is that of 1e380.
            with pytest.raises(ValueError, match="expected finite numbers of at least 0, got inf"):
                moved(np.array([1e38], np.float32), (0.1, 0.0), (1.0, 0.0))


def test_sums_of_large_numbers_in_a_dataset(tmp_path: Path) -> None:
    rows = trajectory_rows(0, 12, steps=4)
    rows["observation"] = torch.full((12, 1), 1e200, dtype=torch.float64)
    rows["observation"][::2] *= -1
    rows["next", "observation"] = rows["observation"].clone()
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(rows)
        storage.export(tmp_path / "lerobot", "lerobot")
    assert verify_dataset(tmp_path / "lerobot", "lerobot").sound
