"""Versions of the packages that compute an environment, in the manifest and in a replay."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
import pytest
from torchrl.envs import GymEnv

from tallyroll.collector import MultiprocessCollector, SyncCollector, replay
from tallyroll.storage import open_storage
from tallyroll.storage.package.versions import versions


class Bare(gymnasium.Env[Any, Any]):
    """Environment of this module that holds an object of another package."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    part: Any = None

    def __init__(self) -> None:
        self.held = self.part

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), 0.0, False, False, {}


def found(create: Any, path: Path, collector: Any = SyncCollector, **more: Any) -> dict[str, str]:
    """Return the versions in a manifest beyond those that every run records."""
    with collector(create, frames_per_batch=4, total_frames=4, storage=path, seed=0, **more) as run:
        for _ in run:
            pass
    with open_storage(path) as storage:
        said: dict[str, str] = storage.runs[0]["versions"]
        assert {name: said.pop(name) for name in versions()} == versions()
        assert "_versions" not in storage.runs[0]["environment"]
    return said


def test_an_environment_of_numpy_alone_adds_none(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")  # imported but unused by these environments
    assert found("CartPole-v1", tmp_path / "id", num_envs=2) == {}
    assert found(Bare, tmp_path / "factory") == {}


MUJOCO: dict[str, Callable[[], Any]] = {
    "id": lambda: "InvertedPendulum-v5",
    "factory": lambda: lambda: gymnasium.make("InvertedPendulum-v5"),
    "processes": lambda: lambda: gymnasium.make_vec("InvertedPendulum-v5", 2, "async"),
}


@pytest.mark.parametrize("kind", MUJOCO)
def test_mujoco(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    assert found(MUJOCO[kind](), tmp_path / "a") == {"mujoco": version("mujoco")}


def test_ale(tmp_path: Path) -> None:
    pytest.importorskip("ale_py")
    assert found("ALE/Pong-v5", tmp_path / "a") == {"ale-py": version("ale-py")}


def test_a_worker_says_those_of_its_environment(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    more = {"num_envs": 2, "num_workers": 1, "transport": "thread"}
    said = found("InvertedPendulum-v5", tmp_path / "a", MultiprocessCollector, **more)
    assert said == {"mujoco": version("mujoco")}


def test_its_own_package_and_what_that_computes_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages are found by the module of the class, and by objects that the environment holds."""
    monkeypatch.setitem(sys.modules, "psutil", ModuleType("psutil"))
    own = type("Own", (Bare,), {"__module__": "pytest.games"})
    assert found(own, tmp_path / "a") == {"pytest": version("pytest")}
    monkeypatch.setattr(Bare, "part", type("Model", (), {"__module__": "vmas.core"})())
    monkeypatch.setattr(
        "tallyroll.collector.envs.setup.packages.installed",
        {"vmas": "1.5", "pytest": "9"}.get,
    )
    assert found(Bare, tmp_path / "b")["vmas"] == "1.5"


def test_a_replay_names_those_that_differ(tmp_path: Path) -> None:
    found("CartPole-v1", tmp_path / "a", num_envs=2)
    file = tmp_path / "a/manifest.json"
    manifest = json.loads(file.read_text())
    manifest["runs"][0]["versions"] |= {"pytest": "0.1", "no-such": "2", "pip": version("pip")}
    del manifest["crc32"]
    file.write_text(json.dumps(manifest))
    report = replay(tmp_path / "a", "all")
    assert report.same
    assert report.versions == {
        "pytest": ("0.1", version("pytest")),
        "no-such": ("2", "not installed"),
    }


def test_a_package_of_two_names_is_not_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Procgen is installed as procgen-mirror."""
    games = type("Games", (Bare,), {"__module__": "procgen.games"})
    monkeypatch.setattr(
        "tallyroll.collector.envs.setup.packages.installed", {"procgen-mirror": "0.10.7"}.get
    )
    assert found(games, tmp_path / "a") == {"procgen": "0.10.7"}
    assert replay(tmp_path / "a", "all", create_env_fn=games).versions == {}


def test_within_torchrl(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    said = found(lambda: GymEnv("InvertedPendulum-v5"), tmp_path / "a")
    assert said == {"mujoco": version("mujoco")}


def test_an_attribute_that_raises(tmp_path: Path) -> None:
    """A failure to find a version refuses nothing."""

    class Shy(Bare):
        @property
        def envs(self) -> Any:
            raise RuntimeError("not yet")

    assert found(Shy, tmp_path / "a") == {}
