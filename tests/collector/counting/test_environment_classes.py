"""A resumed run warns if the classes of its environment differ."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from tallyroll.collector import MultiprocessCollector, SyncCollector
from tallyroll.collector.batches.stored.resume import differ
from tallyroll.storage import open_storage


class First(gymnasium.Env[Any, Any]):
    """Environment whose episodes have five steps and whose rewards are 1."""

    observation_space = spaces.Box(-1, 9, (1,), np.float32)
    action_space = spaces.Discrete(2)
    reward = 1.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.at += 1
        return np.full(1, self.at, np.float32), self.reward, self.at == 5, False, {}


class Second(First):
    """Environment with the same spaces and other rewards."""

    reward = 100.0


class Shifted(gymnasium.RewardWrapper[Any, Any]):
    """Wrapper that adds to each reward."""

    def reward(self, reward: Any) -> Any:
        return reward + 1


def make_first() -> First:
    return First()


def make_second() -> Second:
    return Second()


def run(path: Path, env: Any, frames: int, kind: Any = SyncCollector, **more: Any) -> list[str]:
    """Collect until the run has ``frames`` rows, and return the messages of warnings."""
    resume: Any = "auto"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with kind(
            env, frames_per_batch=8, total_frames=frames, storage=path, resume=resume, **more
        ) as made:
            if more.get("sharded"):
                made.collect(frames - made.ledger.stored)
            else:
                list(made)
    assert len(open_storage(path)) == frames
    return [str(each.message) for each in caught]


def sync_vector(kind: Callable[[], Any]) -> SyncVectorEnv:
    return SyncVectorEnv([kind, kind], autoreset_mode=gymnasium.vector.AutoresetMode.DISABLED)


def async_vector(kind: Callable[[], Any]) -> AsyncVectorEnv:
    mode = gymnasium.vector.AutoresetMode.DISABLED
    return AsyncVectorEnv([kind, kind], autoreset_mode=mode, context="fork")


TWO: dict[str, Any] = {"num_envs": 2}
THREADS = {**TWO, "kind": MultiprocessCollector, "num_workers": 2, "transport": "thread"}
PROCESSES = {**THREADS, "transport": "process"}
ASYNC = {**THREADS, "mode": "async"}


@pytest.mark.parametrize(
    ("before", "after", "more"),
    [
        (First, Second, TWO),
        (lambda: First(), lambda: Second(), TWO),
        (First, lambda: Shifted(First()), TWO),
        (lambda: sync_vector(First), lambda: sync_vector(Second), {}),
        (lambda: async_vector(First), lambda: async_vector(Second), {}),
        (lambda: async_vector(make_first), lambda: async_vector(make_second), {}),
        (First, Second, THREADS),
        (First, Second, PROCESSES),
        (First, Second, ASYNC),
        ([First, First], [First, Second], {**THREADS, "num_envs": None}),
        (First, Second, {**ASYNC, "sharded": True}),
    ],
    ids=[
        "class",
        "lambdas",
        "wrapper",
        "vectors",
        "async vectors",
        "async vectors of functions",
        "threads",
        "processes",
        "async",
        "one of several factories",
        "sharded",
    ],
)
def test_other_classes_warn_once(tmp_path: Path, before: Any, after: Any, more: Any) -> None:
    if isinstance(before, list):
        before, after = (
            [partial(sync_vector, each) for each in group] for group in (before, after)
        )
    path = tmp_path / "rows"
    assert run(path, before, 16, **more) == []
    (entry,) = open_storage(path).runs
    assert entry["made"]["environment"]
    (said,) = run(path, after, 32, **more)
    assert "run to be continued was made by an environment of " in said
    now = open_storage(path).runs[-1]["made"]["environment"]
    assert ", ".join(entry["made"]["environment"]) in said
    assert ", ".join(now) in said
    assert run(path, after, 40, **more) == [], "the last entry is of that environment"


def second_in_lambdas() -> AsyncVectorEnv:
    return async_vector(lambda: Second())


@pytest.mark.parametrize(
    ("before", "after", "more"),
    [
        (First, make_first, TWO),
        (First, lambda: gymnasium.wrappers.RecordEpisodeStatistics(First()), TWO),
        (lambda: async_vector(lambda: First()), lambda: async_vector(lambda: Second()), {}),
        (lambda: async_vector(lambda: First()), second_in_lambdas, {}),
        ("CartPole-v1", "CartPole-v1", TWO),
    ],
    ids=["same class", "wrapper of Gymnasium", "lambdas", "lambdas before", "id"],
)
def test_no_warning_where_classes_are_equal_or_unknown(
    tmp_path: Path, before: Any, after: Any, more: Any
) -> None:
    assert run(tmp_path / "rows", before, 16, **more) == []
    assert run(tmp_path / "rows", after, 32, **more) == []


def test_runs_of_earlier_versions_go_on_silently(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    run(path, First, 16, num_envs=2)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["crc32"]
    assert manifest["runs"][0]["environment"] == {"id": None, "type": "SyncVectorEnv"}
    module = First.__module__
    assert manifest["runs"][0]["made"].pop("environment") == [f"{module}:First"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert run(path, Second, 32, num_envs=2) == []


@pytest.mark.parametrize("damage", ["x", 3, {"a": 1}, [1, None]])
def test_damaged_names_are_unknown(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "rows"
    run(path, First, 16, num_envs=2)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["crc32"]
    manifest["runs"][0]["made"]["environment"] = damage
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert run(path, Second, 32, num_envs=2) == []


def test_names_of_the_main_module_are_compared_without_it() -> None:
    assert not differ(["__main__:Env"], ["mine:Env"])
    assert differ(["__main__:Env"], ["mine:Other"])
    assert differ(["one:Env"], ["two:Env"])
    assert not differ([], ["two:Env"])
