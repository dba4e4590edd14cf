"""Storages, replay buffers, postproc and devices get the yielded rows in both modes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from torchrl.data import LazyTensorStorage, RandomSampler, ReplayBuffer, TensorDictReplayBuffer
from torchrl.objectives.value import GAE

from tallyroll.collector import MultiprocessCollector
from tallyroll.collector.batches.checks.value_checks import OutOfRangeWarning
from tallyroll.collector.errors import ArgumentError, StateError, TransitionError
from tallyroll.storage import MemmapStorage, TrajectorySliceSampler, open_storage, verify
from tallyroll.storage.storages import H5Storage, ZarrStorage

from collect_kit import ByObservation, assert_same, joined
from estimators_kit import GAMMA, LAMBDA, plain_gae, value_net
from oracles import check_rows
from worker_kit import (
    DISABLED,
    LANES,
    LENGTHS,
    NEXT,
    SAME,
    RecordingPolicy,
    collect_all,
    factories,
    faulty_vec,
    lanes_of_workers,
    start,
    sync_collector,
    worker_collector,
)

BUDGET: dict[str, Any] = {"frames_per_batch": 17, "total_frames": 120, "seed": 3}
ENDLESS = {**BUDGET, "total_frames": -1}
"""Endless, because worker 0 may make 120 rows before the wrong row of worker 1."""
both_modes = pytest.mark.parametrize("mode", ["sync", "async"])


@both_modes
@pytest.mark.parametrize(
    ("name", "kind"), [("s", MemmapStorage), ("s.h5", H5Storage), ("s.zarr", ZarrStorage)]
)
def test_every_format_holds_what_was_yielded(
    name: str, kind: Any, mode: str, tmp_path: Path
) -> None:
    run = collect_all(
        worker_collector(NEXT, 2, RecordingPolicy(), **BUDGET, mode=mode, storage=tmp_path / name)
    )
    with open_storage(tmp_path / name) as storage:
        assert isinstance(storage, kind)
        rows = storage.get(slice(None)).clone()
        (made,) = storage.manifest["runs"]
    assert_same(rows, joined(run.batches))
    check_rows(rows, LENGTHS, ends="mixed", from_start=True)
    assert verify(tmp_path / name).sound
    assert (made["call"]["num_workers"], made["call"]["mode"], made["lanes"]) == (2, mode, LANES)
    assert made["environment"]["type"] == "SyncVectorEnv"


def test_the_stored_environment_is_that_of_one_process(tmp_path: Path) -> None:
    made = []
    for name, make in (
        ("one", sync_collector),
        ("many", lambda *a, **k: worker_collector(*a[:1], 2, *a[1:], **k)),
    ):
        collect_all(make(SAME, RecordingPolicy(), **BUDGET, storage=tmp_path / name))
        with open_storage(tmp_path / name) as storage:
            made.append(storage.manifest["runs"][0])
            record = storage.record
        assert record is not None
    assert made[0]["environment"] == made[1]["environment"]
    assert made[0]["versions"] == made[1]["versions"]
    assert {**made[0]["call"], "num_workers": 2, "mode": "sync"} == made[1]["call"]


@both_modes
def test_a_ring_holds_the_last_rows(mode: str, tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "s", max_size=50) as storage:
        run = collect_all(
            worker_collector(SAME, 2, RecordingPolicy(), **BUDGET, mode=mode, storage=storage)
        )
        slots = storage.slots_of(np.array(storage.span))
        rows = storage.get(torch.from_numpy(slots))
        assert storage.span == range(70, 120)
        assert_same(rows, joined(run.batches)[-50:])
    check_rows(rows, LENGTHS, ends="mixed", contiguous=mode == "sync")


@both_modes
def test_a_batch_is_stored_before_it_is_yielded(mode: str, tmp_path: Path) -> None:
    with worker_collector(
        SAME, 2, RecordingPolicy(), **BUDGET, mode=mode, storage=tmp_path / "s"
    ) as collector:
        for batch in collector:
            with open_storage(tmp_path / "s") as storage:
                rows = storage.get(slice(None)).clone()
            assert len(rows) == collector.ledger.stored
            assert torch.equal(rows["observation"][-len(batch) :], batch["observation"])


@both_modes
def test_a_consumer_that_raises_leaves_what_it_got(mode: str, tmp_path: Path) -> None:
    got: list[TensorDictBase] = []

    def consume() -> None:
        with worker_collector(
            SAME, 2, RecordingPolicy(), **BUDGET, mode=mode, storage=tmp_path / "s"
        ) as collector:
            for batch in collector:
                got.append(batch)
                if len(got) == 3:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        consume()
    with open_storage(tmp_path / "s") as storage:
        assert_same(storage.get(slice(None)), joined(got))
    assert verify(tmp_path / "s").sound


@both_modes
def test_a_replay_buffer_and_our_storage_under_one(mode: str, tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(200), batch_size=8)
    run = collect_all(
        worker_collector(NEXT, 2, RecordingPolicy(), **BUDGET, mode=mode, replay_buffer=buffer)
    )
    assert_same(buffer[:], joined(run.batches))
    with MemmapStorage(tmp_path / "s") as storage:
        ours = TensorDictReplayBuffer(storage=storage, sampler=RandomSampler(), batch_size=16)
        run = collect_all(
            worker_collector(NEXT, 2, RecordingPolicy(), **BUDGET, mode=mode, replay_buffer=ours)
        )
        rows = joined(run.batches)
        assert_same(storage.get(slice(None)), rows)
        sample = ours.sample()
        assert_same(sample.exclude("index"), rows[sample["index"]])


@both_modes
def test_postproc_changes_what_is_yielded_and_stored(mode: str, tmp_path: Path) -> None:
    """The postproc need not be picklable, because this process calls it."""
    seen: list[int] = []

    def doubled(rows: TensorDictBase) -> TensorDictBase:
        seen.append(len(rows))
        return rows.set("twice", rows["next", "reward"] * 2).exclude("observation")

    run = collect_all(
        worker_collector(SAME, 2, **BUDGET, mode=mode, postproc=doubled, storage=tmp_path / "s")
    )
    rows = joined(run.batches)
    assert seen == [17] * 7 + [1]
    assert torch.equal(rows["twice"], rows["next", "reward"] * 2)
    assert "observation" not in rows.keys()
    with open_storage(tmp_path / "s") as storage:
        assert_same(storage.get(slice(None)), rows)


@both_modes
def test_a_postproc_that_loses_rows_is_refused(mode: str) -> None:
    with (
        worker_collector(
            SAME, 2, **BUDGET, mode=mode, postproc=lambda rows: rows[:-1]
        ) as collector,
        pytest.raises(ArgumentError, match=r"postproc: expected a result of batch size \[17\]"),
    ):
        list(collector)
    collector.ledger.check()
    assert (collector.ledger.stored, collector.ledger.carried) == (0, 0)


@both_modes
def test_batches_lie_on_the_storing_device(mode: str) -> None:
    options = {"storing_device": "cpu", "policy_device": "cpu"}
    run = collect_all(worker_collector(SAME, 2, ByObservation(), **BUDGET, **options, mode=mode))
    assert all(batch.device == torch.device("cpu") for batch in run.batches)
    check_rows(joined(run.batches), LENGTHS, ends="mixed", from_start=True)


@both_modes
def test_a_yielded_batch_stays_as_it_was(mode: str) -> None:
    """Batches are not views of memory that workers fill again."""
    kept, copies = [], []
    with worker_collector(DISABLED, 2, RecordingPolicy(), **BUDGET, mode=mode) as collector:
        for batch in collector:
            kept.append(batch)
            copies.append(batch.clone())
    for batch, copy in zip(kept, copies, strict=True):
        assert_same(batch, copy)


# --- values computed from batches ---------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("source", [NEXT, "torch"])
def test_a_batch_ends_where_it_says_and_estimators_stop_there(source: str, mode: str) -> None:
    gae = GAE(gamma=GAMMA, lmbda=LAMBDA, value_network=value_net())
    run = collect_all(worker_collector(source, 2, ByObservation(), **BUDGET, mode=mode))
    for batch in run.batches:
        lane, cut = batch["collector", "lane"], batch["collector", "cut"]
        last = torch.ones(len(batch), dtype=torch.bool)
        last[:-1] = lane[1:] != lane[:-1]
        ended = (batch["next", "terminated"] | batch["next", "truncated"]).view(-1)
        assert torch.equal(cut, last & ~ended)
        assert torch.equal(batch["next", "done"].view(-1), ended | cut)
        wanted = plain_gae(batch).tolist()
        got = gae(batch)["advantage"].view(-1).tolist()
        assert got == pytest.approx(wanted, rel=1e-4, abs=1e-3)


@both_modes
def test_stored_trajectories_and_slices_are_those_of_the_lanes(mode: str, tmp_path: Path) -> None:
    """A storage mixes the rows of lanes, in async mode in any order."""
    with MemmapStorage(tmp_path / "s") as storage:
        run = collect_all(
            worker_collector(NEXT, 3, RecordingPolicy(), **BUDGET, mode=mode, storage=storage)
        )
        found = storage.trajectories
        assert {each.traj_id: each.length for each in run.episodes} == {
            id: len(found.rows_of(id)) for id in {each.traj_id for each in run.episodes}
        }
        rows = storage.get(slice(None)).clone()
        for id in rows["collector", "traj_ids"].unique().tolist():
            own = rows[torch.from_numpy(np.asarray(found.rows_of(id)))]
            assert own["collector", "step"].tolist() == list(range(len(own)))
            assert own["collector", "lane"].unique().numel() == 1
        buffer = TensorDictReplayBuffer(
            storage=storage, sampler=TrajectorySliceSampler(3), batch_size=60
        )
        slices = buffer.sample().exclude("index").reshape(20, 3)
        for piece in slices:
            check_rows(piece, LENGTHS, ends="mixed")


@both_modes
def test_after_the_end_questions_are_still_answered(mode: str) -> None:
    with worker_collector(SAME, 2, ByObservation(), **BUDGET, mode=mode) as collector:
        rows = joined(list(collector))
        counts = collector.ledger.counts()
        collector.update_policy_weights_()
        collector.stop()
        assert collector.state_dict()["ledger"] == counts
        assert collector.metrics()["frames"] == len(rows) == 120
        assert list(collector) == []
    collector.shutdown()
    assert collector.state_dict()["ledger"] == counts
    assert list(collector) == []
    assert collector.ledger.counts() == counts


@both_modes
def test_stopped_before_the_first_batch_there_is_none(mode: str, tmp_path: Path) -> None:
    with worker_collector(SAME, 2, **BUDGET, mode=mode, storage=tmp_path / "s") as collector:
        collector.stop()
        assert list(collector) == []
        collector.ledger.check()
        assert (collector.ledger.stored, collector.ledger.carried) == (0, 0)
    with open_storage(tmp_path / "s") as storage:
        assert len(storage) == 0


@both_modes
def test_shut_down_in_the_loop_it_ends(mode: str) -> None:
    batches = []
    with worker_collector(SAME, 2, **BUDGET, mode=mode) as collector:
        for batch in collector:
            batches.append(batch)
            collector.shutdown()
            collector.shutdown()
    collector.ledger.check()
    assert (len(batches), collector.ledger.stored) == (1, 17)


# --- invalid values of environments -------------------------------------------------------------


def until_lane_3(collector: MultiprocessCollector) -> Iterator[TensorDictBase]:
    """Yield batches until lane 3 has some rows after its twelfth."""
    had = 0
    for batch in collector:
        yield batch
        had += int((batch["collector", "lane"] == 3).sum())
        if had > 20:
            return


@both_modes
@pytest.mark.parametrize("what", ["nan", "range", "reward"])
def test_rows_before_a_wrong_one_are_stored_and_it_is_named(
    mode: str, what: str, tmp_path: Path
) -> None:
    """Lane 3 is the first lane of worker 1, and its twelfth transition is wrong."""
    makes = [
        faulty_vec(first, own, what=what, lane=3, at=11)
        for first, own in lanes_of_workers(LANES, 2)
    ]
    collector = start(makes, ByObservation(), **ENDLESS, mode=mode, storage=tmp_path / "s")
    with collector, pytest.raises(TransitionError, match=r"lane 3, step \d of its traj"):
        list(collector)
    ledger = collector.ledger
    ledger.check()
    assert ledger.carried == 0
    with open_storage(tmp_path / "s") as storage:
        rows = storage.get(slice(None)).clone()
    assert len(rows) == ledger.stored
    checked = check_rows(rows, LENGTHS, ends="mixed", from_start=True)
    counts = checked.counts(LANES)
    assert counts[3] == 11
    if mode == "sync":
        assert counts == [11] * LANES
    assert verify(tmp_path / "s").sound
    with pytest.raises(StateError, match="ended when TransitionError was raised within it"):
        list(collector)


@both_modes
def test_validation_that_is_off_lets_all_pass(mode: str) -> None:
    makes = [
        faulty_vec(first, own, what="range", lane=3, at=11)
        for first, own in lanes_of_workers(LANES, 2)
    ]
    with start(makes, ByObservation(), **ENDLESS, mode=mode, validate="off") as collector:
        rows = joined([batch.clone() for batch in until_lane_3(collector)])
    assert (rows["next", "observation"] < 0).any(-1).sum() == 1


@both_modes
def test_validation_that_warns_does_so_once(mode: str) -> None:
    makes = [
        faulty_vec(first, own, what="range", lane=3, at=11)
        for first, own in lanes_of_workers(LANES, 2)
    ]
    collector = start(makes, ByObservation(), **ENDLESS, mode=mode, validate="warn")
    with collector, pytest.warns(OutOfRangeWarning, match="lane 3, step") as warned:
        rows = sum(len(each) for each in until_lane_3(collector))
    assert len(warned) == 1
    assert collector.ledger.stored == rows


def test_factories_that_are_many_make_one_run(tmp_path: Path) -> None:
    """Seven lanes are spread over six workers."""
    run = collect_all(
        start(factories(SAME, 6, 7), RecordingPolicy(), **BUDGET, storage=tmp_path / "s")
    )
    one = collect_all(sync_collector(SAME, RecordingPolicy(), 7, **BUDGET))
    for mine, theirs in zip(one.batches, run.batches, strict=True):
        assert_same(mine, theirs)
