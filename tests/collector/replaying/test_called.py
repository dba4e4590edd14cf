"""Replay of runs with calls of their environments repeats the calls at the same rows."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from tallyroll.collector import MultiprocessCollector, Resets, SyncCollector, replay
from tallyroll.storage import open_storage


class Told(gymnasium.Env[Any, Any]):
    """Environment that observes its level at the reset, its present level, and a random number.

    The random number is drawn at each reset.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(3)
    level = 0.0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at, self.began = 0, self.level
        self.drawn = float(self.np_random.random())
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.at += 1
        return self._seen(), float(action), self.at >= 3 + int(4 * self.drawn), False, {}

    def _seen(self) -> Any:
        return np.array([self.began, self.level, self.drawn], np.float32)

    def raise_level(self, by: float, *, times: int = 1) -> None:
        """Raise the level."""
        self.level += by * times


def run(path: Path, *, workers: bool = False, **options: Any) -> Path:
    kind: Any = SyncCollector
    if workers:
        kind = partial(MultiprocessCollector, num_workers=2, mode="async", transport="thread")
    given = {"num_envs": 3, "frames_per_batch": 20, "total_frames": 120, "seed": 1} | options
    with kind(Told, storage=path, **given) as collector:
        for number, _ in enumerate(collector):
            if number == 1:
                collector.env_set("level", [1.0, 2.0, 3.0])
            elif number == 2:
                collector.env_call("raise_level", 0.5, times=3, lanes=[2, 0])
                collector.env_set("level", 7.0, lanes=[1])
            elif number == 3:
                collector.env_call("raise_level", 0.25)
    return path


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "seeded": {"resets": Resets(seeds=True)},
    "discards": {"resets": Resets(seeds=True), "surplus": "discard"},
    "cut": {"resets": Resets(seeds=True), "reset_at_each_iter": True},
    "async": {"workers": True},
    "async seeded": {"workers": True, "resets": Resets(seeds=True)},
}


def as_before(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the path of a manifest, and its content as earlier versions wrote it, with events."""
    with open_storage(path) as storage:
        manifest = storage.manifest
    (path / "run.events").unlink()
    del manifest["runs"][0]["events_in_file"]
    return path / "manifest.json", manifest


@pytest.mark.parametrize("name", OPTIONS)
def test_calls_come_again_where_they_came(name: str, tmp_path: Path) -> None:
    path = run(tmp_path / "a", **OPTIONS[name])
    with open_storage(path) as storage:
        levels = storage.column("observation")[:, :2]
        # The progress of workers at a call depends on timing.
        assert len(np.unique(levels, axis=0)) > (2 if "async" in name else 6)
    report = replay(path, "all", create_env_fn=Told)
    assert report.differences == ()
    if name != "discards":
        assert (report.same, report.rows) == (True, 120)
    some = replay(path, sample=5, create_env_fn=Told)
    assert some.same


def test_a_call_that_is_left_out_shows(tmp_path: Path) -> None:
    for name in ("plain", "seeded"):
        path = run(tmp_path / name, **OPTIONS[name])
        file, manifest = as_before(path)
        del manifest["runs"][0]["events"][1]
        file.write_text(json.dumps(manifest))
        report = replay(path, "all", create_env_fn=Told)
        assert report.status == 1
        with open_storage(path) as storage:
            assert report.first_difference is not None
            assert report.first_difference.row >= 60 - 3
            assert report.equal >= int((storage.trajectories.table["last_row"] < 57).sum()) - 3


def test_what_cannot_be_called_again_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with SyncCollector(
        Told, num_envs=2, frames_per_batch=20, total_frames=60, seed=1, storage=path
    ) as collector:
        for number, _ in enumerate(collector):
            if number == 0:
                collector.env_call("raise_level", np.float32(2), lanes=[1])
    report = replay(path, "all", create_env_fn=Told)
    (why,) = report.not_replayed
    assert "env_call('raise_level')" in why
    assert "not JSON values" in why
    with open_storage(path) as storage:
        lanes = dict(zip(storage.trajectories.ids, storage.trajectories.lanes, strict=True))
        assert {lanes[id] for id in report.not_replayed[why]} == {1}
        assert report.differences == ()
        assert report.equal == len(lanes) - len(report.not_replayed[why])


def test_private_names_are_not_reached(tmp_path: Path) -> None:
    path = run(tmp_path / "a")
    file, manifest = as_before(path)
    for name in ("__init__", "_seen", "np_random.seed"):
        manifest["runs"][0]["events"][0] |= {"name": name, "call": "env_call", "args": []}
        file.write_text(json.dumps(manifest))
        report = replay(path, "all", create_env_fn=Told)
        (why,) = report.not_replayed
        assert name in why
        assert "only public names" in why
