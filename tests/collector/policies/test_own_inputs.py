"""A policy may write to its inputs and keep them without effect on rows, which do not affect it.

Policies that write to their inputs, or keep them, give the same rows as careful ones.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorObservationWrapper
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl.data import Unbounded

from tallyroll.collector import GymnasiumVectorEnv, SyncCollector
from tallyroll.collector.envs.system import Declares, Step, System
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.errors import TransitionError
from tallyroll.collector.policies.tensor_copies import own_tensors
from tallyroll.storage import open_storage

from collect_kit import assert_same

LANES = 3


def lane() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("CartPole-v1", max_episode_steps=7)


class Remembers(VectorObservationWrapper):
    """Wrapper that keeps its last observations and checks that they were not overwritten."""

    last: Any = None

    def observations(self, observations: Any) -> Any:
        if self.last is not None:
            assert (self.last > -50).all(), "somebody wrote to what it keeps"
        self.last = observations
        return observations


def vector(kind: Any = SyncVectorEnv, mode: str = "DISABLED", **kwargs: Any) -> Any:
    return kind([lane] * LANES, autoreset_mode=AutoresetMode[mode], **kwargs)


def avoiding(**kwargs: Any) -> GymnasiumVectorEnv:
    return GymnasiumVectorEnv(vector(mode="NEXT_STEP", **kwargs), reset_slots="avoid")


VECTORS: dict[str, Callable[[], Any]] = {
    "sync": vector,
    "sync, no copy": partial(vector, copy=False),
    "same step": partial(vector, mode="SAME_STEP"),
    "same step, no copy": partial(vector, mode="SAME_STEP", copy=False),
    "avoided": avoiding,
    "avoided, no copy": partial(avoiding, copy=False),
}


def careful(observation: torch.Tensor) -> torch.Tensor:
    return (observation.sum(-1) > 0).long()


def around(td: TensorDictBase) -> TensorDictBase:
    """Act like `careful`, but through a TensorDict."""
    return td.set("action", careful(td["observation"]))


def scribbles(observation: torch.Tensor) -> torch.Tensor:
    chosen = careful(observation)
    observation.fill_(-100.0)
    return chosen


class Keeps:
    """Policy that keeps all its inputs, and copies of them."""

    def __init__(self) -> None:
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, observation: torch.Tensor) -> torch.Tensor:
        self.kept.append((observation, observation.clone()))
        return careful(observation)


def rows_of(make: Callable[[], Any], policy: Any, path: Path, takes: list[int], **more: Any) -> Any:
    """Return the rows of a run whose calls collect ``takes`` rows in turn.

    0 takes a batch of 5.
    """
    options: dict[str, Any] = {"frames_per_batch": 5, "total_frames": 120, "seed": 4}
    with SyncCollector(make, policy, storage=path, **{**options, **more}) as collector:
        batches = iter(collector)
        while collector.ledger.stored < 120:
            for take in takes:
                if not take:
                    next(batches, None)
                else:
                    collector.collect(take)
    with open_storage(path, mode="read") as storage:
        return storage.get(slice(None)).clone()


OPTIONS: list[dict[str, Any]] = [{}, {"max_frames_per_traj": 4}, {"reset_at_each_iter": True}]
CASES = [(name, more) for name in [*VECTORS, "wrapped"] for more in OPTIONS]
TAKES = [[LANES, LANES, LANES, 0], [LANES, LANES, LANES + 1]]
# The other environments cannot step a part of their lanes.
CASES += [(name, {"surplus": "never_step"}) for name in ("sync", "sync, no copy")]


@pytest.mark.parametrize(
    ("name", "more", "takes"),
    [
        pytest.param(*case, TAKES[turn % 2], marks=[pytest.mark.slow] * (turn % 3 == 2))
        for turn, case in enumerate(CASES)
    ],
    ids=lambda each: "".join(map(str, each)),
)
def test_rows_are_those_of_a_careful_policy(
    name: str, takes: list[int], more: dict[str, Any], tmp_path: Path
) -> None:
    make = VECTORS.get(name, lambda: Remembers(vector()))
    wanted = rows_of(make, around, tmp_path / "careful", takes if more else [0], **more)
    wrote = rows_of(make, scribbles, tmp_path / "scribbles", takes, **more)
    keeps = Keeps()
    kept = rows_of(make, keeps, tmp_path / "keeps", takes, **more)
    for rows in (wrote, kept):
        assert_same(in_order(rows), in_order(wanted))
    assert len(keeps.kept) >= 120 // LANES
    for reference, value in keeps.kept:
        assert torch.equal(reference, value)


def in_order(rows: Any) -> Any:
    """Sort by lane and time, because calls of other sizes divide the slots elsewhere."""
    lane, ids = rows["collector", "lane"].long(), rows["collector", "traj_ids"]
    step = rows["collector", "step"]
    order = sorted(range(len(rows)), key=lambda i: (lane[i].item(), ids[i].item(), step[i].item()))
    return rows[order].exclude(("collector", "traj_ids"), ("collector", "cut"))


@pytest.mark.parametrize("policy", [None, careful])
def test_memory_goes_with_the_collector(policy: Any, tmp_path: Path) -> None:
    """The memory is freed immediately, without waiting for garbage collection."""
    gc.collect()
    gc.disable()
    try:
        collector = SyncCollector(
            vector, policy, frames_per_batch=6, total_frames=80, storage=tmp_path / "data"
        )
        next(iter(collector))
        for _ in range(4):
            collector.collect(LANES)
        collector.shutdown()
        fast_collect = collector._loop.fast_collect
        at_once = collector.plan.commits.way == "one call"
        assert bool(fast_collect and fast_collect._made) == at_once, "some slots were plain ones"
        del fast_collect
        slab = weakref.ref(collector._rollout.driver.slab)  # type: ignore[attr-defined]
        del collector
        assert slab() is None
    finally:
        gc.enable()


class Tells(gymnasium.Env[np.ndarray, np.ndarray]):
    """Environment with unique observations, and five steps per episode."""

    observation_space = gymnasium.spaces.Box(-1e6, 1e6, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1e6, 1e6, (1,), np.float32)

    def __init__(self) -> None:
        self.episode = self.count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episode, self.count = self.episode + 1, 0
        return self._seen(), {}

    def step(self, action: np.ndarray) -> Any:
        self.count += 1
        return self._seen(), 1.0, self.count == 5, False, {}

    def _seen(self) -> np.ndarray:
        return np.array([100 * self.episode + self.count], np.float32)


@pytest.mark.parametrize("at", range(7, 12))
@pytest.mark.parametrize("mode", ["DISABLED", "SAME_STEP"])
def test_a_hook_comes_and_goes(mode: str, at: int, tmp_path: Path) -> None:
    """The step may also end episodes. Each action belongs to its own observation."""
    policy = TensorDictModule(
        lambda observation: observation.clone(), in_keys=["observation"], out_keys=["action"]
    )

    def make() -> SyncVectorEnv:
        return SyncVectorEnv([Tells] * 2, autoreset_mode=AutoresetMode[mode])

    options: dict[str, Any] = {"frames_per_batch": 2, "total_frames": 60}
    with SyncCollector(make, policy, storage=tmp_path / "data", **options) as collector:
        for call in range(20):
            hook = policy.register_forward_hook(lambda *_: None) if call == at else None
            collector.collect(2)
            if hook is not None:
                hook.remove()
    with open_storage(tmp_path / "data", mode="read") as storage:
        rows = storage.get(slice(None))
    assert torch.equal(rows["action"], rows["observation"])
    assert len(rows) == 40


def test_what_is_no_array_is_refused(tmp_path: Path) -> None:
    class Views(System):
        def __init__(self) -> None:
            self.declares = Declares(
                lanes=2,
                observation={("observation",): Unbounded((1,))},
                action={("action",): Unbounded((1,))},
                at_end="final",
            )

        def reset(self, lanes: object, seeds: object, **options: object) -> list[np.ndarray]:
            return [np.zeros((2, 1), np.float32)]

        def step(self, action: object, lanes: object = None) -> Step:
            never, seen = np.zeros(2, np.bool_), memoryview(np.ones((2, 1), np.float32))
            return Step([seen], [np.zeros(2)], never, never)  # type: ignore[list-item]

    env = SystemEnv(Views())
    options: dict[str, Any] = {"frames_per_batch": 2, "total_frames": 60}
    with (
        SyncCollector(env, None, storage=tmp_path / "data", **options) as made,
        pytest.raises(TransitionError),
    ):
        made.collect(2)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_copy_has_every_bit(stacked: bool) -> None:
    bits = {
        "signs of zero, and a NaN": np.array([1 << 31, 0, 0x7FA00001], np.uint32).view(np.float32),
        "complex": np.array([complex(-0.0, -0.0)]),
        "wide": np.array([2**64 - 1], np.uint64),
        "flags": np.array([True, False]),
    }
    td = TensorDict({"group": TensorDict(bits)}, device="cpu")
    td["text"] = NonTensorData("text")
    given = LazyStackedTensorDict(td, td.copy(), stack_dim=0) if stacked else td
    copy = own_tensors(given)
    assert (type(copy), copy.device, copy.shape) == (type(given), given.device, given.shape)
    first, source = (copy[0], given[0]) if stacked else (copy, given)
    assert first["text"] == "text"
    for name, wanted in bits.items():
        got = first["group", name]
        assert got.numpy().tobytes() == wanted.tobytes(), name
        assert got.data_ptr() != source["group", name].data_ptr()
