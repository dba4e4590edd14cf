"""Collectors write to rings, to every format, and to replay buffers on other devices."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrl.data import LazyTensorStorage, ReplayBuffer

from tallyroll.collector import SyncCollector
from tallyroll.collector.batches.stored.writer import BatchWriter
from tallyroll.collector.counting.ledger import Ledger
from tallyroll.collector.counting.numbering import lane_seed
from tallyroll.collector.errors import ArgumentError, LedgerError
from tallyroll.storage import MemmapStorage, open_storage, verify
from tallyroll.storage.storages import DiskStorage, H5Storage, ZarrStorage

from collect_kit import ByObservation, collect
from devices_kit import on_gpu
from oracles import OracleTorchEnv, check_rows
from warm_cli import WarmServer

LENGTHS = (5, 1, 9, 2, 30)
CARTPOLE: dict[str, Any] = {"num_envs": 4, "frames_per_batch": 30, "seed": 0}
IDS = ("collector", "traj_ids")


@pytest.mark.parametrize("size", [30, 31, 100, 1000])
def test_a_ring_holds_the_last_rows(tmp_path: Path, size: int) -> None:
    env = OracleTorchEnv(3, LENGTHS)
    with MemmapStorage(tmp_path / "data", max_size=size) as storage:
        batches, collector = collect(
            env, ByObservation(), frames_per_batch=30, total_frames=205, seed=0, storage=storage
        )
        assert collector.ledger.stored == sum(map(len, batches)) == 205
        slots = storage.slots_of(np.array(storage.span))
        rows = storage.get(torch.from_numpy(slots))
        assert len(rows) == min(size, 205)
        check_rows(rows, LENGTHS)
        last = torch.cat([batch["observation"] for batch in batches])[-len(rows) :]
        assert torch.equal(rows["observation"], last)
    assert verify(tmp_path / "data").sound


def test_a_batch_that_a_ring_cannot_hold_is_refused_before_a_step(tmp_path: Path) -> None:
    with (
        MemmapStorage(tmp_path / "data", max_size=29) as storage,
        pytest.raises(
            ArgumentError,
            match=r"frames_per_batch: expected at most the 29 rows of the ring .*data, got ",
        ),
    ):
        SyncCollector("CartPole-v1", total_frames=100, storage=storage, **CARTPOLE)
    assert list(tmp_path.iterdir()) == []
    with MemmapStorage(tmp_path / "data", max_size=29) as storage:
        collect("CartPole-v1", total_frames=29, storage=storage, **CARTPOLE)
        assert len(storage) == 29


def test_rows_left_by_an_error_may_be_more_than_a_ring_takes_at_once(tmp_path: Path) -> None:
    calls = []

    def fails_late(td: Any) -> Any:
        calls.append(1)
        if len(calls) == 12:
            raise RuntimeError("enough")
        return td.set("action", torch.zeros(td.batch_size, dtype=torch.int64))

    with MemmapStorage(tmp_path / "data", max_size=9) as storage:
        made = {"num_envs": 4, "frames_per_batch": 9, "total_frames": 100, "seed": 0}
        with (
            SyncCollector("CartPole-v1", fails_late, storage=storage, **made) as collector,
            pytest.raises(RuntimeError, match="enough"),
        ):
            for _ in collector:
                pass
        assert storage.head == collector.ledger.stored
        assert storage.record is not None
        assert json.loads(storage.record[1])["ledger"]["stored"] == storage.head
    assert verify(tmp_path / "data").sound


@pytest.mark.parametrize("count", [8, 9, 10, 18, 19, 40])
def test_a_sink_writes_more_rows_than_a_ring_has_piece_by_piece(tmp_path: Path, count: int) -> None:
    """Workers leave such writes if one of them raises. The last piece carries the ledger."""
    numbers = torch.arange(count)
    rows = {("x",): numbers * 2.0, IDS: numbers // 5, ("collector", "step"): numbers % 5}
    with MemmapStorage(tmp_path / "data", max_size=9) as storage:
        sink = BatchWriter(storage, None, False)
        sink.open(rows, {"environment": {}}, {})
        sink.write(rows, count, Ledger(slots=count, executed=count, stored=count), 1, {})  # type: ignore[arg-type]
        assert storage.head == count
        left = np.array(storage.span)
        assert left.tolist() == list(range(max(0, count - 9), count))
        assert (storage.get(storage.slots_of(left))["x"].numpy() == 2.0 * left).all()
        assert storage.record is not None
        at, payload = storage.record
        record = json.loads(payload)
        assert (at, record["ledger"]["stored"]) == (count, count)
        assert record["next_id"] == (count - 1) // 5 + 1
        with pytest.raises(
            LedgerError, match=f"expected {count + 1} rows, as many as.* got {count}"
        ):
            sink.write(rows, count + 1, Ledger(), 1, {})  # type: ignore[arg-type]
        assert storage.head == count


def test_ids_are_never_used_again_though_their_rows_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with MemmapStorage(path, max_size=200) as storage:
        batches, _ = collect("CartPole-v1", total_frames=400, storage=storage, **CARTPOLE)
        largest = max(int(batch[IDS].max()) for batch in batches)
    with MemmapStorage(path, mode="append") as storage:
        assert storage.record is not None
        assert json.loads(storage.record[1])["next_id"] == largest + 1
        # Remove the rows with the largest id, as if the ring had overwritten that trajectory first.
        engine = storage.reader.engine
        assert engine is not None
        column = engine.space.columns.arrays[engine.schema.keys.index(IDS)]
        column.flags.writeable = True
        column[:] = 0
        again, _ = collect("CartPole-v1", total_frames=200, storage=storage, **CARTPOLE)
    assert min(int(batch[IDS].min()) for batch in again) == largest + 1


def test_resuming_a_ring_counts_exactly(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with (
        MemmapStorage(path, max_size=100) as storage,
        SyncCollector("CartPole-v1", total_frames=1000, storage=storage, **CARTPOLE) as collector,
    ):
        for number, _ in enumerate(collector):
            if number == 10:
                break
    for total in (700, 1000):
        made = {**CARTPOLE, "seed": None, "total_frames": total, "resume": True}
        with (
            MemmapStorage(path, mode="append") as storage,
            SyncCollector("CartPole-v1", storage=storage, **made) as collector,
        ):
            for _ in collector:
                pass
            assert storage.head == collector.ledger.stored == total
            assert storage.span == range(total - 100, total)
        assert verify(path).sound


@pytest.mark.slow
def test_a_ring_killed_and_resumed_counts_exactly(server: WarmServer, tmp_path: Path) -> None:
    words = ("collect", "CartPole-v1", "--frames", 10**6, "--max-size", 500, "--num-envs", 4)
    words = (*words, "--frames-per-batch", 20, "--out", "data", "--seed", 3)
    for round in range(3):
        command = server.start(tmp_path, *words, *(["--resume"] if round else []))
        command.wait_for(" rows of ")
        time.sleep(0.1 + 0.1 * round)
        command.kill()
        assert command.wait() == -signal.SIGKILL
        report = verify(tmp_path / "data")
        assert report.sound, report.findings
    with open_storage(tmp_path / "data") as storage:
        total = storage.head + 333
    server.run(tmp_path, "collect", "--resume", "--frames", total, "--out", "data")
    with open_storage(tmp_path / "data") as storage:
        assert storage.head == total
        assert storage.record is not None
        ledger = json.loads(storage.record[1])["ledger"]
    assert ledger["stored"] == total
    assert ledger["executed"] == total + ledger["discarded"] + ledger["lost"]
    assert verify(tmp_path / "data").sound


# --- formats --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.h5", H5Storage), ("a.HDF5", H5Storage), ("a.zarr", ZarrStorage), ("a", MemmapStorage)],
)
def test_the_suffix_chooses_the_format(tmp_path: Path, name: str, kind: type[DiskStorage]) -> None:
    path = tmp_path / name
    batches, _ = collect("CartPole-v1", total_frames=205, storage=path, **CARTPOLE)
    more = {**CARTPOLE, "seed": None}
    collect("CartPole-v1", total_frames=305, storage=path, resume=True, **more)
    with open_storage(path) as storage:
        assert isinstance(storage, kind)
        assert len(storage) == 305
        first = torch.cat([batch["observation"] for batch in batches])
        assert torch.equal(storage.get(slice(0, 205))["observation"], first)
    assert verify(path).sound


def test_a_format_that_cannot_grow_needs_the_number_of_rows(tmp_path: Path) -> None:
    for budget in ({"total_frames": -1}, {"total_episodes": 3}):
        with pytest.raises(ArgumentError, match=r"H5Storage, which needs a fixed number of rows"):
            SyncCollector("CartPole-v1", storage=tmp_path / "a.h5", **CARTPOLE, **budget)
    assert list(tmp_path.iterdir()) == []
    with H5Storage(tmp_path / "a.h5", capacity=500) as storage:
        collect("CartPole-v1", total_episodes=3, storage=storage, **CARTPOLE)
    assert verify(tmp_path / "a.h5").sound


def test_a_storage_that_is_too_small_is_made_larger_beforehand(tmp_path: Path) -> None:
    with H5Storage(tmp_path / "a.h5", capacity=10) as storage:
        collect("CartPole-v1", total_frames=100, storage=storage, **CARTPOLE)
        collect("CartPole-v1", total_frames=333, storage=storage, **CARTPOLE)
        assert len(storage) == 433


def test_a_run_names_the_seeds_of_its_lanes(tmp_path: Path) -> None:
    path = tmp_path / "data"
    collect("CartPole-v1", total_frames=30, storage=path, **CARTPOLE)
    more = {**CARTPOLE, "seed": None, "total_frames": 60}
    collect("CartPole-v1", storage=path, resume=True, **more)
    with open_storage(path) as storage:
        seeds = [run["lane_seeds"] for run in storage.manifest["runs"]]
    assert seeds == [[lane_seed(0, lane, turn) for lane in range(4)] for turn in range(2)]
    with MemmapStorage(tmp_path / "torch") as storage:
        collect(OracleTorchEnv(3, LENGTHS), frames_per_batch=5, total_frames=5, storage=storage)
        assert "lane_seeds" not in storage.manifest["runs"][0], "TorchRL chose them"


# --- replay buffers -------------------------------------------------------------------------------


def buffered(device: str) -> ReplayBuffer:
    """Collect into a buffer on a device and check every row."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(300, device=device), batch_size=32)
    batches, collector = collect(
        OracleTorchEnv(3, LENGTHS), ByObservation(), frames_per_batch=50, total_frames=275, seed=0,
        replay_buffer=buffer,
    )  # fmt: skip
    held = buffer[:]
    assert collector.ledger.stored == len(buffer) == 275
    assert {leaf.device.type for leaf in held.values(True, True)} == {device}
    check_rows(held.cpu(), LENGTHS)
    assert torch.equal(
        held["observation"].cpu(), torch.cat([batch["observation"] for batch in batches])
    )
    assert buffer.sample()["observation"].device.type == device
    return buffer


def test_a_buffer_in_memory() -> None:
    buffered("cpu")


@on_gpu
def test_a_buffer_on_a_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = []
    before = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        found = before(self, *args, **options)
        if (self.device.type, found.device.type) == ("cpu", device):
            pinned.append(self.is_pinned())
        return found

    monkeypatch.setattr(torch.Tensor, "to", to)
    buffered(device)
    assert any(pinned), "rows should go there from pinned memory"
