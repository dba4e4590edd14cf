"""Test Isaac Lab's semantics on a stand-in: resets within steps, finals kept, lost or partial."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from torchrl.envs import RewardSum, TransformedEnv

from tallyroll.collector import MultiprocessCollector, SyncCollector
from tallyroll.collector.counting.numbering import lane_seeds
from tallyroll.collector.envs.stepping.stepper import Stepper
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.errors import (
    ArgumentError,
    EnvironmentRefused,
    MissingExtra,
    TransitionError,
)
from tallyroll.collector.ext.systems.isaaclab import IsaacLabSystem
from tallyroll.collector.testing import SystemContract
from tallyroll.storage import open_storage, verify

import isaac_lab_kit as kit

FLAG = ("collector", "next_valid")
KEPT: dict[str, Any] = {"compute_final_obs": True}
LOST: dict[str, Any] = {"compute_final_obs": False}
OLD: dict[str, Any] = {}


class TestKept(SystemContract):
    def make(self, lanes: int, seeds: Sequence[int] | None) -> IsaacLabSystem:
        return IsaacLabSystem(kit.make(lanes, **KEPT))


class TestLost(SystemContract):
    def make(self, lanes: int, seeds: Sequence[int] | None) -> IsaacLabSystem:
        return IsaacLabSystem(kit.make(lanes, **LOST))


class TestOld(SystemContract):
    def make(self, lanes: int, seeds: Sequence[int] | None) -> IsaacLabSystem:
        return IsaacLabSystem(kit.make(lanes, **OLD))


def collect(create: Any, frames: int = 200, **more: Any) -> TensorDictBase:
    arguments = {"frames_per_batch": 37, "total_frames": frames, "seed": 3, **more}
    with SyncCollector(create, None, **arguments) as collector:
        rows = torch.cat([batch.clone() for batch in collector])
    assert rows.numel() == frames
    return rows


def check_by_hand(rows: TensorDictBase, lanes: int, seed: int, *, kept: bool) -> None:
    """Compare every row with the environment stepped by hand, which always computes finals."""
    env = kit.make(lanes, **KEPT)
    lane, ids = rows["collector", "lane"].numpy(), rows["collector", "traj_ids"].numpy()
    order = np.lexsort((rows["collector", "step"].numpy(), ids, lane))
    parts = [rows[order[lane[order] == each]] for each in range(lanes)]
    seen = env.reset(seed=seed)[0]["policy"].clone()
    ends = 0
    for at in range(min(map(len, parts))):
        row = torch.stack([part[at] for part in parts])
        assert torch.equal(row["policy"], seen)
        assert torch.equal(row["critic", "state"], seen[:, [2, 4]])
        observation, reward, terminated, truncated, extras = env.step(row["action"])
        seen, over = observation["policy"].clone(), terminated | truncated
        final = extras["final_obs"]["policy"]
        true = torch.ones_like(over) if kept else ~over
        assert torch.equal(row["next", "policy"][true], final[true])
        assert torch.equal(row["next", "critic", "state"][true], final[true][:, [2, 4]])
        assert torch.equal(row["next", "reward"][:, 0], reward)
        assert torch.equal(row["next", "terminated"][:, 0], terminated)
        assert torch.equal(row["next", "truncated"][:, 0], truncated)
        if FLAG in rows.keys(True):
            assert torch.equal(row[FLAG], true)
        ends += int(over.sum())
    assert ends > 10
    assert kept or FLAG in rows.keys(True), "what is lost is flagged"


@pytest.mark.parametrize(
    ("entries", "kept"), [(KEPT, True), (LOST, False), (OLD, False)], ids=["kept", "lost", "old"]
)
def test_final_observations_are_true_or_flagged(
    entries: dict[str, Any], kept: bool, tmp_path: Path
) -> None:
    rows = collect(lambda: kit.make(4, **entries), storage=tmp_path / "run")
    check_by_hand(rows, 4, lane_seeds(3, 4, 0)[0], kept=kept)
    assert verify(tmp_path / "run").sound


def test_some_final_observations() -> None:
    """Without an option, each step shows whether it has final observations."""

    class Sometimes(kit.ManagerBasedRLEnv):
        def step(self, action: torch.Tensor) -> Any:
            self.cfg.compute_final_obs = True
            *rest, extras = super().step(action)
            del self.cfg.compute_final_obs
            self.steps = getattr(self, "steps", 0) + 1
            return *rest, extras if self.steps % 2 else {}

    rows = collect(lambda: Sometimes(kit.config(3)))
    over = (rows["next", "terminated"] | rows["next", "truncated"])[:, 0]
    valid = rows[FLAG]
    assert valid[~over].all()
    assert valid[over].any()
    assert not valid[over].all()
    told = rows["next", "policy"]
    assert (told[over & valid][:, 2] >= 3).all()
    assert (told[over & ~valid][:, 2] == 0).all(), "what is there is the next first one"


def test_transforms_and_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test TorchRL's own protocol, and tensors that are not backed by NumPy."""

    def transformed() -> TransformedEnv:
        env = SystemEnv(IsaacLabSystem(kit.make(4, **KEPT)))
        return TransformedEnv(env, RewardSum())

    seed = lane_seeds(3, 4, 0)[0]
    check_by_hand(collect(transformed), 4, seed, kept=True)
    monkeypatch.setattr(Stepper, "fills", property(lambda self: False))
    for entries in (KEPT, LOST):
        rows = collect(lambda e=entries: kit.make(4, **e))
        check_by_hand(rows, 4, seed, kept=entries is KEPT)


def make_pair() -> gymnasium.Env:
    return kit.make(2, **KEPT)


@pytest.mark.slow
def test_workers_and_resumed(tmp_path: Path) -> None:
    with MultiprocessCollector(
        [make_pair, make_pair],
        None,
        frames_per_batch=37,
        total_frames=160,
        seed=3,
        storage=tmp_path / "workers",
    ) as collector:
        rows = torch.cat([batch.clone() for batch in collector])
    assert verify(tmp_path / "workers").sound
    for worker in range(2):
        own = rows[rows["collector", "lane"] // 2 == worker]
        own["collector", "lane"] -= 2 * worker
        check_by_hand(own, 2, lane_seeds(3, 4, 0)[2 * worker], kept=True)
    path = tmp_path / "run"
    collect(make_pair, 80, storage=path)
    with SyncCollector(
        make_pair, None, frames_per_batch=37, total_frames=180, storage=path, resume=True
    ) as collector:
        list(collector)
    stored = open_storage(path)[:]
    for part, incarnation in ((stored[:80], 0), (stored[80:], 1)):
        part["policy"][:, 1] -= part["policy"][:, 1].min()
        part["next", "policy"][:, 1] -= part["next", "policy"][:, 1].min()
        check_by_hand(part, 2, lane_seeds(3, 2, incarnation)[0], kept=True)
    assert verify(path).sound, str(verify(path))


def test_a_task_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in kit.tasks().items():
        monkeypatch.setitem(sys.modules, name, module)
    kwargs = {"device": "cpu", "episode_length_s": 3.0}
    rows = collect("isaaclab:Isaac-Stand-In-v0", num_envs=4, env_kwargs=kwargs)
    check_by_hand(rows, 4, lane_seeds(3, 4, 0)[0], kept=True)
    kwargs["compute_final_obs"] = False
    rows = collect("isaaclab:Isaac-Stand-In-v0", num_envs=4, env_kwargs=kwargs)
    check_by_hand(rows, 4, lane_seeds(3, 4, 0)[0], kept=False)
    with pytest.raises(ArgumentError, match=r"entries of the task's cfg, got \['length'\]"):
        IsaacLabSystem.make("Isaac-Stand-In-v0", 1, None, device="cpu", length=3)
    with pytest.raises(ArgumentError, match=r"isaaclab:Isaac-No-v0: .*doesn't exist"):
        IsaacLabSystem.make("Isaac-No-v0", 1, None, device="cpu")


def test_without_the_package_or_the_app(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingExtra, match=r"Isaac Lab is not installed\. Install it from NVIDIA"):
        SyncCollector("isaaclab:Isaac-Cartpole-v0", None, frames_per_batch=4, total_frames=4)

    class NeedsApp:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name == "isaaclab_tasks":
                raise ModuleNotFoundError("No module named 'omni.kit'", name="omni.kit")

    monkeypatch.setattr(sys, "meta_path", [NeedsApp(), *sys.meta_path])
    with pytest.raises(EnvironmentRefused, match=r"before its app is launched .*AppLauncher"):
        SyncCollector("isaaclab:Isaac-Cartpole-v0", None, frames_per_batch=4, total_frames=4)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Several(kit.ManagerBasedRLEnv):
        possible_agents = ("left", "right")

    class Waits(kit.ManagerBasedRLEnv):
        metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}  # noqa: RUF012

    class Incomplete(kit.ManagerBasedRLEnv):
        def step(self, action: torch.Tensor) -> Any:
            *rest, extras = super().step(action)
            return *rest, {"final_obs": {"policy": extras["final_obs"]["policy"]}}

    for kind, error, match in (
        (Several, EnvironmentRefused, "multi_agent_to_single_agent"),
        (Waits, EnvironmentRefused, "expected autoreset_mode SAME_STEP"),
        (Incomplete, TransitionError, r"extras\[.final_obs.\]: .*'critic', 'state'.*KeyError"),
    ):
        with pytest.raises(error, match=match):
            collect(lambda kind=kind: kind(kit.config(2, **KEPT)))
    assert IsaacLabSystem.adopt(gymnasium.make("CartPole-v1")) is None
    assert IsaacLabSystem.adopt(ModuleType("isaaclab")) is None
