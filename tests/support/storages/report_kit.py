"""Runs for the tests of reports: two CartPole policies, three seeds each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase

from tallyroll.collector import RunLog, SyncCollector

FRAMES, EVERY = 400, 100

Rows = list[dict[str, Any]]


def left(td: TensorDictBase) -> TensorDictBase:
    """Push to the left."""
    return td.set("action", torch.zeros(td.batch_size, dtype=torch.int64))


POLICIES: Mapping[str, Any] = {"left": left, "random": None}
SEEDS = (0, 1, 2)


def collected(path: Path, policy: str, seed: int, **more: Any) -> tuple[Rows, Any, Any]:
    """Collect a run. Return the rows of its log, its episodes and its ledger."""
    rows: Rows = []
    options = {"frames_per_batch": 50, "total_frames": FRAMES, "num_envs": 3, **more}
    with (
        SyncCollector("CartPole-v1", POLICIES[policy], storage=path, seed=seed, **options) as run,
        RunLog(run, rows.append, every=EVERY) as log,
    ):
        for _ in run:
            log.update()
    return rows, run.episodes.to_dict(), run.ledger


def poisoned(path: Path, run: Mapping[str, Any]) -> None:
    """Overwrite entries of the last run in the manifest of a storage."""
    file = path / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest.pop("crc32", None)
    manifest["runs"][-1] |= run
    file.write_text(json.dumps(manifest))
