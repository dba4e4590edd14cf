"""`collect(n)` stores the same rows as iteration, bit for bit, and counts exactly."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fast_paths_kit import drawn_off
from gymnasium.vector import AutoresetMode
from tensordict import TensorDictBase
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from tallyroll.collector import GymnasiumVectorEnv, SyncCollector
from tallyroll.collector.base import Collector
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.errors import ArgumentError, StateError, TransitionError
from tallyroll.storage import MemmapStorage, fast_paths, open_storage, verify
from tallyroll.storage.errors import StorageClosed
from tallyroll.storage.storages import DiskStorage

import random_runs
import toy_systems
from collect_kit import ByObservation, assert_same
from oracles import OracleTorchEnv, check_row, check_rows, make_oracle_vec
from pairs import each_pair, in_gate
from random_configurations import Configuration
from random_drawing import configuration
from random_runs import Run, carry_out, flat
from worker_kit import faulty_vec, in_threads, sync_collector, worker_collector

LENGTHS = [[3, 1, 4], [1, 1, 2], [5], [2, 9]]


def rows_of(storage: DiskStorage) -> TensorDictBase:
    """Return all rows, by trajectory and step."""
    slots = storage.slots_of(np.array(storage.span, np.int64))
    return flat(storage.get(torch.from_numpy(slots)).clone())


def stored_in(path: Path) -> TensorDictBase:
    with open_storage(path) as storage:
        return rows_of(storage)


def by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the extension, as if no compiler was available."""
    monkeypatch.setattr(fast_paths, "_off", frozenset({"kernel"}))


# --- random configurations ------------------------------------------------------------------------


def collects(config: Configuration) -> bool:
    """Return True if the rows do not depend on the calls and end up in files."""
    on_disk = config.sink in ("memmap", "h5", "zarr", "buffer on disk", "memory and disk")
    lane = config.env.lane
    return on_disk and not config.phase and config.mode == "sync" and not lane.self_reset


NUMBERS = list(itertools.islice((n for n in itertools.count() if collects(configuration(n))), 20))


def calls_of(config: Configuration) -> Iterator[int]:
    """Yield the number of transitions of each call. 0 stands for a batch of the iterator."""
    rng = np.random.default_rng(config.number)
    lanes, frames = config.env.lanes, config.frames_per_batch
    # Surplus and resets at each batch depend on the ends of batches.
    fixed = config.reset_at_each_iter or config.surplus != "carry"
    while True:
        n = int(rng.choice([lanes, 1, frames, int(rng.integers(1, 40)), 0]))
        yield int(rng.choice([frames, 0])) if fixed else n


def collecting(self: Any, run: Run, collector: Collector, leave: int) -> None:
    """Collect by calls of `collect` instead of iteration."""
    batches = iter(collector)
    for n in calls_of(self.config):
        before = collector.ledger.stored
        if n:
            got = collector.collect(n)
            collector.ledger.check()
            assert got == collector.ledger.stored - before
            assert collector.last_rows is None or len(collector.last_rows) == got
            if got < n:
                break
        elif next(batches, None) is None:
            break
    assert collector.collect(1) == 0


@pytest.mark.parametrize("number", in_gate(NUMBERS))
def test_the_same_rows_as_iterating_the_slowest_way(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(configuration(number), layout="rows")
    for folder in ("iterated", "collected"):
        (tmp_path / folder).mkdir()
    with fast_paths.switched_off(*fast_paths.FAST_PATHS):
        iterated = carry_out(config, tmp_path / "iterated")
    monkeypatch.setattr(random_runs._Runner, "_iterate", collecting)
    with fast_paths.switched_off(*drawn_off(number)):
        collected = carry_out(config, tmp_path / "collected")
    one, other = iterated.runs[-1], collected.runs[-1]
    assert type(one.error) is type(other.error), (one.error, other.error)
    for left, right in zip(iterated.stored, collected.stored, strict=True):
        rows = [flat(each) for each in (left, right)]
        if one.error is not None:  # the number of earlier rows depends on the ends of batches
            few = min(map(len, rows))
            rows = [each[:few] for each in rows] if len(rows[0]) == len(rows[1]) else []
        if rows:
            assert_same(*rows)
    if one.error is None:
        # A budget of episodes lets the collector step several slots in one call and discard those
        # after its end. Their number depends on the number of requested rows.
        several = config.total_episodes is not None
        ahead = ("slots", "executed", "discarded", "reset_slots", "policy_calls_on_reset_slots")
        for name, count in one.counts.items():
            assert other.counts[name] == count or (several and name in ahead), name


# --- one collector --------------------------------------------------------------------------------


def lanes_of(mode: str, lanes: int) -> Any:
    return GymnasiumVectorEnv(make_oracle_vec(lanes, LENGTHS, mode=AutoresetMode[mode]))


@each_pair(is_compiled=[True, False], lanes=[1, 3, 8], mode=["DISABLED", "NEXT_STEP", "SAME_STEP"])
def test_rows_are_stored_in_the_order_in_which_they_were_made(
    mode: str, lanes: int, is_compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_compiled:
        by_numpy(monkeypatch)
    calls = [lanes, 1, 2 * lanes, 7, lanes, lanes, 40, 3, lanes]
    total = sum(calls) + 5
    with (
        MemmapStorage(tmp_path / "rows") as storage,
        SyncCollector(
            lanes_of(mode, lanes),
            ByObservation(),
            frames_per_batch=lanes,
            total_frames=total,
            storage=storage,
        ) as collector,
    ):
        assert collector.last_rows is None
        head = 0
        for n in calls:
            assert collector.collect(n) == n
            assert collector.last_rows == range(head, head + n)
            head += n
            assert storage.head == head == collector.ledger.stored
            collector.ledger.check()
        assert len(collector.episodes) == collector.ledger.episodes_complete
        returns = {each.traj_id: each.total_return for each in collector.episodes}
        assert collector.collect(1000) == 5
        assert collector.last_rows == range(head, head + 5)
        assert collector.collect(1) == 0
        assert collector.last_rows == range(total, total)
        rows = storage.get(range(total)).clone()
        check_rows(rows, LENGTHS, from_start=True)
        for at, found in returns.items():
            own = rows[rows["collector", "traj_ids"] == at]
            assert float(own["next", "reward"].double().sum()) == found
    report = verify(tmp_path / "rows")
    assert report.sound, report.findings


def test_without_a_place_to_store_it_is_refused_and_nothing_is_stepped() -> None:
    with SyncCollector("CartPole-v1", num_envs=2, frames_per_batch=4, total_frames=8) as collector:
        with pytest.raises(ArgumentError, match="storage="):
            collector.collect(4)
        assert collector.ledger.slots == 0


@pytest.mark.parametrize("n", [0, -1, 2.5, True, "8", None])
def test_a_wrong_number_is_refused_and_the_run_goes_on(n: Any, tmp_path: Path) -> None:
    with SyncCollector(
        "CartPole-v1", frames_per_batch=4, total_frames=8, storage=tmp_path / "rows"
    ) as collector:
        with pytest.raises(ArgumentError, match=r"^n: "):
            collector.collect(n)
        assert collector.collect(np.int64(8)) == 8  # type: ignore[arg-type]


def test_more_than_a_ring_holds_is_stored_piece_by_piece(tmp_path: Path) -> None:
    with (
        MemmapStorage(tmp_path / "rows", max_size=16) as storage,  # a slab has 24 slots of lanes
        SyncCollector(
            lanes_of("NEXT_STEP", 4),
            ByObservation(),
            frames_per_batch=4,
            total_frames=-1,
            storage=storage,
        ) as collector,
    ):
        assert collector.collect(101) == 101
        assert collector.last_rows == range(101)
        assert storage.span == range(85, 101)
        check_rows(rows_of(storage), LENGTHS)
        for _ in range(60):
            collector.collect(5)
        check_rows(rows_of(storage), LENGTHS)


@pytest.mark.parametrize("disk", [True, False])
def test_a_replay_buffer_gets_batches_and_the_same_rows(disk: bool, tmp_path: Path) -> None:
    storage: Any = MemmapStorage(tmp_path / "rows") if disk else LazyTensorStorage(100)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=8)
    sizes: list[int] = []

    def counted(batch: TensorDictBase) -> TensorDictBase:
        sizes.append(len(batch))
        assert torch.is_grad_enabled(), "as when iterating"
        return batch

    with SyncCollector(
        lanes_of("DISABLED", 3),
        ByObservation(),
        frames_per_batch=6,
        total_frames=40,
        replay_buffer=buffer,
        postproc=counted,
    ) as collector:
        assert [collector.collect(n) for n in (20, 3, 100)] == [20, 3, 17]
        assert collector.last_rows == (range(23, 40) if disk else None)
    assert sizes == [6, 6, 6, 2, 3, 6, 6, 5]
    assert len(buffer) == 40
    check_rows(buffer.storage.get(slice(0, 40)).clone(), LENGTHS, from_start=True)
    if disk:
        storage.close()


def test_a_buffer_over_the_storage_is_kept_in_step(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows", max_size=32) as storage:
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=8)
        with SyncCollector(
            lanes_of("DISABLED", 4),
            ByObservation(),
            frames_per_batch=4,
            total_frames=50,
            storage=storage,
        ) as collector:
            while collector.collect(4):
                for row in buffer.sample().exclude("index"):
                    check_row(row, LENGTHS)
        assert buffer.writer._cursor == 50 % 32


def test_what_is_wrong_is_refused_and_what_came_before_it_is_stored(tmp_path: Path) -> None:
    create = faulty_vec(0, 4, what="nan", lane=1, at=31)
    with SyncCollector(
        create, ByObservation(), frames_per_batch=4, total_frames=400, storage=tmp_path / "rows"
    ) as collector:
        with pytest.raises(TransitionError, match="lane 1"):
            collector.collect(400)
        stored = collector.ledger.stored
        with pytest.raises(StateError, match="the run ended when TransitionError was raised"):
            collector.collect(4)
        collector.ledger.check()
    assert stored in range(4 * 30, 4 * 31 + 1)
    assert len(stored_in(tmp_path / "rows")) == stored


def test_a_storage_that_was_closed_is_told_before_anything_is_stepped(tmp_path: Path) -> None:
    storage = MemmapStorage(tmp_path / "rows")
    collector = SyncCollector("CartPole-v1", frames_per_batch=4, total_frames=40, storage=storage)
    collector.collect(4)
    slots = collector.ledger.slots
    storage.close()
    with pytest.raises(StorageClosed, match="Rows 0 to 3"):
        collector.collect(4)
    assert collector.ledger.slots == slots
    collector.shutdown()


def test_a_stopped_run_stores_what_it_has(tmp_path: Path) -> None:
    with SyncCollector(
        lanes_of("NEXT_STEP", 4),
        Stopping(at=5),
        frames_per_batch=4,
        total_frames=400,
        storage=tmp_path / "rows",
    ) as collector:
        Stopping.collector = collector
        got = collector.collect(100)
        assert got == collector.ledger.stored
        assert 12 <= got <= 20
        assert collector.collect(4) == 0
        assert (collector.ledger.carried, collector.ledger.discarded) == (0, 0)


class Stopping(ByObservation):
    """Policy that ends the run from within its ``at``-th call."""

    collector: Any = None

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Act."""
        self.calls += self.collector is not None
        if self.calls == self.at:
            self.collector.stop()
        acted: TensorDictBase = super().forward(td)
        return acted


def test_resumed_and_mixed_with_iterating(tmp_path: Path) -> None:
    options: dict[str, Any] = {"frames_per_batch": 10, "total_frames": 100}
    with SyncCollector(
        lanes_of("DISABLED", 4), ByObservation(), storage=tmp_path / "rows", seed=1, **options
    ) as collector:
        batches = iter(collector)
        assert collector.collect(7) == 7
        assert len(next(batches)) == 10
        assert collector.collect(4) == 4
        state = collector.state_dict()
    with SyncCollector(
        lanes_of("DISABLED", 4), ByObservation(), storage=tmp_path / "rows", resume=True, **options
    ) as again:
        assert again.ledger.stored == 21
        while again.collect(4):
            pass
        assert again.ledger.stored == 100
    assert state["ledger"]["stored"] == 21
    assert len(stored_in(tmp_path / "rows")) == 100
    assert verify(tmp_path / "rows").sound


def test_random_actions_go_on_where_a_saved_state_was() -> None:
    def actions(load: Any, calls: list[int]) -> tuple[list[Any], Any]:
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(500))
        with SyncCollector(
            OracleTorchEnv(3, LENGTHS),
            frames_per_batch=6,
            total_frames=300,
            replay_buffer=buffer,
            seed=3,
        ) as collector:
            if load is not None:
                collector.load_state_dict(load)
            for n in calls:
                collector.collect(n)
            state = collector.state_dict()
            stored = buffer.storage.get(slice(0, len(buffer)))
            lane = stored["collector", "lane"]
            of_lanes = [stored["action"][lane == each] for each in range(3)]
            return torch.stack(of_lanes, 1).tolist(), state

    first, state = actions(None, [3, 12])
    rest, _ = actions(state, [3] * 5)
    whole, _ = actions(None, [30])
    # A loaded state resets the environments and continues the sequence of actions.
    assert first + rest == whole


@pytest.mark.parametrize("lanes", [64, 1])
def test_a_state_of_another_number_of_lanes_is_gone_on_from(lanes: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"frames_per_batch": 8, "total_frames": -1, "seed": 1}
    ring = partial(MemmapStorage, max_size=500)
    with (
        ring(tmp_path / "one") as storage,
        SyncCollector("CartPole-v1", num_envs=65 - lanes, storage=storage, **options) as collector,
    ):
        collector.collect(250)
        state = collector.state_dict()
    with (
        ring(tmp_path / "other") as storage,
        SyncCollector("CartPole-v1", num_envs=lanes, storage=storage, **options) as collector,
    ):
        collector.load_state_dict(state)
        assert collector.collect(100) == 100


@pytest.mark.parametrize("buffered", [False, True])
def test_what_is_carried_is_stored_where_every_call_resets(buffered: bool, tmp_path: Path) -> None:
    sink: dict[str, Any] = {"storage": tmp_path / "rows"}
    if buffered:
        sink = {"replay_buffer": TensorDictReplayBuffer(storage=LazyTensorStorage(100))}
    with SyncCollector(
        OracleTorchEnv(4, LENGTHS),
        frames_per_batch=6,
        total_frames=100,
        reset_at_each_iter=True,
        **sink,
    ) as collector:
        assert collector.collect(6) == 6
        collector.stop()
        assert collector.collect(6) == 2
        assert (collector.ledger.stored, collector.ledger.discarded) == (8, 0)


def test_the_last_rows_are_told_after_an_error_too(tmp_path: Path) -> None:
    with SyncCollector(
        faulty_vec(0, 4, what="nan", lane=1, at=9),
        ByObservation(),
        frames_per_batch=4,
        total_frames=400,
        storage=tmp_path / "rows",
    ) as collector:
        collector.collect(5)
        with pytest.raises(TransitionError, match="lane 1"):
            collector.collect(300)
        assert collector.last_rows == range(5, collector.ledger.stored)
        assert collector.ledger.stored > 30


@pytest.mark.parametrize("way", ["collect", "iterate", "set_seed"])
def test_a_call_from_within_is_refused(way: str, tmp_path: Path) -> None:
    def policy(td: TensorDictBase) -> TensorDictBase:
        if collecting.get("it") is not None:
            collector = collecting["it"]
            if way == "collect":
                collector.collect(2)
            elif way == "iterate":
                next(iter(collector))
            else:
                collector.set_seed(1)
        return td.set("action", torch.zeros(3, dtype=torch.int64))

    collecting: dict[str, Any] = {}
    with SyncCollector(
        lanes_of("DISABLED", 3),
        policy,
        frames_per_batch=3,
        total_frames=30,
        storage=tmp_path / "rows",
    ) as collector:
        collector.collect(3)
        collecting["it"] = collector
        with pytest.raises(StateError, match="already collecting"):
            collector.collect(3)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("frames", [2, 3, 4])
@pytest.mark.parametrize("system", [toy_systems.Arrivals, toy_systems.ArrivalsWithResetSlots])
def test_small_batches_of_arrivals_stand_lane_by_lane(
    system: Any, frames: int, tmp_path: Path
) -> None:
    with SyncCollector(
        SystemEnv(system(5)),
        frames_per_batch=frames,
        total_frames=100,
        seed=0,
        layout="lanes",
        storage=tmp_path / "rows",
    ) as collector:
        for batch in itertools.islice(collector, 12):
            mask = batch["collector", "mask"]
            for lane, own in enumerate(mask):
                assert (batch["collector", "lane"][lane][own] == lane).all()
        assert collector.collect(20) == 20
    assert verify(tmp_path / "rows").sound


# --- workers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["Disabled", "NextStep"])
def test_workers_in_step_store_what_one_process_does(source: str, tmp_path: Path) -> None:
    counts = []
    for name, make in (
        ("alone", sync_collector),
        ("sync", partial(worker_collector, workers=2, mode="sync")),
    ):
        with (
            in_threads(),
            make(
                source,
                policy=ByObservation(),
                frames_per_batch=8,
                total_frames=120,
                storage=tmp_path / name,
            ) as collector,
        ):
            while collector.collect(7):
                pass
        counts.append(collector.ledger.counts())
    assert_same(stored_in(tmp_path / "alone"), stored_in(tmp_path / "sync"))
    assert counts[0] == counts[1]


def test_workers_that_run_ahead_store_exactly_as_many(tmp_path: Path) -> None:
    with worker_collector(
        "NextStep",
        workers=2,
        mode="async",
        policy=ByObservation(),
        frames_per_batch=8,
        total_frames=200,
        storage=tmp_path / "rows",
    ) as collector:
        assert [collector.collect(n) for n in (8, 1, 50, 8, 500)] == [8, 1, 50, 8, 133]
        assert collector.last_rows == range(67, 200)
    rows = stored_in(tmp_path / "rows")
    assert len(rows) == 200
    assert verify(tmp_path / "rows").sound


@pytest.mark.parametrize(("total", "per_batch", "lanes"), [(100, 10, 3), (101, 10, 3), (20, 30, 8)])
def test_the_length_counts_the_batches_still_to_come(
    total: int, per_batch: int, lanes: int, tmp_path: Path
) -> None:
    """The length is checked after `collect`, during an iteration and after a resume."""
    options: dict[str, Any] = {"num_envs": lanes, "frames_per_batch": per_batch}
    options |= {"total_frames": total, "storage": tmp_path / "rows"}
    with SyncCollector("CartPole-v1", seed=0, **options) as collector:
        assert len(collector) == -(-total // per_batch)
        collector.collect(13)
        assert len(collector) == -(-(total - 13) // per_batch)
        length = len(collector)
        next(iter(collector))
        assert len(collector) == length - 1
        left = len(collector)
    with SyncCollector("CartPole-v1", resume=True, **options) as collector:
        assert len(collector) == left == len([*collector])
        assert len(collector) == 0
