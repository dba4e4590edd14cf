"""Third-party systems need an entry point, and no other change of the project."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from torchrl.envs import check_env_specs

from tallyroll.collector import MultiprocessCollector, SyncCollector
from tallyroll.collector.envs import registry
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused, MissingExtra
from tallyroll.storage import open_storage, verify

from arrays_kit import rows_of
from pairs import in_gate
from registered_kit import distribution, install
from toy_systems import TOYS, Arrivals, Contexts, Lost, SeededWhenMade, SomeFinals, Toy
from worker_kit import QUICK


@pytest.fixture(autouse=True)
def registered(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    site = tmp_path_factory.mktemp("site")
    install(
        site,
        monkeypatch,
        toy="toy_systems:Toy",
        broken="no_such_package:Toy",
        wrong="toy_systems:ReadOnly",
    )
    return site


def chains(rows: TensorDictBase) -> None:
    """Check that rows of a trajectory are consecutive and encode lane, episode and step."""
    obs, after = rows["observation"].numpy(), rows["next", "observation"].numpy()
    ids, step = rows["collector", "traj_ids"].numpy(), rows["collector", "step"].numpy()
    lane = rows["collector", "lane"].numpy()
    done = (rows["next", "terminated"] | rows["next", "truncated"]).numpy()[:, 0]
    order = np.lexsort((step, ids))
    assert (obs[:, 2] == step).all()
    same = ids[order][1:] == ids[order][:-1]
    assert (after[order][:-1][same] == obs[order][1:][same]).all()
    assert len({*zip(lane[~done].tolist(), obs[~done, 0].tolist(), strict=True)}) <= len(set(lane))
    final = (
        done
        if ("collector", "next_valid") not in rows.keys(True)
        else (done & rows["collector", "next_valid"].numpy().reshape(-1))
    )
    assert (after[final][:, 1] == obs[final][:, 1]).all(), "a final observation is of its episode"
    assert (after[final][:, 2] == step[final] + 1).all()


def test_what_is_installed_meanwhile_is_found(registered: Path, monkeypatch: Any) -> None:
    assert "toy" in registry.names()
    assert "later" not in registry.names()
    time.sleep(0.02)  # exceeds the time resolution of file systems
    distribution(registered, "more", later="toy_systems:Toy")
    made = registry.find("later:Toy")
    assert made is not None
    assert made[0] is Toy
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(registered)])
    assert not {"toy", "later"} & {*registry.names()}
    assert registry.find("toy:Toy") is None


KINDS = sorted({*TOYS} - {"Contexts", "Groups"})


@pytest.mark.parametrize("kind", KINDS)
def test_collected_stored_and_resumed(kind: str, tmp_path: Path) -> None:
    lanes = 5 if "Arrivals" in kind else 3
    arguments: dict[str, Any] = {"num_envs": lanes, "frames_per_batch": 37}
    path = tmp_path / "run"
    with SyncCollector(
        f"toy:{kind}", None, total_frames=100, seed=3, storage=path, **arguments
    ) as collector:
        assert sum(batch.numel() for batch in collector) == 100
    with SyncCollector(
        f"toy:{kind}", None, total_frames=250, storage=path, resume=True, **arguments
    ) as collector:
        assert sum(batch.numel() for batch in collector) == 150
    assert verify(path).sound, str(verify(path))
    rows = open_storage(path)[:].clone()
    assert rows.numel() == 250
    chains(rows)
    made = open_storage(path).manifest["runs"][0]["environment"]
    assert made["id"] == f"toy:{kind}"


@pytest.mark.parametrize(("kind", "mode"), in_gate(KINDS, ["sync", "async"]))
def test_workers(kind: str, mode: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"num_envs": 6, "frames_per_batch": 40, "total_frames": 130}

    def collect(**more: Any) -> TensorDictBase:
        with MultiprocessCollector(
            f"toy:{kind}", None, num_workers=2, mode=mode, seed=4, **QUICK, **arguments, **more
        ) as collector:
            return torch.cat([batch.clone() for batch in collector])

    if "Arrivals" in kind and mode == "sync":
        with pytest.raises(EnvironmentRefused, match='mode="async"'):
            collect()
        return
    rows = collect(storage=tmp_path / "run")
    assert rows.numel() == 130
    chains(rows)
    assert verify(tmp_path / "run").sound
    if mode == "sync":
        alone = rows_of(f"toy:{kind}", seed=4, **arguments)
        for key in rows.keys(True, True):
            assert torch.equal(rows[key], alone[key]), key


@pytest.mark.parametrize("kind", ["Toy", "WithResetSlots", "First", "Arrivals"])
def test_an_episode_budget(kind: str) -> None:
    with SyncCollector(
        f"toy:{kind}", None, num_envs=5, frames_per_batch=16, total_episodes=23, seed=1
    ) as collector:
        rows = torch.cat([batch.clone() for batch in collector])
        ledger = collector.ledger
    assert ledger.episodes_complete == 23
    chains(rows)


def test_random_frames_of_lanes_that_arrive_are_exact() -> None:
    def policy(td: TensorDictBase) -> TensorDictBase:
        return td.set("action", torch.ones(td.batch_size, dtype=torch.int64))

    for frames in (7, 20, 33):
        options = {"frames_per_batch": 10, "total_frames": 100, "init_random_frames": frames}
        rows = rows_of("toy:Arrivals", policy, num_envs=5, seed=0, **options)
        random = rows["collector", "policy_version"] < 0
        assert int(random.sum()) == frames
        assert (rows["action"][~random] == 1).all()


def test_what_a_lane_did_stands_in_its_row() -> None:
    """Lanes arrive in any order. The sum of actions in the observation shows what they did."""
    rows = rows_of("toy:Arrivals", num_envs=7, frames_per_batch=50, total_frames=400, seed=9)
    before, after = rows["observation"][:, 3], rows["next", "observation"][:, 3]
    assert torch.equal(after, before + rows["action"])
    assert torch.equal(rows["observation"][:, 0].to(torch.int32), rows["collector", "lane"])


def test_a_time_limit_and_transforms() -> None:
    for kind in ("Toy", "InParts", "SomeFinals"):
        options = {"frames_per_batch": 60, "total_frames": 60, "max_frames_per_traj": 2}
        rows = rows_of(f"toy:{kind}", num_envs=3, seed=2, **options)
        assert int(rows["collector", "step"].max()) == 1
        chains(rows)


def test_torchrl_checks_the_specs() -> None:
    for kind in (Toy, SomeFinals, Lost, Arrivals):
        env = SystemEnv(kind(4))
        check_env_specs(env, seed=0)
        env.close()


def test_contexts_are_drawn_one_ahead_and_kept_through_a_resume(tmp_path: Path) -> None:
    drawn: list[int] = []

    def draw(rng: np.random.Generator) -> dict[str, Any]:
        drawn.append(int(rng.integers(1, 4)))
        return {"length": drawn[-1]}

    options = {"frames_per_batch": 40, "total_frames": 80, "storage": tmp_path / "run"}
    rows = rows_of(lambda: SystemEnv(Contexts(2), draw=draw), seed=5, **options)
    ends = (rows["next", "terminated"] | rows["next", "truncated"])[:, 0]
    lengths = rows["collector", "step"][ends] + 1
    assert torch.equal(lengths, rows["observation"][ends][:, 4])
    assert len(drawn) >= len(lengths) + 2


def test_infos_of_a_system_are_refused_with_the_way_out() -> None:
    said = r"info_keys: \['score'\] are not columns of Toy, whose infos are not kept. Add them to"
    for make in (partial(Toy, 2), Toy(2), SystemEnv(Toy(2))):
        with pytest.raises(ArgumentError, match=said):
            SyncCollector(make, frames_per_batch=4, total_frames=4, info_keys=["score"])


def test_seeds_that_are_taken_only_when_it_is_made() -> None:
    instance = SeededWhenMade(2)
    with pytest.raises(
        ArgumentError, match="seed: SeededWhenMade accepts seeds only when it is made"
    ):
        SyncCollector(instance, None, frames_per_batch=4, total_frames=4, seed=1)
    with SyncCollector(instance, None, frames_per_batch=4, total_frames=4) as collector:
        list(collector)

    def make(seeds: Any = None) -> SeededWhenMade:
        return SeededWhenMade(2, seeds)

    def without_default(seeds: Any) -> SeededWhenMade:
        return SeededWhenMade(2, seeds)

    runs = [
        rows_of(each, frames_per_batch=20, total_frames=20, seed=1)
        for each in (make, without_default)
    ]
    assert torch.equal(runs[0]["observation"], runs[1]["observation"])


@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("broken:X", MissingExtra, "broken: its environments need a package"),
        (
            "wrong:X",
            ArgumentError,
            "expected the entry point toy_systems:ReadOnly to name a System",
        ),
        ("unheard_of:X-v0", ArgumentError, "gymnasium cannot make"),
        ("dm-control:cartpole-swingup", ArgumentError, "did you mean dm_control?.* lists the sys"),
    ],
)
def test_names_that_lead_nowhere(name: str, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        SyncCollector(name, None, frames_per_batch=4, total_frames=4)


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tallyroll.collector.cli"]
    out = str(tmp_path / "run")
    done = subprocess.run(
        [*command, "collect", "toy:First", "--frames", "50", "--num-envs", "2", "--out", out],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    with open_storage(out) as storage:
        assert storage.head == 50
