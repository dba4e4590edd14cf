"""Test MuJoCo Playground, whose interface equals the toy's in test_brax.py. It compiles slowly."""

from __future__ import annotations

import faulthandler
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torchrl.data import Bounded

from tallyroll.collector import SyncCollector
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.errors import ArgumentError, MissingExtra
from tallyroll.collector.ext.systems.playground import PlaygroundSystem

from functional_kit import compilations


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(1200)
def test_a_gravity_a_reset_and_no_compilation() -> None:
    faulthandler.cancel_dump_traceback_later()  # the mark sets its own deadline
    from mujoco_playground import registry

    env = registry.load("CartpoleBalance", config_overrides={"impl": "jax"})
    gravity = Bounded(-20.0, 0.0, (3,), dtype=torch.float32)
    system = PlaygroundSystem(env, 2, episode_length=9, context={"opt.gravity": gravity})
    downward: list[float] = []

    def draw(rng: np.random.Generator) -> dict[str, Any]:
        downward.append(-rng.uniform(5, 15))
        return {"opt.gravity": [0.0, 0.0, downward[-1]]}

    with SyncCollector(
        SystemEnv(system, draw=draw), None, frames_per_batch=40, total_frames=120, seed=1
    ) as collector:
        batches = iter(collector)
        rows = [next(batches).clone()]
        with compilations() as compiled:
            rows += [batch.clone() for batch in batches]
    assert compiled == []
    whole = torch.cat(rows)
    ends = int(whole["next", "truncated"].sum())
    assert ends >= 12
    assert int(whole["collector", "step"].max()) == 8
    assert len(set(downward)) == ends + 4


@pytest.mark.filterwarnings("ignore")
def test_misuse(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="cannot make 'NoSuch'"):
        SyncCollector("playground:NoSuch", None, frames_per_batch=4, total_frames=4)
    monkeypatch.setitem(sys.modules, "mujoco_playground", None)
    with pytest.raises(MissingExtra, match=r'pip install "tallyroll\[playground\]"'):
        PlaygroundSystem.make("CartpoleBalance", 1, None)
