"""Random runs with random calls between batches: each row has the level that was set.

``TALLYROLL_CALLS=3000 pytest -n0 tests/collector/reaching/test_random_calls.py`` makes 3000 runs.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import level_kit
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from level_kit import Levels, require_recorded

from tallyroll.collector import MultiprocessCollector, SyncCollector
from tallyroll.storage import MemmapStorage

COUNT = int(os.environ.get("TALLYROLL_CALLS", "8"))


def vector(lanes: int, mode: AutoresetMode) -> Any:
    return SyncVectorEnv([Levels] * lanes, autoreset_mode=mode)


def drawn(rng: np.random.Generator, storage: Any) -> Any:
    """Draw a run."""
    lanes = int(rng.integers(1, 7))
    options: dict[str, Any] = {
        "frames_per_batch": int(rng.integers(1, 25)),
        "total_frames": -1,
        "seed": int(rng.integers(100)),
        "storage": storage,
    }
    mode = rng.choice([*AutoresetMode])
    if rng.random() < 0.5:
        options["surplus"] = str(rng.choice(["carry", "discard"]))
    if rng.random() < 0.3:
        options["reset_at_each_iter"] = True
    if rng.random() < 0.5:
        return SyncCollector(partial(vector, lanes, mode), **options)
    makers = [partial(vector, int(rng.integers(1, 4)), mode) for _ in range(rng.integers(1, 4))]
    options["mode"] = str(rng.choice(["sync", "async"]))
    options |= {"transport": "thread", "on_worker_death": "respawn", "max_respawns": 99}
    if options["mode"] == "async":
        options.pop("reset_at_each_iter", None)
        options.pop("surplus", None)
    return MultiprocessCollector(makers, **options)


@contextmanager
def burning(steps: int) -> Iterator[None]:
    """Make a step raise after ``steps`` steps."""
    level_kit.fuse[0] = steps
    try:
        yield
    finally:
        level_kit.fuse[0] = 0


def act(run: Any, rng: np.random.Generator, number: int) -> None:
    """Collect, or call environments of some lanes."""
    lanes: Any = None
    if rng.random() < 0.6:
        lanes = rng.permutation(run.lanes)[: rng.integers(1, run.lanes + 1)].tolist()
    count = run.lanes if lanes is None else len(lanes)
    match rng.integers(8):
        case 0:
            run.env_set("level", float(number), lanes=lanes)
        case 1:
            run.env_set("level", [float(number + each) for each in range(count)], lanes=lanes)
        case 2:
            run.env_call("raise_level", by=0.5, lanes=lanes)
        case 3 if number % 4 == 0:
            run.set_seed(number)
        case 4 if isinstance(run, MultiprocessCollector):
            with burning(int(rng.integers(1, 30))):
                next(iter(run))
        case 5 | 6:
            run.collect(int(rng.integers(1, 40)))
        case _:
            next(iter(run))


@pytest.mark.parametrize("seed", range(COUNT))
def test_each_row_has_the_level_that_was_set(seed: int) -> None:
    rng = np.random.default_rng([38, seed])
    with warnings.catch_warnings(), MemmapStorage() as storage:
        warnings.simplefilter("ignore")
        with drawn(rng, storage) as run:
            for number in range(15):
                act(run, rng, number)
            run.collect(20)
            assert len(run.env_get("level")) == run.lanes
            assert storage.runs[0].get("events", []) == [
                {**event, "row": event["at"]} for event in run.events
            ]
            require_recorded(storage[:], run.events)
