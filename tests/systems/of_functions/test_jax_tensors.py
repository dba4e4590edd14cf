"""JAX systems that keep their arrays on a device, where torch reads them by dlpack.

JAX has no accelerator here, so the tests keep arrays on the CPU, where environments then exchange
tensors with the systems. ``TALLYROLL_CONFIGURATIONS`` is the number of random runs, 10 by default.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from device_runs_kit import collect
from tensordict import TensorDictBase

from tallyroll.collector.envs.stepping.results import Results
from tallyroll.collector.envs.system import System
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.ext.systems.brax import BraxSystem
from tallyroll.collector.ext.systems.gymnax import GymnaxSystem
from tallyroll.collector.ext.systems.kinds import functional
from tallyroll.storage import DeviceStorage, MemmapStorage, content_hash

from functional_kit import ToyEnv, shared

COUNT = int(os.environ.get("TALLYROLL_CONFIGURATIONS", "10"))
CPU = torch.device("cpu")
CARTPOLE, PARAMS = gymnax.make("CartPole-v1")
SHORT = PARAMS.replace(max_steps_in_episode=12)


class ManyKinds(ToyEnv):
    """A toy with observations of several dtypes."""

    def observed(self, position: Any) -> Any:
        return {
            "state": position,
            "is_left": position < 0,
            "pixels": (position[:, None] * jnp.arange(12)).astype(jnp.uint8),
            "steps": jnp.round(position * 100).astype(jnp.int32),
            "half": position.astype(jnp.float16),
        }


class Observed(ToyEnv):
    """A toy whose observation is its state, which JAX overwrites in the next step."""

    def observed(self, position: Any) -> Any:
        return position


def cartpole(lanes: int) -> System:
    return GymnaxSystem(CARTPOLE, lanes, SHORT)


def kinds(lanes: int) -> System:
    return BraxSystem(ManyKinds(), lanes, episode_length=9)


def observed(lanes: int) -> System:
    return BraxSystem(Observed(), lanes, episode_length=7)


class Leaning:
    """A policy that decides by the observation alone."""

    def __call__(self, rows: TensorDictBase) -> TensorDictBase:
        seen = rows.get("observation", None)
        if seen is not None and seen.shape[-1] == 4:
            return rows.set("action", (seen.sum(-1) > 0).long())
        return rows.set("action", torch.cos(7 * (rows["state"] if seen is None else seen[..., :2])))


def kept(make: Callable[[int], System], lanes: int) -> System:
    system: System = shared(make, lanes)
    assert system.keep_on(CPU)
    return system


@contextmanager
def cpu_as_device() -> Iterator[None]:
    """Make environments over systems on the CPU exchange tensors with them."""
    with pytest.MonkeyPatch.context() as patch:
        never = property(lambda self: False, lambda self, value: None)
        patch.setattr(Results, "are_arrays", never, raising=False)
        patch.setattr(SystemEnv, "_action", lambda self, action: action.clone())
        yield


@pytest.mark.parametrize("seed", range(COUNT))
def test_random_runs_store_the_rows_of_the_numpy_path(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    make, lanes = rng.choice([cartpole, kinds, observed]), rng.choice([1, 3, 20])
    monkeypatch.setattr(functional, "_LARGE_NBYTES", rng.choice([2**11, 1]))
    given: dict[str, Any] = {
        "frames_per_batch": rng.randint(1, 50),
        "surplus": rng.choice(["carry", "discard"]),
        "layout": rng.choice(["rows", "lanes", "trajectories"]),
        "max_frames_per_traj": rng.choice([None, 4]),
        "reset_at_each_iter": rng.random() < 0.2,
        "seed": seed,
    }
    size = max(given["frames_per_batch"], rng.choice([60, 1000]))
    with MemmapStorage(tmp_path, max_size=size) as disk:
        plain = collect(disk, lambda: (shared(make, lanes), Leaning()), given, seed)
        wanted, record = content_hash(disk), disk.record
    with cpu_as_device(), DeviceStorage(max_size=size, device="cpu") as ring:
        assert collect(ring, lambda: (kept(make, lanes), Leaning()), given, seed) == plain
        assert content_hash(ring) == wanted
        assert ring.reader.record == record


def test_only_flags_of_a_step_are_read_by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, ...]] = []
    real = np.asarray

    def counted(value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, jax.Array):
            read.append(value.shape)
        return real(value, *args, **kwargs)

    with cpu_as_device():
        env = SystemEnv(kept(kinds, 3))
        rows = env.reset()
        monkeypatch.setattr(np, "asarray", counted)
        ends = 0
        for _ in range(20):
            step, rows = env.step_and_maybe_reset(Leaning()(rows))
            ends += int(step["next", "done"].sum())
    assert ends > 3
    assert read == [(2, 3)] * 20


@pytest.mark.parametrize(
    "action", [torch.tensor([0, 1, 1]), torch.tensor([[0, 9], [1, 9], [1, 9]])[:, 0]]
)
def test_actions_of_torch_are_those_of_numpy(action: torch.Tensor) -> None:
    """JAX has no 64-bit integers by default, and reads contiguous tensors alone."""
    steps = []
    for system, given in ((shared(cartpole, 3), action.numpy()), (kept(cartpole, 3), action)):
        system.reset(None, [1, 2, 3])
        steps.append(system.step([given]).obs[0])
    assert isinstance(steps[1], jax.Array)
    assert np.array_equal(*steps)


def test_rows_do_not_change_with_the_next_step() -> None:
    """JAX writes the next state to the memory of this one."""
    with cpu_as_device():
        env = SystemEnv(kept(observed, 2))
        rows = env.reset()
        seen = []
        for _ in range(30):
            step, rows = env.step_and_maybe_reset(Leaning()(rows))
            after = step["next", "observation"]
            seen.append((after, after.clone()))
    assert all(torch.equal(*each) for each in seen)


def test_jax_reuses_no_memory_that_torch_still_copies_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system holds the arrays of a call until the next one, which waits for torch."""
    system = kept(cartpole, 2)
    system._kept_on = torch.device("cuda")
    waited: list[int] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            assert device.type == "cuda"

        def synchronize(self) -> None:
            waited.append(len(system._held))

    monkeypatch.setattr(torch.accelerator, "current_stream", Stream)
    system.reset(None, [1, 2])
    assert waited == []
    system.step([torch.tensor([0, 1])])
    system.reset(np.array([True, False]), None)
    assert waited == [1, 2], "observations; then observations and rewards"


def test_a_device_on_which_jax_does_not_compute() -> None:
    system = shared(cartpole, 2)
    assert not system.keep_on(torch.device("cuda"))
    assert system.declares.device == "cpu"
    assert all(type(each) is np.ndarray for each in system.reset(None, [1, 2]))
