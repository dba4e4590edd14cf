"""The shards of a run equal the whole run: rows by id and step, ids, seeds and counts.

``TALLYROLL_SHARDS`` is the number of random runs, 12 by default.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_shards import (
    Sharded,
    Wanderer,
    assert_same_rows,
    chooses,
    draw,
    in_order,
    joined,
    next_step_vector,
    rows_of,
)

from tallyroll.collector import MultiprocessCollector, OnePolicy, Shard, SyncCollector
from tallyroll.storage import open_storage, verify
from tallyroll.storage.rows.keys import LANE, POLICY_VERSION, STEP, TRAJ_IDS

DRAWN = int(os.environ.get("TALLYROLL_SHARDS", "12"))


@pytest.mark.parametrize("number", range(DRAWN))
def test_a_drawn_run_in_shards_is_the_one_run(tmp_path: Path, number: int) -> None:
    draw(number).check(tmp_path)


def test_uneven_shards_of_a_thousand_rows_are_the_one_run(tmp_path: Path) -> None:
    Sharded("box", 13, 4, 1003, by_policy=False, batches=(64, 7, 200, 13)).check(tmp_path)


def test_random_openings_end_with_the_one_runs(tmp_path: Path) -> None:
    run = Sharded(
        "discrete", 7, 3, 90, by_policy=True, options={"init_random_frames": 24}, batches=(9,)
    )
    run.check(tmp_path)
    drawn = [rows_of(tmp_path / str(at))[POLICY_VERSION] == -1 for at in range(3)]
    assert [int(each.sum()) for each in drawn] == [8, 7, 9], "24 over 7 lanes: 4 4 4 3 3 3 3"


@pytest.mark.parametrize("kind", ["discrete", "masked"])
def test_workers_of_a_shard_act_at_random_as_the_one_run(tmp_path: Path, kind: str) -> None:
    """The parent draws the actions, or each worker does if there is a mask."""
    Sharded(kind, 6, 2, 100, by_policy=False, workers=2).check(tmp_path)


@pytest.mark.slow  # the threaded case above pickles its job in the same way as processes
def test_processes_step_the_lanes_of_a_shard(tmp_path: Path) -> None:
    options: dict[str, Any] = {"frames_per_batch": 30, "total_frames": 203, "seed": 2}
    for shard, kind, more in (
        (None, SyncCollector, {}),
        ("0/2", SyncCollector, {}),
        (Shard(index=1, of=2), MultiprocessCollector, {"num_workers": 2}),
    ):
        path = tmp_path / ("one" if shard is None else str(shard)[0])
        with kind("CartPole-v1", num_envs=5, storage=path, shard=shard, **options, **more) as made:
            assert sum(map(len, made)) == {"one": 203, "0": 82, "1": 121}[path.name]
    parts = [rows_of(tmp_path / name) for name in "01"]
    assert_same_rows(in_order(rows_of(tmp_path / "one")), joined(parts))


def test_with_reset_slots_each_lane_is_the_one_runs_as_far_as_both_go(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_envs": 6, "frames_per_batch": 20, "total_frames": 301}
    for name in ("one", "0/4", "1/4", "2/4", "3/4"):
        shard = None if name == "one" else name
        with SyncCollector(
            next_step_vector, seed=1, storage=tmp_path / name[0], shard=shard, **options
        ) as collector:
            assert collector.plan.counts.way == "by ends"
            for _ in collector:
                collector.ledger.check()
            assert collector.ledger.reset_slots > 0
    one = in_order(rows_of(tmp_path / "o"))
    shards = joined([rows_of(tmp_path / name) for name in "0123"])
    assert len(shards[TRAJ_IDS]) == 301
    assert (shards[TRAJ_IDS] % 6 == shards[LANE]).all()
    assert {*shards[LANE].tolist()} == set(range(6))
    places = [
        zip(rows[TRAJ_IDS].tolist(), rows[STEP].tolist(), strict=True) for rows in (one, shards)
    ]
    first, second = ({place: at for at, place in enumerate(each)} for each in places)
    assert len(second) == 301, "no id and step twice"
    both = sorted(first.keys() & second.keys())
    assert len(both) > 250
    wanted, got = ([of[place] for place in both] for of in (first, second))
    assert_same_rows(
        {key: column[wanted] for key, column in one.items()},
        {key: column[got] for key, column in shards.items()},
    )


@pytest.mark.parametrize("surplus", ["discard", "never_step"])
def test_other_kinds_of_surplus_are_exactly_as_many(tmp_path: Path, surplus: Any) -> None:
    for name in ("0/3", "1/3", "2/3"):
        with SyncCollector(
            Wanderer,
            num_envs=8,
            frames_per_batch=11,
            total_frames=200,
            seed=1,
            surplus=surplus,
            storage=tmp_path / name[0],
            shard=name,
        ) as collector:
            for _ in collector:
                collector.ledger.check()
    rows = joined([rows_of(tmp_path / name) for name in "012"])
    assert len(rows[TRAJ_IDS]) == 200
    assert (rows[TRAJ_IDS] % 8 == rows[LANE]).all()


def test_workers_that_do_not_wait_give_exactly_as_many(tmp_path: Path) -> None:
    for name in ("0/2", "1/2"):
        with MultiprocessCollector(
            Wanderer,
            chooses("discrete"),
            num_envs=7,
            num_workers=2,
            mode="async",
            transport="thread",
            init_random_frames=20,
            frames_per_batch=16,
            total_frames=250,
            seed=1,
            storage=tmp_path / name[0],
            shard=name,
        ) as collector:
            for _ in collector:
                collector.ledger.check()
    parts = [rows_of(tmp_path / name) for name in "01"]
    assert [len(part[LANE]) for part in parts] == [108, 142], "250 over 7 lanes: 36 each but one 35"
    assert [int((part[POLICY_VERSION] == -1).sum()) for part in parts] == [9, 11]
    rows = joined(parts)
    assert (rows[TRAJ_IDS] % 7 == rows[LANE]).all()
    assert len({*zip(rows[TRAJ_IDS].tolist(), rows[STEP].tolist(), strict=True)}) == 250


def test_a_storage_of_a_shard_is_sound_and_says_which_it_is(tmp_path: Path) -> None:
    entries = []
    for index in range(3):
        with SyncCollector(
            "CartPole-v1",
            num_envs=8,
            frames_per_batch=20 + index,
            total_frames=101,
            seed=4,
            storage=tmp_path / str(index),
            shard=f"{index}/3",
        ) as collector:
            assert collector.lanes == len(collector.shard.lanes)
            for _ in collector:
                pass
        assert not verify(tmp_path / str(index)).findings
        with open_storage(tmp_path / str(index)) as storage:
            (entry,) = storage.manifest["runs"]
        assert entry["lanes"] == len(entry["lane_seeds"]) == 8
        entries.append(entry)
    said = [entry["shard"] for entry in entries]
    name = said[0]["run"]
    assert said == [
        {"index": 0, "of": 3, "asked": 101, "lanes": [0, 2], "run": name},
        {"index": 1, "of": 3, "asked": 101, "lanes": [2, 5], "run": name},
        {"index": 2, "of": 3, "asked": 101, "lanes": [5, 8], "run": name},
    ]
    assert [entry["call"]["total_frames"] for entry in entries] == [26, 39, 36]
    assert entries[0]["lane_seeds"] == entries[1]["lane_seeds"] == entries[2]["lane_seeds"]
    assert np.array_equal(np.unique(rows_of(tmp_path / "1")[LANE]), [2, 3, 4])


@pytest.mark.parametrize(
    ("of", "workers"), [(2, 0), (3, 2), (7, 0)], ids=["two", "workers", "a lane each"]
)
def test_several_policies_by_lane(tmp_path: Path, of: int, workers: int) -> None:
    """A shard may have no lane of a policy. Random openings are spread over each policy's lanes."""
    run = Sharded(
        "discrete", 7, of, 120, by_policy=True, several=20, workers=workers, batches=(64, 9, 30)
    )
    run.check(tmp_path)
    mine = [rows_of(tmp_path / str(at)) for at in range(of)]
    drawn = [each[POLICY_VERSION][each[LANE] % 3 == 0] == -1 for each in mine]
    assert sum(int(each.sum()) for each in drawn) == 20


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_shard_of_several_policies_goes_on(tmp_path: Path, mode: str) -> None:
    opened = OnePolicy(chooses("discrete"), init_random_frames=20)
    total, parts = {  # large enough for a late worker to begin all its lanes
        "sync": (120, [35, 34, 51]),
        "async": (2800, [800, 800, 1200]),
    }[mode]
    options: dict[str, Any] = {"num_envs": 7, "total_frames": total, "frames_per_batch": 8}
    mine = []
    for at in range(3):
        for batches in (1, 1, total):
            with MultiprocessCollector(
                Wanderer,
                [(slice(0, None, 3), opened), ("rest", chooses("discrete"))],
                num_workers=2,
                transport="thread",
                mode=mode,
                seed=5,
                shard=f"{at}/3",
                storage=tmp_path / str(at),
                resume="auto",
                **options,
            ) as collector:
                for _ in zip(range(batches), collector, strict=False):
                    pass
        mine.append(rows_of(tmp_path / str(at)))
    drawn = [each[POLICY_VERSION] == -1 for each in mine]
    assert [len(each) for each in drawn] == parts
    assert [int(each.sum()) for each in drawn] == [7, 7, 6], "20 over the lanes 0, 3 and 6: 7 7 6"
    assert all((rows[LANE][each] % 3 == 0).all() for rows, each in zip(mine, drawn, strict=True))
