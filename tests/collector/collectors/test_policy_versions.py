"""A run continues the version numbers of its policy, and no number names two sets of weights."""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchrl.data import ReplayBuffer

from tallyroll.collector.base import Collector
from tallyroll.collector.torchrl import Collector as NamedColumn
from tallyroll.storage import MemmapStorage, open_storage, verify

from worker_kit import (
    DISABLED,
    LANES,
    NEXT,
    Versioned,
    factory,
    in_threads,
    sync_collector,
    worker_collector,
)

KINDS = {
    "alone": partial(sync_collector, DISABLED),
    "reset slots": partial(sync_collector, NEXT),
    "sync": partial(worker_collector, DISABLED, 2, mode="sync"),
    "async": partial(worker_collector, DISABLED, 2, mode="async"),
}


def collect(make: Any, path: Any, frames: int, updates: int, **kwargs: Any) -> Collector:
    """Collect a run that updates its weights between batches."""
    given = {"frames_per_batch": 2 * LANES, "total_frames": frames, "storage": path, **kwargs}
    collector: Collector = make(Versioned().set_to(1), **given)
    with collector:
        for index, _ in enumerate(collector):
            if index < updates:
                collector.update_policy_weights_()
    return collector


def versions_of(path: Path) -> list[list[int]]:
    """Return the policy versions in the rows of each run of the manifest."""
    with open_storage(path) as storage:
        versions = storage.get(slice(None))["collector", "policy_version"].numpy()
        runs = storage.manifest["runs"]
        starts = [run["first_row"] for run in runs]
        for run, own in zip(runs, np.split(versions, starts[1:]), strict=True):
            known = own[own >= 0]
            assert not len(known) or run["policy_version"] <= known.min()
    return [np.unique(own).tolist() for own in np.split(versions, starts[1:])]


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_where_the_run_does(kind: str, tmp_path: Path) -> None:
    path, make = tmp_path / "rows", KINDS[kind]
    with in_threads():
        collect(make, path, 40, 2)
        collect(make, path, 80, 1, resume=True)
        collect(make, path, 120, 0, resume=True)
        first, second, third = versions_of(path)
        assert first[0] == 0
        assert second[0] == first[-1] + 1
        assert third[0] == second[-1] + 1
        if kind != "async":
            assert (first, second, third) == ([0, 1, 2], [3, 4], [5])
        with MemmapStorage(path, mode="append") as storage:
            collect(make, storage, 20, 1)
        assert versions_of(path)[-1][0] == 0  # a separate run
        collect(make, path, 40, 0, resume=True)
    *_, other, again = versions_of(path)
    assert again == [other[-1] + 1]
    assert verify(path).sound


@pytest.mark.parametrize("way", ["buffer", "named", "ring", "drawn", "killed"])
def test_it_goes_on_in_other_ways(way: str, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    more: dict[str, Any] = {"drawn": {"init_random_frames": 35}}.get(way, {})
    size = {"max_size": 20} if way == "ring" else {}
    with MemmapStorage(path, **size) as storage:
        collect(KINDS["alone"], storage, 40, 3, **more)
    with MemmapStorage(path, mode="append") as storage:
        given: dict[str, Any] = {"frames_per_batch": 2 * LANES, "total_frames": 80, "resume": True}
        given["storage"] = storage
        if way == "buffer":
            given["replay_buffer"] = ReplayBuffer(storage=given.pop("storage"), batch_size=4)
        make: Any = KINDS["alone"]
        if way == "named":
            make = partial(NamedColumn, factory(DISABLED, 0, LANES))
        with make(Versioned().set_to(1), **given) as collector:
            assert collector.policy_version == 4
            if way == "killed":  # once before the first row, and once more
                assert storage.manifest["runs"][-1]["policy_version"] == 4
            next(iter(collector))
        rows = storage.get(storage.index_of(np.arange(40, 40 + 2 * LANES)))
        assert set(rows["collector", "policy_version"].tolist()) == {4}
        assert storage.manifest["runs"][-1]["first_row"] == 40


@pytest.mark.parametrize("at_once", [False, True])
def test_a_state_that_goes_on_in_another_storage_says_its_version(
    at_once: bool, tmp_path: Path
) -> None:
    """The manifest's entry has the version, whether the storage was empty or not."""
    given: dict[str, Any] = {"frames_per_batch": 2 * LANES, "total_frames": 120}
    make = KINDS["alone"]
    with make(Versioned().set_to(1), storage=tmp_path / "first", **given) as collector:
        for _ in islice(collector, 3):
            collector.update_policy_weights_()
        state, version = collector.state_dict(), collector.policy_version
    assert version == 3
    with make(Versioned().set_to(1), storage=tmp_path / "other", **given) as collector:
        assert collector.policy_version == 0
        collector.load_state_dict(state)
        assert collector.policy_version == version
        if at_once:
            next(iter(collector))
        else:
            collector.collect(LANES)
    with open_storage(tmp_path / "other") as storage:
        assert storage.manifest["runs"][-1]["policy_version"] == version
        assert set(storage.get(slice(None))["collector", "policy_version"].tolist()) == {version}
