"""An environment is recovered from its id alone, without running code that a manifest names."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_kit import ROWS, collect

from tallyroll.collector import SyncCollector, recover_env, replay
from tallyroll.collector.errors import ArgumentError, EnvironmentUnknown, MissingExtra
from tallyroll.storage.errors import CorruptStorage

Stored = Callable[[str], Path]


def changed(path: Path, **parts: Any) -> Path:
    """Change the run's entry in a manifest, as a crafted storage might."""
    file = path / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["runs"][0] |= parts
    manifest.pop("crc32", None)
    file.write_text(json.dumps(manifest))
    return path


def test_an_environment_of_an_id_comes_with_its_arguments(tmp_path: Path) -> None:
    path = collect(
        tmp_path / "a", num_envs=3, env_kwargs={"sutton_barto_reward": True}, max_frames_per_traj=7
    )
    env = recover_env(path, env_kwargs={"render_mode": "rgb_array"})
    assert tuple(env.batch_size) == (3,)
    rows = env.rollout(9, break_when_any_done=False)
    assert rows["next", "truncated"][:, 6].all()
    assert (rows["next", "reward"][:, :3] == 0).all()  # Sutton and Barto give 0, other versions 1
    env.close()
    with recover_env_closed(path, num_envs=2) as lanes:
        assert lanes == 2
    with pytest.raises(ArgumentError, match=r"one of the 1 runs in .*, got 1"):
        recover_env(path, 1)


def test_an_argument_that_json_cannot_hold_is_asked_for(tmp_path: Path) -> None:
    """JSON would restore it as a description, which would create another environment."""
    path = collect(tmp_path / "a", num_envs=1, env_kwargs={"sutton_barto_reward": np.bool_(True)})
    for known in (None, {"render_mode": "rgb_array"}):
        with pytest.raises(
            EnvironmentUnknown, match="not contain the arguments sutton_barto_reward"
        ):
            recover_env(path, env_kwargs=known)
    env = recover_env(path, env_kwargs={"sutton_barto_reward": True})
    assert (env.rollout(3)["next", "reward"] == 0).all()
    env.close()


class recover_env_closed:
    def __init__(self, path: Path, **options: Any) -> None:
        self.env = recover_env(path, **options)

    def __enter__(self) -> int:
        return self.env.batch_size.numel()

    def __exit__(self, *_: object) -> None:
        self.env.close()


MODULE = """
import gymnasium
from pathlib import Path
Path({mark!r}).touch()
if "Trapped-v0" not in gymnasium.registry:
    gymnasium.register("Trapped-v0", "gymnasium.envs.classic_control:CartPoleEnv")
"""


def test_no_module_that_a_storage_names_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "imported"
    (tmp_path / "trapped.py").write_text(MODULE.format(mark=str(mark)))
    monkeypatch.syspath_prepend(str(tmp_path))
    path = collect(tmp_path / "a", "trapped:Trapped-v0")
    mark.unlink()

    def again() -> None:
        sys.modules.pop("trapped", None)
        refused = "never imports modules.*--env-factory|pettingzoo, which is not installed"
        with pytest.raises((EnvironmentUnknown, MissingExtra), match=refused):
            replay(path)
        with pytest.raises((EnvironmentUnknown, MissingExtra), match=refused):
            recover_env(path)
        assert not mark.exists()

    again()
    trapped = {"type": "x", "kwargs": {}}
    for name in (
        "pettingzoo:trapped",
        "pettingzoo:trapped/a-v1",
        "pettingzoo:a:trapped",
        "ale:a:b",
    ):
        changed(path, environment=trapped | {"id": name})
        again()
    indirect = {"id": "GymV26Environment-v0", "kwargs": {"env_id": "trapped:Trapped-v0"}}
    changed(path, environment=trapped | indirect)
    again()
    # explicitly requested by the caller
    assert replay(path, "all", create_env_fn="trapped:Trapped-v0").same
    assert mark.exists()


def test_a_manifest_that_cannot_be(tmp_path: Path) -> None:
    path = collect(tmp_path / "a")
    for parts in (
        {"lanes": "8"},
        {"lanes": 0},
        {"call": {"num_workers": 9}},
        {"call": {"num_workers": 0}},
        {"call": {"info_keys": [3]}},
        {"call": {"rename": ["x"]}},
        {"call": {"resets": {"seeds": True, "sampler": {"low": "run()"}}}},
    ):
        changed(path, **{"lanes": 8, "call": {}} | parts)
        with pytest.raises((CorruptStorage, ArgumentError)):
            replay(path)
    changed(path, call=7, lanes=8)
    assert replay(path).rows
    changed(path, call={}, lanes=8, environment=None)
    with pytest.raises(EnvironmentUnknown):
        replay(path)
    changed(path, environment={"id": "Gone-v7", "kwargs": {}, "type": "SyncVectorEnv"})
    with pytest.raises(ArgumentError, match="Gone"):
        replay(path)
    changed(path, seed=None)
    report = replay(path)
    assert [*report.not_replayed] == ["neither the trajectory nor its run has a seed"]


def test_columns_of_infos_and_other_names(tmp_path: Path) -> None:
    pytest.importorskip("ale_py")
    path = tmp_path / "a"
    with SyncCollector(
        "ALE/Pong-v5",
        num_envs=2,
        frames_per_batch=40,
        total_frames=40,
        storage=path,
        info_keys=["lives"],
        rename={"observation": "pixels"},
        frame_skip="episode_frame_number",
        seed=1,
    ) as collector:
        for _ in collector:
            pass
    report = replay(path, "all")
    assert report.same
    assert {"pixels", "lives", "next/episode_frame_number"} <= {*report.largest}


def test_the_rows_are_all_there(stored: Stored) -> None:
    assert replay(stored("plain"), "all").rows == ROWS
