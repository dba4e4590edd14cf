"""The number of an episode's last transition does not depend on how the run is collected."""

from __future__ import annotations

import csv
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tallyroll.collector import SyncCollector
from tallyroll.collector.base import Collector
from tallyroll.collector.counting.episode_log import EpisodeLog
from tallyroll.storage import MemmapStorage, fast_paths

from collect_kit import ByObservation
from worker_kit import DISABLED, LANES, NEXT, factory, in_threads, worker_collector

TOTAL = 91
RUN: dict[str, Any] = {"total_frames": TOTAL, "seed": 3}


def ends_of(collector: Collector) -> dict[int, int]:
    return {each.traj_id: each.ended_at for each in collector.episodes}


def one_by_one(source: str) -> dict[int, int]:
    """Collect a run one transition at a time, and note which transitions end an episode."""
    found: dict[int, int] = {}
    with (
        MemmapStorage(max_size=TOTAL) as storage,
        SyncCollector(
            factory(source, 0, LANES), ByObservation(), frames_per_batch=1, storage=storage, **RUN
        ) as collector,
    ):
        for _ in collector:
            row = storage.get(len(storage) - 1)
            if row["next", "done"].item():
                found[row["collector", "traj_ids"].item()] = len(storage)
    return found


@pytest.fixture(scope="module", params=[DISABLED, NEXT])
def source(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def wanted(source: str) -> dict[int, int]:
    found = one_by_one(source)
    assert len(found) > 20
    return found


@pytest.mark.parametrize("off", [(), ("kernel",)])
@pytest.mark.parametrize(
    ("per_batch", "call", "options"),
    [
        (7, 0, {}),
        (64, 0, {"layout": "trajectories"}),
        (LANES, LANES, {}),
        (20, 3, {}),
        (500, 33, {}),
    ],
)
def test_in_one_process(
    source: str,
    wanted: dict[int, int],
    off: tuple[str, ...],
    per_batch: int,
    call: int,
    options: dict[str, Any],
) -> None:
    with (
        fast_paths.switched_off(*off),
        MemmapStorage(max_size=TOTAL) as storage,
        SyncCollector(
            factory(source, 0, LANES),
            ByObservation(),
            frames_per_batch=per_batch,
            storage=storage,
            **RUN,
            **options,
        ) as collector,
    ):
        if call:
            while collector.collect(call):
                pass
        else:
            for _ in collector:
                pass
    assert ends_of(collector) == wanted


@pytest.mark.parametrize("workers", [1, 3])
def test_with_workers_in_step(source: str, wanted: dict[int, int], workers: int) -> None:
    with (
        in_threads(),
        worker_collector(
            source, workers, policy=ByObservation(), frames_per_batch=17, **RUN
        ) as run,
    ):
        for _ in run:
            pass
    assert ends_of(run) == wanted


def test_in_order_of_arrival() -> None:
    """Each end has a distinct number, and none exceeds the number of stored rows."""
    with (
        in_threads(),
        worker_collector(
            DISABLED, 3, policy=ByObservation(), frames_per_batch=17, mode="async", **RUN
        ) as run,
    ):
        for _ in run:
            assert max(ends_of(run).values(), default=0) <= run.ledger.stored
    ends = sorted(ends_of(run).values())
    assert all(one < other for one, other in pairwise(ends))
    assert len(ends) > 20


def test_a_resumed_run_counts_on(tmp_path: Path) -> None:
    def run(total: int, **more: Any) -> Collector:
        with SyncCollector(
            factory(NEXT, 0, LANES),
            ByObservation(),
            frames_per_batch=16,
            total_frames=total,
            storage=tmp_path / "rows",
            **more,
        ) as collector:
            for _ in collector:
                pass
        return collector

    first = ends_of(run(48, seed=3))
    later = ends_of(run(TOTAL, resume=True))
    with MemmapStorage(tmp_path / "rows", mode="append") as storage:
        ended = storage.column(("next", "done")).reshape(-1).nonzero()[0] + 1
    assert max(first.values()) <= 48 < min(later.values()) <= max(later.values()) <= TOTAL
    assert len(first) + len(later) == len(ended)


# --- tables ---------------------------------------------------------------------------------------


def test_a_table_of_the_episodes(tmp_path: Path) -> None:
    path = tmp_path / "episodes.csv"
    with SyncCollector(
        factory(NEXT, 0, LANES), ByObservation(), frames_per_batch=30, **RUN
    ) as collector:
        collector.episodes.to_csv(path)
        assert path.read_text().count("\n") == 1, "a line of names"
        for _ in collector:
            pass
    collector.episodes.to_csv(path)
    columns = collector.episodes.to_dict()
    assert [*columns["ended_at"]] == [each.ended_at for each in collector.episodes]
    with path.open(newline="") as file:
        found = [*csv.DictReader(file)]
    assert [
        (
            int(line["ended_at"]),
            int(line["traj_id"]),
            int(line["lane"]),
            float(line["total_return"]),
            int(line["length"]),
            line["end"],
            (int(line["first_version"]), int(line["last_version"])),
        )
        for line in found
    ] == [
        (e.ended_at, e.traj_id, e.lane, e.total_return, e.length, e.end, e.policy_versions)
        for e in collector.episodes
    ]
    assert {type(each) for column in columns.values() for each in column} == {int, float, str}


def test_a_table_that_cannot_be_written_leaves_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    log = EpisodeLog()
    with pytest.raises(IsADirectoryError):
        log.to_csv(tmp_path / "there")
    with pytest.raises(FileNotFoundError):
        log.to_csv(tmp_path / "missing" / "episodes.csv")
    assert [*tmp_path.iterdir()] == [tmp_path / "there"]
