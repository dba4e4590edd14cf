"""Workers that store their rows: exactly N correct rows count, even if processes die."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tallyroll.collector import (
    ArgumentError,
    MultiprocessCollector,
    StateError,
    SyncCollector,
    WorkerDied,
)
from tallyroll.storage import (
    CorruptStorage,
    StorageExists,
    StorageLocked,
    open_storage,
    verify,
)
from tallyroll.storage.ext.sharded.files import ShardedFiles

from oracles import check_rows
from worker_faults_kit import (
    LENGTHS as LENGTHS_OF_FAULTY,
)
from worker_faults_kit import (
    Fault,
    Faults,
    Parent,
    adopt_orphans,
    check_episodes,
    check_ledger,
    check_lives,
    descendants,
    no_process_left,
    wait_until,
    warm_server,
)
from worker_faults_kit import factories as faulty
from worker_kit import (
    DISABLED,
    LENGTHS,
    NEXT,
    SAME,
    RecordingPolicy,
    Versioned,
    chosen_by,
    factories,
)

__all__ = ["no_process_left", "warm_server"]

KILLS = int(os.environ.get("TALLYROLL_SHARD_KILLS", "3"))
LANES = 6
assert LENGTHS_OF_FAULTY  # required by `check_lives`


def sharded(create: Any, path: Path, policy: Any = None, **options: Any) -> MultiprocessCollector:
    """Return a run whose workers store their rows."""
    given: dict[str, Any] = {"frames_per_batch": 40, "seed": 3, "transport": "process", **options}
    if given["transport"] == "process":
        given |= {"mp_start_method": "forkserver"}
    return MultiprocessCollector(create, policy, mode="async", sharded=True, storage=path, **given)


def rows_of(path: Path) -> Any:
    """Return all rows that count, and verify them."""
    with open_storage(path) as storage:
        rows = storage[:].clone()
    report = verify(path)
    assert report.sound, report
    return rows


def shards_of(path: Path) -> list[Path]:
    """Return the folders of shards with rows that count, in their order."""
    if not path.exists():
        return []
    files = ShardedFiles(path)
    return [files.place_of(each.name) for each in files.acknowledged().shards if each.rows]


# --- exact numbers of correct rows ----------------------------------------------------------------


@pytest.mark.parametrize("source", [NEXT, SAME, DISABLED, "torch"])
def test_exactly_so_many_rows_count_and_each_is_right(source: str, tmp_path: Path) -> None:
    path, counts = tmp_path / "rows", []
    create = factories(source, 3, LANES)
    options: dict[str, Any] = {"transport": "thread", "total_frames": 501}
    with sharded(create, path, RecordingPolicy(), **options) as collector:
        for n in (1, 17, 200, 1000):
            counts.append(collector.collect(n))
            collector.ledger.check()
        assert collector.collect(5) == 0
        ledger, episodes = collector.ledger, list(collector.episodes)
    assert counts == [1, 17, 200, 283]
    assert (ledger.stored, ledger.carried, ledger.lost) == (501, 0, 0)
    rows = rows_of(path)
    assert len(rows) == 501
    checked = check_rows(rows, LENGTHS, ends="mixed", from_start=True)
    assert set(checked.lane.tolist()) == set(range(LANES))
    assert ledger.episodes_complete == checked.ended.sum()
    check_episodes(episodes, rows)
    assert torch.equal(rows["told"], rows["observation"][..., :2].double() + 0.25)
    assert len(shards_of(path)) == 3


def leaning(td: Any) -> Any:
    """Push the cart in the direction of the pole."""
    return td.set("action", (td["observation"][..., 2] > 0).long())


def test_a_worker_with_all_lanes_stores_the_rows_of_one_process(tmp_path: Path) -> None:
    run: dict[str, Any] = {"num_envs": 4, "frames_per_batch": 64, "total_frames": 333, "seed": 5}
    with SyncCollector("CartPole-v1", leaning, storage=tmp_path / "one", **run) as one:
        one.collect(333)
    with sharded(
        "CartPole-v1", tmp_path / "rows", leaning, num_workers=1, transport="thread", **run
    ) as many:
        many.collect(333)
    assert many.ledger.counts() == one.ledger.counts()
    both = []
    for name in ("one", "rows"):
        with open_storage(tmp_path / name) as storage:
            rows = storage[:].clone()
        both.append(rows[torch.from_numpy(np.lexsort(_order_of(rows)))])
    assert (both[0] == both[1]).all()


def _order_of(rows: Any) -> list[Any]:
    return [rows["collector", key].numpy() for key in ("step", "traj_ids")]


def test_each_row_says_which_weights_chose_its_action(tmp_path: Path) -> None:
    policy, path = Versioned(50_000), tmp_path / "rows"
    with sharded(
        factories(SAME, 2, LANES), path, policy, total_frames=-1, frames_per_batch=20
    ) as collector:
        for _ in range(20):
            collector.collect(30)
            collector.update_policy_weights_(policy.set_to(collector.policy_version + 1))
    rows = rows_of(path)
    version = rows["collector", "policy_version"]
    assert torch.equal(rows["low"], version.float())
    assert torch.equal(rows["high"], version.float())
    assert torch.equal(rows["action"], chosen_by(rows, version))
    assert version.unique().numel() > 10
    with sharded(
        factories(SAME, 2, LANES), path, policy, total_frames=700, resume=True, seed=None
    ) as collector:
        assert collector.policy_version == int(version.max()) + 1


# --- kills ----------------------------------------------------------------------------------------


@pytest.mark.timeout(120 + 5 * KILLS)
def test_workers_that_are_killed(tmp_path: Path) -> None:
    path, dice, killed = tmp_path / "rows", random.Random(7), 0
    faults = Faults(tmp_path)
    with sharded(
        faulty(faults, LANES, 3, slow=0.001),
        path,
        total_frames=-1,
        frames_per_batch=30,
        on_worker_death="respawn",
        max_respawns=10_000,
    ) as collector:
        while (shards := len(shards_of(path))) < 3 + KILLS:
            if killed < KILLS and shards == 3 + killed:  # any worker that is killed has rows
                os.kill(dice.choice(collector.worker_pids), signal.SIGKILL)
                killed += 1
                time.sleep(dice.choice((0, 0.003, 0.01)))
            assert collector.collect(dice.choice((7, 50, 131))) > 0
            collector.ledger.check()
        ledger, episodes = collector.ledger, list(collector.episodes)
    rows = rows_of(path)
    assert len(rows) == ledger.stored
    lives = check_lives(rows, LANES)
    assert sum(lives) >= LANES + KILLS
    check_episodes(episodes, rows)
    assert ledger.executed <= faults.executed(LANES)
    seeds = faults.noted("seeds")
    assert len(set(seeds)) == len(seeds), "a seed was used twice"


def test_a_worker_that_may_not_be_replaced_ends_the_run(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    faults = Faults(tmp_path, [Fault("step", "kill", 0, 60)])
    with sharded(faulty(faults, LANES, 3), path, total_frames=5000) as collector:
        with pytest.raises(WorkerDied):
            collector.collect(5000)
        with pytest.raises(StateError, match="resume=True"):
            collector.collect(1)
    stored = collector.ledger.stored
    collector.ledger.check()
    assert len(rows_of(path)) == stored > 0
    with sharded(
        faulty(faults, LANES, 2), path, total_frames=stored + 300, resume=True, seed=None
    ) as collector:
        collector.collect(10_000)
    rows = rows_of(path)
    assert len(rows) == stored + 300
    check_lives(rows, LANES)


def collecting(folder: Path, path: Path) -> None:
    """Collect in a process that is killed."""
    with sharded(
        faulty(Faults(folder.parent), LANES, 3, slow=0.001), path, total_frames=3000
    ) as collector:
        while collector.collect(50):
            (folder / f"stored-{collector.ledger.stored}").touch()


def test_a_driver_that_is_killed_is_resumed(tmp_path: Path) -> None:
    adopt_orphans()
    path, before = tmp_path / "rows", descendants()
    parent = Parent(tmp_path / "parent", collecting, path)
    wait_until(lambda: len(list(parent.folder.glob("stored-*"))) > 5, 60, "rows")
    parent.kill()
    parent.wait()
    wait_until(lambda: not descendants().keys() - before.keys(), 10, "workers end")
    said = max(int(each.name.partition("-")[2]) for each in parent.folder.glob("stored-*"))
    kept = rows_of(path)
    assert said <= len(kept) < 3000
    check_lives(kept, LANES)
    with sharded(
        faulty(Faults(tmp_path), LANES, 2), path, total_frames=3000, resume=True, seed=None
    ) as collector:
        assert collector.ledger.stored == len(kept)
        collector.collect(10_000)
        assert collector.ledger.incarnation == 1
    rows = rows_of(path)
    assert len(rows) == 3000
    assert (rows[: len(kept)] == kept).all()
    check_lives(rows, LANES)
    with open_storage(path) as storage:
        assert [run["first_row"] for run in storage.runs] == [0, len(kept)]


@pytest.mark.parametrize("how", ["gone", "emptied", "older", "another"])
def test_a_lost_shard_is_collected_again(how: str, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    options: dict[str, Any] = {"transport": "thread", "frame_skip": 3}
    with sharded(factories(SAME, 3, LANES), path, total_frames=400, **options) as collector:
        collector.collect(100)
        shutil.copytree(path / "shards", tmp_path / "older")
        collector.collect(300)
    lost = shards_of(path)[1]
    with open_storage(lost) as shard:
        gone, ended = len(shard), int(shard[:]["next", "done"].sum())
    assert 0 < ended < collector.ledger.episodes_complete
    if how == "gone":
        shutil.rmtree(lost)
    elif how == "emptied":
        (lost / "manifest.json").unlink()
    elif how == "older":
        shutil.rmtree(lost)
        shutil.move(tmp_path / "older" / lost.name, lost)
    else:
        with sharded(
            factories(SAME, 3, LANES), tmp_path / "other", total_frames=900, **options
        ) as other:
            other.collect(900)
        shutil.rmtree(lost)
        shutil.move(shards_of(tmp_path / "other")[0], lost)
    with pytest.raises(CorruptStorage, match="resume the run"):
        open_storage(path, accept_copy=True)
    assert lost.name in str(verify(path, accept_copy=True).findings)
    options |= {"resume": True, "seed": None}
    with pytest.warns(UserWarning, match="1 shards are lost, and their rows are collected again"):
        collector = sharded(factories(SAME, 2, LANES), path, total_frames=400, **options)
    with collector:
        assert collector.ledger.stored == 400 - gone
        assert collector.ledger.lost == gone
        assert collector.ledger.ticks == 3 * (400 - gone)
        assert collector.collect(10_000) == gone
        collector.ledger.check()
    ledger = collector.ledger
    rows = rows_of(path)
    assert len(rows) == 400
    ids = rows["collector", "traj_ids"] * 1000 + rows["collector", "step"]
    assert ids.unique().numel() == 400
    assert ledger.episodes_complete == rows["next", "done"].sum()
    assert ledger.ticks == 1200
    with open_storage(path) as storage:
        assert [run["first_row"] for run in storage.runs] == [0, 400 - gone]


def test_a_run_that_is_stopped_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    faults = Faults(tmp_path)
    with sharded(faulty(faults, LANES, 3, slow=0.002), path, total_frames=100_000) as collector:

        def stop_when_some_are_stored() -> None:
            wait_until(lambda: collector.ledger.stored > 0)
            collector.stop()

        stopping = threading.Thread(target=stop_when_some_are_stored)
        stopping.start()
        stored = collector.collect(100_000)
        stopping.join()
        assert 0 < stored < 100_000
        assert collector.collect(5) == 0
        assert collector.last_rows is None
    assert collector.ledger.stored == stored
    check_ledger(collector.ledger, rows_of(path), faults, LANES)
    with sharded(
        faulty(faults, LANES, 3), path, total_frames=stored + 500, resume=True, seed=None
    ) as collector:
        assert collector.collect(10_000) == 500
    check_lives(rows_of(path), LANES)


def test_shards_that_a_worker_sees_on_its_node_are_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows"
    run: dict[str, Any] = {"transport": "thread", "frames_per_batch": 30}
    with sharded(factories(SAME, 2, LANES), path, total_frames=100, **run) as collector:
        collector.collect(100)

    def elsewhere(*_: object, **__: object) -> None:
        raise CorruptStorage("it is on another disk")

    monkeypatch.setattr(ShardedFiles, "open_shard", elsewhere)
    run |= {"resume": True, "seed": None}
    with sharded(factories(SAME, 3, LANES), path, total_frames=200, **run) as collector:
        assert collector.ledger.lost == 0
        assert collector.collect(1000) == 100
    monkeypatch.undo()
    assert len(rows_of(path)) == 200


# --- rows that count ------------------------------------------------------------------------------


def test_rows_that_no_line_names_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with sharded(
        factories(SAME, 1, LANES), path, total_frames=400, transport="thread"
    ) as collector:
        collector.collect(100)
        lines = (path / "acknowledged.lines").read_bytes().splitlines(keepends=True)
        collector.collect(300)
    with open_storage(path) as storage:
        assert len(storage) == 400
    # A driver leaves this if it is killed before or within a line.
    for torn in (b"", b"01234567 {"):
        (path / "acknowledged.lines").write_bytes(b"".join(lines) + torn)
        rows = rows_of(path)
        assert len(rows) == 100
        check_rows(rows, LENGTHS, ends="mixed", from_start=True)
    with sharded(
        factories(SAME, 2, LANES), path, total_frames=400, resume=True, seed=None
    ) as collector:
        assert collector.collect(1000) == 300
    rows = rows_of(path)
    assert len(rows) == 400
    ids = rows["collector", "traj_ids"] * 1000 + rows["collector", "step"]
    assert ids.unique().numel() == 400


def test_a_run_of_many_leases_keeps_its_file_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tallyroll.storage.ext.sharded.acknowledged_rows._WRITTEN_AGAIN", 500)
    path, most = tmp_path / "rows", 0
    options: dict[str, Any] = {"transport": "thread", "frames_per_batch": 6}
    with sharded(factories(SAME, 2, LANES), path, total_frames=300, **options) as collector:
        while collector.collect(12):
            most = max(most, (path / "acknowledged.lines").stat().st_size)
    assert most < 4000
    assert len(rows_of(path)) == 300


def test_a_reader_has_the_rows_that_counted_when_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with sharded(
        factories(SAME, 2, LANES), path, total_frames=400, transport="thread"
    ) as collector:
        collector.collect(100)
        with open_storage(path) as storage:
            before, pickled = storage[:].clone(), pickle.dumps(storage)
            collector.collect(300)
            assert (storage[:] == before).all()
            with pickle.loads(pickled) as again:
                assert (again[:] == before).all()
            check_rows(before, LENGTHS, ends="mixed", from_start=True)
    assert len(before) == 100


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "sync"}, 'mode="async"'),
        ({"storage": None}, "Pass a path as storage="),
        ({"init_random_frames": 5}, "init_random_frames"),
        ({"layout": "lanes"}, "no batch is yielded"),
        ({"total_frames": None, "total_episodes": 3}, "Give total_frames"),
        ({"shard": "0/2"}, "shard"),
        ({"postproc": len}, "postproc"),
    ],
)
def test_it_refuses_what_needs_rows_in_one_place(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    given = {"storage": tmp_path / "rows", "total_frames": 10, "mode": "async", **options}
    with pytest.raises(ArgumentError, match=said):
        MultiprocessCollector(
            "CartPole-v1",
            num_workers=2,
            num_envs=2,
            seed=0,
            frames_per_batch=5,
            sharded=True,
            transport="thread",
            **given,
        )
    assert not (tmp_path / "rows").exists()


def test_it_refuses_what_has_no_place_among_shards(tmp_path: Path) -> None:
    path, create = tmp_path / "rows", factories(SAME, 2, LANES)
    with sharded(create, path, total_frames=100, transport="thread") as collector:
        for refused in (
            lambda: next(iter(collector)),
            lambda: collector.env_get("lane"),
            lambda: collector.set_seed(3),
        ):
            with pytest.raises(ArgumentError, match="sharded=True"):
                refused()
        for state in (collector.state_dict, lambda: collector.load_state_dict({})):
            with pytest.raises(StateError, match="resume=True"):
                state()
        assert collector.collect(1000) == 100  # none of these ended the run
        with pytest.raises(StorageLocked):
            sharded(create, path, total_frames=200, transport="thread", resume=True)
    with pytest.raises(StorageExists, match="resume=True"):
        sharded(create, path, total_frames=100, transport="thread")
    with pytest.raises(ArgumentError, match="sharded storage"):
        MultiprocessCollector(
            create, None, mode="async", storage=path, total_frames=9, frames_per_batch=5
        )
    assert len(rows_of(path)) == 100


def test_no_link_in_it_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with sharded(factories(SAME, 1, LANES), path, total_frames=50, transport="thread") as collector:
        collector.collect(50)
    (shard,) = shards_of(path)
    shutil.move(shard, tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptStorage, match="link"):
        open_storage(path)


def test_a_damaged_line_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with sharded(factories(SAME, 1, LANES), path, total_frames=50, transport="thread") as collector:
        collector.collect(50)
    lines = path / "acknowledged.lines"
    good = lines.read_bytes()
    for at in (3, 12, len(good) // 2):
        lines.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(CorruptStorage, match="acknowledged"):
            open_storage(path)
