"""Run the EnvPool example as a user does: it learns on exactly its budget."""

from __future__ import annotations

import re
from pathlib import Path

from examples_kit import numbers, run


def test_it_learns_on_exactly_its_budget(tmp_path: Path) -> None:
    out = run(
        "systems/envpool_ppo.py",
        tmp_path,
        total_frames=30_001,
        frames_per_batch=2048,
        num_envs=32,
        epochs=4,
        minibatch=512,
        lr=5e-3,
        eval_episodes=20,
    )
    batches = re.findall(r"^batch +(\d+)  frames +(\d+) .* return +([\d.]+)$", out, re.MULTILINE)
    assert len(batches) == 15
    assert batches[-1][:2] == ("1329", "30001")
    stored, slots, resets, beyond = numbers(
        r"(\d+) transitions, exactly: (\d+) slots - (\d+) reset slots - (\d+) beyond", out
    )
    assert stored == 30_001 == slots - resets - beyond
    assert resets > 100
    whole, _, episodes = numbers(r"evaluation: mean return (\d+)\.(\d) over (\d+) episodes", out)
    assert episodes == 20
    assert whole > 100  # random actions: 22
