"""Workers that do not wait for each other: exactly N rows, lanes in order, and bounded lead."""

from __future__ import annotations

import threading
import time
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDictBase

from tallyroll.collector import MultiprocessCollector

from collect_kit import ByObservation, joined
from oracles import KINDS, Rows, check_rows
from pairs import in_gate
from worker_kit import (
    DISABLED,
    LANES,
    LENGTHS,
    NEXT,
    SAME,
    SOURCES,
    RecordingPolicy,
    Run,
    SlowPolicy,
    as_stored,
    collect_all,
    factories,
    in_threads,
    kept_sums,
    lanes_of_workers,
    slow_factories,
    start,
    ticking,
    worker_collector,
)

__all__ = ["kept_sums"]

BUDGET: dict[str, Any] = {"mode": "async", "frames_per_batch": 17, "total_frames": 200, "seed": 3}


def assert_exact(run: Run, total: int, size: int = 17, **kwargs: Any) -> Rows:
    """Check batch sizes, and that every lane's stream is correct, complete and in order."""
    assert [len(batch) for batch in run.batches[:-1]] == [size] * (-(-total // size) - 1)
    rows = joined(run.batches)
    assert len(rows) == total
    checked = check_rows(rows, LENGTHS, **{"ends": "mixed", "from_start": True, **kwargs})
    ledger = run.collector.ledger
    assert (ledger.stored, ledger.carried, ledger.lost, ledger.respawned) == (total, 0, 0, 0)
    assert ledger.episodes_complete == checked.ended.sum() == len(run.episodes)
    assert ledger.ticks == total
    return checked


@pytest.mark.parametrize(
    ("source", "workers"),
    [
        *((name, 2 + turn % 2) for turn, name in enumerate(SOURCES) if name != "single"),
        (NEXT, 1),
        ("torch", 1),
    ],
)
def test_exactly_so_many_and_every_lane_whole(source: str, workers: int) -> None:
    run = collect_all(worker_collector(source, workers, RecordingPolicy(), **BUDGET))
    checked = assert_exact(run, 200)
    for batch in run.batches:
        assert (batch["collector", "lane"].diff() >= 0).all()
    assert set(checked.lane.tolist()) == set(range(LANES))
    ids = joined(run.batches)["collector", "traj_ids"]
    assert len(ids.unique()) == len(set(zip(checked.lane, checked.episode, strict=True)))
    ledger = run.collector.ledger
    assert (ledger.reset_slots > 0) == (source in (NEXT, "native"))
    assert ledger.discarded < LANES * 2 * workers


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"frames_per_batch": 1, "total_frames": 40}, 1),
        ({"frames_per_batch": 3, "total_frames": 40}, 3),
        ({"frames_per_batch": 500}, 500),
        ({"total_frames": 1}, 17),
        ({"max_frames_per_traj": 3}, 17),
    ],
)
def test_sizes_and_limits(options: dict[str, Any], size: int) -> None:
    run = collect_all(worker_collector(SAME, 3, **{**BUDGET, **options}))
    limit = options.get("max_frames_per_traj")
    assert_exact(run, options.get("total_frames", 200), size, time_limit=limit)


@pytest.mark.parametrize("source", [DISABLED, "serial", "single"])
def test_nothing_is_discarded_if_only_the_lanes_needed_are_stepped(source: str) -> None:
    workers, lanes = (3, 3) if source == "single" else (2, LANES)
    run = collect_all(
        worker_collector(source, workers, RecordingPolicy(), lanes, **BUDGET, surplus="never_step")
    )
    assert_exact(run, 200)
    ledger = run.collector.ledger
    assert (ledger.discarded, ledger.executed, ledger.slots) == (0, 200, 200)


@pytest.mark.parametrize("layout", ["lanes", "trajectories"])
def test_layouts(layout: Any) -> None:
    run = collect_all(worker_collector(SAME, 2, RecordingPolicy(), **BUDGET, layout=layout))
    assert run.collector.ledger.stored == 200
    for batch in run.batches:
        lane = batch["collector", "lane"]
        mask = batch["collector", "mask"].reshape(batch.batch_size)
        assert int(mask.sum()) <= 17
        for row, kept in zip(lane, mask, strict=True):
            assert len(row[kept].unique()) <= 1
    rows = as_stored(run.batches)
    cut = rows["collector", "cut"]
    rows["next", "done"] = rows["next", "done"] & ~cut.unsqueeze(-1)
    check_rows(rows.exclude(("collector", "cut")), LENGTHS, ends="mixed", from_start=True)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_observation(kind: Any) -> None:
    source = (NEXT, SAME, DISABLED, "torch")[KINDS.index(kind) % 4]
    # "discrete" can encode only few episodes
    lengths = [[3, 1, 4], [6, 5, 2], [5], [7, 7], [4, 9, 4]]
    oracle = {"kind": kind, "lengths": lengths}
    run = collect_all(worker_collector(source, 2, ByObservation(kind), **BUDGET, oracle=oracle))
    rows = joined(run.batches)
    assert len(rows) == 200
    check_rows(rows, lengths, kind=kind, ends="mixed", from_start=True)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_infos_and_their_ticks(mode: AutoresetMode) -> None:
    makes = [partial(ticking, first, own, mode) for first, own in lanes_of_workers(LANES, 2)]
    options = {"info_keys": ["lives"], "frame_skip": "tick"}
    run = collect_all(start(makes, ByObservation(), **BUDGET, **options))
    rows, ledger = joined(run.batches), run.collector.ledger
    check_rows(rows, LENGTHS, ends="mixed")
    assert torch.equal(rows["tick"], 3 + 4 * rows["collector", "step"])
    assert torch.equal(rows["next", "lives"], 3 - (rows["collector", "step"] + 1) % 3)
    assert ledger.ticks == 4 * 200
    assert ledger.reset_ticks == 3 * int((rows["collector", "step"] == 0).sum())


@pytest.mark.slow
def test_an_id_and_spawned_workers() -> None:
    run = collect_all(
        MultiprocessCollector(
            "CartPole-v1", num_workers=2, num_envs=5, threads_per_worker=1, **BUDGET
        )
    )
    rows = joined(run.batches)
    assert len(rows) == 200
    for lane in range(5):
        own = rows[rows["collector", "lane"] == lane]
        ended = own["next", "done"][:, 0]
        assert torch.equal(
            own["next", "observation"][:-1][~ended[:-1]], own["observation"][1:][~ended[:-1]]
        )
        assert own["observation"][0].abs().max() < 0.05


def test_ids_go_on_behind_an_earlier_run(tmp_path: Any) -> None:
    from tallyroll.storage import MemmapStorage

    ids = []
    for mode in ("create", "append"):
        with MemmapStorage(tmp_path / "s", mode=mode) as storage:  # type: ignore[arg-type]
            run = collect_all(worker_collector(SAME, 2, **BUDGET, storage=storage))
            ids.append(set(joined(run.batches)["collector", "traj_ids"].tolist()))
            assert storage.head == 200 * len(ids)
    assert not ids[0] & ids[1]


# --- waiting ------------------------------------------------------------------------------------


def test_a_fast_worker_gives_more_rows_than_a_slow_one() -> None:
    slow = {"seconds": 0.02, "slow": range(3)}  # the lanes of worker 0
    run = collect_all(start(slow_factories(2, **slow), **BUDGET))
    checked = assert_exact(run, 200)
    counts = checked.counts(LANES)
    assert sum(counts[3:]) > 3 * sum(counts[:3]) > 0


def test_in_step_a_slow_worker_gives_as_many_as_a_fast_one() -> None:
    slow = {"seconds": 0.005, "slow": range(3)}
    run = collect_all(start(slow_factories(2, **slow), **{**BUDGET, "mode": "sync"}))
    assert assert_exact(run, 200).counts(LANES) == [40] * LANES


def test_while_the_consumer_sleeps_workers_fill_two_leases_and_no_more() -> None:
    """Leases have 50 rows, 51 with the last step: more than one lease waits, and at most two."""
    options = {"frames_per_batch": 100, "total_frames": 1000, "info_keys": ["made_at"]}
    awoken, parts = 0.0, []
    with start(slow_factories(2, 6), **{**BUDGET, **options}) as collector:
        for batch in collector:
            parts.append(batch)
            if len(parts) == 3:
                time.sleep(0.7)
                awoken = time.time()
    rows = joined(parts[3:])
    assert len(rows) == 700
    ahead = rows["collector", "lane"][rows["next", "made_at"].flatten() < awoken]
    for worker in range(2):
        own = int((ahead // 3 == worker).sum())
        assert 51 < own <= 2 * 51, f"worker {worker} was {own} rows ahead"


def test_held_rows_are_bounded_by_two_leases_a_worker() -> None:
    with worker_collector(SAME, 3, **{**BUDGET, "frames_per_batch": 60}) as collector:
        for _ in collector:
            time.sleep(0.02)
            counts = collector.ledger.counts()
            ahead = counts["executed"] - counts["stored"] - counts["discarded"]
            assert 0 <= ahead == counts["carried"] <= 3 * 2 * (20 + LANES)


def test_a_consumer_that_takes_some_comes_back_and_leaves() -> None:
    batches = []
    with worker_collector(
        NEXT, 2, RecordingPolicy(), **{**BUDGET, "total_frames": 1000}
    ) as collector:
        for stop in (2, 5, 7):
            for batch in collector:
                batches.append(batch)
                if len(batches) == stop:
                    break
            collector.ledger.check()
    checked = check_rows(joined(batches), LENGTHS, ends="mixed", from_start=True)
    ledger = collector.ledger
    ledger.check()
    assert (ledger.stored, ledger.carried) == (7 * 17, 0)
    assert ledger.episodes_complete == checked.ended.sum()
    assert list(collector) == []


# --- ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("source", [NEXT, "torch"])
def test_without_a_total_it_runs_until_stopped(source: str, mode: str) -> None:
    batches = []
    options = {**BUDGET, "mode": mode, "total_frames": -1}
    with worker_collector(source, 2, RecordingPolicy(), **options) as collector:
        with pytest.raises(TypeError, match="without total_frames has no length"):
            len(collector)
        for batch in collector:
            batches.append(batch)
            if len(batches) == 9:
                collector.stop()
    rows = joined(batches)
    check_rows(rows, LENGTHS, ends="mixed", from_start=True)
    ledger = collector.ledger
    ledger.check()
    assert (ledger.stored, ledger.carried) == (len(rows), 0)
    assert [len(batch) for batch in batches[:9]] == [17] * 9
    # Rows that were made before the stop are delivered.
    assert ledger.discarded == 0
    assert list(collector) == []


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_stopped_from_another_thread_it_ends_after_the_step_under_way(mode: str) -> None:
    """The run ends in mid-batch. In sync mode, only slots that all workers filled are complete."""
    options = {**BUDGET, "mode": mode, "total_frames": -1, "frames_per_batch": 1000}
    batches, stopped = [], [0.0]

    def stop() -> None:
        stopped[0] = time.monotonic()
        collector.stop()

    with start(slow_factories(2, seconds=0.002), **options) as collector:
        timer = threading.Timer(0.5, stop)
        timer.start()
        for batch in collector:
            batches.append(batch)
        took = time.monotonic() - stopped[0]
        timer.join()
    assert took < 10.0  # it would never end without the stop
    rows = joined(batches)
    assert 0 < len(rows) < 1000
    check_rows(rows, LENGTHS, ends="mixed", from_start=True)
    ledger = collector.ledger
    ledger.check()
    assert (ledger.stored, ledger.carried) == (len(rows), 0)
    if mode == "sync":
        assert len(set(rows["collector", "lane"].bincount().tolist())) == 1
    else:
        assert ledger.discarded == 0


def test_a_seed_set_in_between_begins_anew() -> None:
    batches: list[TensorDictBase] = []
    options = {**BUDGET, "total_frames": 170, "oracle": {"kind": "seeded"}}
    with worker_collector(SAME, 2, RecordingPolicy("seeded"), **options) as collector:
        for batch in collector:
            batches.append(batch)
            if len(batches) in (2, 3, 7):
                collector.set_seed(100 + len(batches))
            collector.ledger.check()
    assert [len(batch) for batch in batches] == [17] * 10
    rows = joined(batches)
    check_rows(rows, LENGTHS, kind="seeded", ends="mixed", contiguous=False)
    parts = [batches[:2], batches[2:3], batches[3:7], batches[7:]]
    for part in parts:
        check_rows(joined(part), LENGTHS, kind="seeded", ends="mixed")
    for before, after in pairwise(parts):
        ids = [set(joined(each)["collector", "traj_ids"].tolist()) for each in (before, after)]
        assert not ids[0] & ids[1]
    noise = rows["observation"][:, 3].numpy()
    assert len(np.unique(noise)) == len(noise)
    assert collector.ledger.seed == 107


def test_the_same_seed_gives_every_lane_the_same_stream() -> None:
    """The order of rows depends on the workers, but the stream of a lane does not."""
    options = {**BUDGET, "oracle": {"kind": "seeded"}}
    runs = [
        collect_all(worker_collector(SAME, 2, RecordingPolicy("seeded"), **options))
        for _ in range(2)
    ]
    one, other = (joined(run.batches) for run in runs)
    for lane in range(LANES):
        mine, theirs = (
            rows["observation"][rows["collector", "lane"] == lane] for rows in (one, other)
        )
        both = min(len(mine), len(theirs))
        assert both > 5
        assert torch.equal(mine[:both], theirs[:both])


@pytest.mark.parametrize("frames", [1, 17, 50, 199, 200, 1000])
def test_exactly_so_many_random_frames(frames: int) -> None:
    run = collect_all(
        worker_collector(SAME, 2, RecordingPolicy(), **BUDGET, init_random_frames=frames)
    )
    assert_exact(run, 200)
    rows = joined(run.batches)
    random = rows["collector", "policy_version"] == -1
    assert int(random.sum()) == run.collector.ledger.random == min(frames, 200)
    told = rows["told"]
    assert told[random].eq(0).all()
    wanted = rows["observation"][:, :2].double() + 0.25
    assert torch.equal(told[~random], wanted[~random])
    # Only at the start, except for a few that earlier leases did not use.
    assert int(random.nonzero().max()) < frames + 4 * (9 + 3)


@pytest.mark.parametrize("first", in_gate([1, 2]))
def test_all_batches_are_there_to_the_very_last_row(first: int) -> None:
    """Many short runs would reveal races at the end."""
    with in_threads():
        for total in range(first, 40, 2):
            options = {"frames_per_batch": 4, "total_frames": total, "seed": total}
            run = collect_all(
                start(factories(DISABLED, 3, 4), SlowPolicy(), mode="async", **options)
            )
            assert sum(map(len, run.batches)) == total == run.collector.ledger.stored
