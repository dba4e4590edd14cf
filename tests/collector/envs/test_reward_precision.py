"""A reward that float32 cannot hold exactly gives a warning, or a column of float64."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from torchrl.envs import GymEnv, RewardSum, TransformedEnv

from tallyroll.collector import MultiprocessCollector, SyncCollector, evaluate
from tallyroll.collector.envs import GymnasiumVectorEnv
from tallyroll.collector.envs.exact import RoundedWarning
from tallyroll.collector.errors import ArgumentError, ValueRefused
from tallyroll.storage import MemmapStorage, fast_paths
from tallyroll.storage.errors import SchemaMismatch

WHOLE, TINY = 2.0**24 + 1, 1e-46
OTHERS = [0.1, 0.2, -0.7, 1e7 + 0.25]


class Paid(gymnasium.Env[Any, Any]):
    """Environment with five steps per episode: the third pays ``special``, the others `OTHERS`."""

    observation_space = spaces.Box(0, 9, (1,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, special: float = WHOLE, form: Callable[[float], Any] = float) -> None:
        self.rewards = [*OTHERS[:2], special, *OTHERS[2:]]
        self.form, self.at = form, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at = 0
        return np.zeros(1), {}

    def step(self, action: Any) -> Any:
        self.at += 1
        reward = self.form(self.rewards[self.at - 1])
        return np.full(1, float(self.at)), reward, self.at == 5, False, {}


class Paid2(Paid):
    """Environment whose reward is a vector."""

    reward_space = spaces.Box(-1e9, 1e9, (2,), np.float64)

    def step(self, action: Any) -> Any:
        obs, reward, *rest = super().step(action)
        return obs, np.array([0.5, reward]), *rest


def vector(mode: AutoresetMode, kind: Any = SyncVectorEnv, lane: Any = Paid) -> Any:
    options = {"context": "fork"} if kind is AsyncVectorEnv else {}
    return lambda: kind([lane] * 2, autoreset_mode=mode, **options)


def transformed() -> Any:
    env = SyncVectorEnv([Paid] * 2, autoreset_mode=AutoresetMode.DISABLED)
    return TransformedEnv(GymnasiumVectorEnv(env), RewardSum())


WAYS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "one lane": (SyncCollector, Paid, {"num_envs": 1}),
    "three lanes": (SyncCollector, Paid, {"num_envs": 3}),
    "0-d arrays": (SyncCollector, lambda: Paid(form=np.array), {"num_envs": 2}),
    "float64 of NumPy": (SyncCollector, lambda: Paid(form=np.float64), {"num_envs": 2}),
    **{mode.value: (SyncCollector, vector(mode), {}) for mode in AutoresetMode},
    "processes of Gymnasium": (SyncCollector, vector(AutoresetMode.DISABLED, AsyncVectorEnv), {}),
    "a transform": (SyncCollector, transformed, {}),
    "a time limit": (SyncCollector, Paid, {"num_envs": 2, "max_frames_per_traj": 4}),
    "objectives": (SyncCollector, vector(AutoresetMode.DISABLED, lane=Paid2), {}),
    "processes": (MultiprocessCollector, Paid, {"num_envs": 3, "num_workers": 2}),
    "leases": (
        MultiprocessCollector,
        Paid,
        {"num_envs": 2, "num_workers": 2, "mode": "async", "transport": "thread"},
    ),
}


def collected(way: str, path: Path | None = None, **more: Any) -> tuple[Any, list[str]]:
    """Return the rows of a run lane by lane, and the texts of its warnings."""
    kind, make, kwargs = WAYS[way]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with kind(make, frames_per_batch=30, total_frames=60, seed=0, **kwargs, **more) as run:
            rows = torch.cat(list(run))
    return rows, [str(each.message) for each in caught if each.category is RoundedWarning]


@pytest.mark.parametrize("way", WAYS)
def test_a_reward_that_float32_changes_is_a_warning_once(way: str) -> None:
    rows, said = collected(way)
    assert len(said) == 1, said
    assert "step 2 of its trajectory: the environment returned 16777217.0, which" in said[0]
    assert "stores as 16777216.0" in said[0]
    lane = int(said[0].split("at lane ")[1].split(",")[0])
    assert lane in rows["collector", "lane"].tolist()
    assert rows["next", "reward"].dtype == torch.float32


@pytest.mark.parametrize("way", WAYS)
def test_float64_keeps_every_bit_without_a_warning(way: str) -> None:
    rows, said = collected(way, reward_dtype=torch.float64)
    assert not said
    reward = rows["next", "reward"][:, -1]
    wanted = [Paid().rewards[step] for step in rows["collector", "step"].tolist()]
    assert reward.dtype == torch.float64
    assert reward.tolist() == wanted


@pytest.mark.parametrize("off", [(), ("kernel",)])
def test_calls_of_few_rows_warn_too(off: tuple[str, ...], tmp_path: Path) -> None:
    with (
        fast_paths.switched_off(*off),
        MemmapStorage(tmp_path / "rows") as storage,
        SyncCollector(
            Paid, frames_per_batch=2, total_frames=40, num_envs=2, storage=storage
        ) as collector,
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(20):
                collector.collect(2)
        said = [str(each.message) for each in caught if each.category is RoundedWarning]
        assert len(said) == 1
        assert "lane 0, step 2 of its trajectory: the environment returned 16777217.0" in said[0]
        assert len(storage) == 40


@pytest.mark.parametrize(
    ("reward", "changed"),
    [
        *((each, True) for each in (WHOLE, -WHOLE, TINY, -TINY, 1e30)),
        *((each, False) for each in (2.0**24 + 2, 2.0**24 + 1.5, 0.1, 0.0, float("inf"))),
    ],
)
def test_only_other_numbers_are_reported(reward: float, changed: bool) -> None:
    for lanes in (1, 2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with SyncCollector(
                lambda: Paid(reward),
                frames_per_batch=10,
                total_frames=10,
                num_envs=lanes,
                validate="off",
            ) as collector:
                rows = torch.cat(list(collector))
        assert any(each.category is RoundedWarning for each in caught) == changed
        assert rows["next", "reward"][2].item() == float(np.float32(reward))


@pytest.mark.parametrize("special", [2**24 + 1, np.int64(2**24 + 1), 1e39, np.float64(-1e300)])
def test_what_float32_refuses_float64_stores(special: Any) -> None:
    def run(**more: Any) -> Any:
        make = lambda: Paid(special, form=lambda r: r)  # noqa: E731
        with SyncCollector(
            make, frames_per_batch=5, total_frames=5, num_envs=1, **more
        ) as collector:
            return next(iter(collector))["next", "reward"][2].item()

    with pytest.raises(ValueRefused, match=r"step 2 .* reward_dtype=torch\.float64"):
        run()
    assert run(reward_dtype="float64") == special


@pytest.mark.parametrize("special", [2**53 + 1, 10**400])
def test_integers_that_no_float_holds_are_refused(special: int) -> None:
    with (
        SyncCollector(
            lambda: Paid(special, form=lambda r: r),
            frames_per_batch=5,
            total_frames=5,
            reward_dtype="float64",
            num_envs=1,
        ) as collector,
        pytest.raises(ValueRefused, match="one number that a float holds"),
    ):
        next(iter(collector))


def test_environments_of_torchrl_keep_their_own_dtype() -> None:
    gymnasium.register("Paid-v0", entry_point=Paid)
    try:
        with pytest.raises(ArgumentError, match=r"^reward_dtype: expected torch.float32, as the"):
            SyncCollector(
                lambda: GymEnv("Paid-v0"),
                frames_per_batch=5,
                total_frames=5,
                reward_dtype=torch.float64,
            )
    finally:
        gymnasium.registry.pop("Paid-v0")


def test_a_run_goes_on_with_the_dtype_that_it_began_with(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    budget: dict[str, Any] = {"frames_per_batch": 10, "num_envs": 2, "reward_dtype": "float64"}
    storage = MemmapStorage(path)
    with SyncCollector(Paid, total_frames=10, storage=storage, **budget) as collector:
        list(collector)
    assert storage.runs[0]["call"]["reward_dtype"] == "float64"
    storage.close()
    del budget["reward_dtype"]
    storage = MemmapStorage(path, mode="append")
    with pytest.raises(SchemaMismatch, match="next/reward has dtype float32, expected float64"):
        SyncCollector(Paid, total_frames=20, storage=storage, **budget)
    storage.close()


def test_evaluations_sum_up_all_bits() -> None:
    found = evaluate(None, Paid, episodes=1, reward_dtype=torch.float64)
    assert found.episodes[0].total_return == sum(Paid().rewards)
    with pytest.warns(RoundedWarning):
        evaluate(None, Paid, episodes=1)
