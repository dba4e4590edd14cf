"""An async worker loads new weights before its next action, however long its lease.

The environment waits in the middle of a lease until new weights are published, so that each row's
version is known in advance.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from collect_kit import joined
from oracles import OracleEnv, OracleTorchEnv, check_rows
from worker_kit import LENGTHS, Versioned, start

LANES = 3
SLOTS = 30
"""Slots of a lease, and of a batch of the only worker."""
PATIENCE = 60.0


def wait_for(path: Path) -> None:
    until = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < until, f"{path.name} did not come"
        time.sleep(0.002)


def pause(folder: Path, step: int) -> None:
    """Announce the step, and wait for permission."""
    (folder / f"reached {step}").touch()
    wait_for(folder / f"go {step}")


class Waiting(OracleEnv):
    """Oracle whose first lane waits in the steps `at`."""

    def __init__(self, *args: Any, folder: Path, at: tuple[int, ...], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.folder, self.at = folder, at

    def step(self, action: Any) -> Any:
        """Wait and step."""
        if self.lane == 0 and self.steps_taken in self.at:
            pause(self.folder, self.steps_taken)
        return super().step(action)


class WaitingTorch(OracleTorchEnv):
    """Oracle whose lanes all wait in the steps `at`."""

    def __init__(self, *args: Any, folder: Path, at: tuple[int, ...], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.folder, self.at = folder, at

    def _step(self, tensordict: Any) -> Any:
        if self.steps_taken[0] in self.at:
            pause(self.folder, self.steps_taken[0])
        return super()._step(tensordict)


def waiting(mode: str, **kwargs: Any) -> Any:
    if mode == "torch":
        return WaitingTorch(LANES, LENGTHS, ends="mixed", **kwargs)
    makes = [partial(Waiting, lane, LENGTHS, ends="mixed", **kwargs) for lane in range(LANES)]
    return SyncVectorEnv(makes, autoreset_mode=AutoresetMode(mode))


@pytest.mark.parametrize("mode", ["Disabled", "SameStep", "torch"])
def test_the_action_after_an_update_is_by_the_new_weights(mode: str, tmp_path: Path) -> None:
    """The second lease, slots 30 to 59, has begun when the first batch arrives."""
    policy, at = Versioned(), (37, 38, 52)
    create = partial(waiting, mode, folder=tmp_path, at=at)
    options = {"frames_per_batch": LANES * SLOTS, "total_frames": LANES * SLOTS * 2, "seed": 3}
    with start([create], policy, mode="async", **options) as collector:
        batches = iter(collector)
        found = [next(batches)]
        for version, step in enumerate(at, start=1):
            wait_for(tmp_path / f"reached {step}")
            collector.update_policy_weights_(policy.set_to(version))
            (tmp_path / f"go {step}").touch()
        found += list(batches)
    rows = joined(found)
    check_rows(rows, LENGTHS, ends="mixed", from_start=True)
    wanted = [sum(step < slot for step in at) for slot in range(2 * SLOTS)]
    for lane in range(LANES):
        own = rows[rows["collector", "lane"] == lane]
        assert own["collector", "policy_version"].tolist() == wanted
        for name in ("low", "high"):
            assert own[name].tolist() == wanted, "these are not the weights of that version"
