"""Rows of environments on a device reach a ring on that device without a copy to the host.

``TALLYROLL_CONFIGURATIONS`` is the number of random runs, 10 by default.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device_runs_kit import collect, drawn
from tensordict import TensorDict, TensorDictBase

from tallyroll.collector import SyncCollector
from tallyroll.storage import DeviceStorage, MemmapStorage, content_hash
from tallyroll.storage.errors import BatchTooLong, NotAnAppend, RowsMismatch
from tallyroll.storage.ext.device.device_writer import DeviceWriter

from devices_kit import ACCELERATOR, SIMULATED, here_and_there, on_gpu
from tensor_cartpole import Leaning, TensorCartPole

if SIMULATED:
    import fakegpu

COUNT = int(os.environ.get("TALLYROLL_CONFIGURATIONS", "10"))


@here_and_there
@pytest.mark.parametrize("seed", range(COUNT))
def test_random_runs_store_the_rows_of_a_ring_on_disk(
    seed: int, device: str, tmp_path: Path
) -> None:
    make, given, size = drawn(seed)
    with (
        DeviceStorage(max_size=size, device=device) as ring,
        MemmapStorage(tmp_path / "rows", max_size=size) as disk,
    ):
        found = [collect(storage, partial(make, device), given, seed) for storage in (disk, ring)]
        assert found[0] == found[1]
        assert content_hash(ring) == content_hash(disk)
        assert ring.reader.record == disk.record


# --- copies and waits -----------------------------------------------------------------------------

SLOTS, LANES, BATCHES = 10, 64, 5


def counted(**given: Any) -> tuple[dict[str, float], dict[str, int]]:
    """Return the counts of a batch, and the waits of a batch by reason; steps' are left out."""
    frames, reasons = LANES * SLOTS, dict[str, int]()

    def note(reason: str) -> None:
        reasons[reason] = reasons.get(reason, 0) + 1

    with SyncCollector(
        TensorCartPole(LANES, ACCELERATOR), Leaning(ACCELERATOR), frames_per_batch=frames,
        total_frames=frames * (BATCHES + 4), seed=3, finals="kept", **given,
    ) as collector:  # fmt: skip
        batches: Iterator[Any] = iter(collector)
        for _ in range(3):
            next(batches)
        fakegpu.reset_counts()
        fakegpu.call_at_waits(note)
        try:
            for _ in range(BATCHES):
                next(batches)
        finally:
            fakegpu.call_at_waits(None)
    return fakegpu.counts(), reasons


@pytest.mark.gpu
@pytest.mark.skipif(not SIMULATED, reason="only the simulated GPU counts copies")
def test_a_ring_adds_one_copy_to_the_device_and_no_wait() -> None:
    """The host waits once for each batch, and for the done flag of each step, as TorchRL does.

    The copy has the columns that the host computes, 31 bytes a row: flags, ids, steps, versions
    and lanes.
    """
    alone, _ = counted()
    with DeviceStorage(max_size=3000, device=ACCELERATOR) as ring:
        stored, reasons = counted(storage=ring)
    more = {name: each - alone.get(name, 0) for name, each in stored.items()}
    assert reasons.pop("item()") >= BATCHES * SLOTS
    assert reasons == {"copy to the host": BATCHES}
    assert stored["waits"] == alone["waits"]
    assert stored["d2h_bytes"] == alone["d2h_bytes"]
    assert more["h2d_pinned_async"] == BATCHES
    assert more["h2d_bytes"] == 31 * LANES * SLOTS * BATCHES


# --- the interface --------------------------------------------------------------------------------


@on_gpu
def test_a_sink_without_the_method_gets_arrays(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run stores its rows with `append`."""
    hashes = []
    for name in ("no_method", "append_tensors"):
        monkeypatch.delattr(DeviceWriter, name, raising=False)
        with DeviceStorage(max_size=100, device=device) as ring:
            collector = SyncCollector(
                TensorCartPole(4, device), None, frames_per_batch=50, total_frames=50, seed=3,
                storage=ring,
            )  # fmt: skip
            with collector:
                collector.collect(50)
            hashes.append(content_hash(ring))
    assert hashes[0] == hashes[1]


@here_and_there
def test_rows_at_another_place_are_refused(device: str) -> None:
    ring = DeviceStorage(max_size=4, device=device)
    columns = {("x",): torch.arange(2, device=device)}
    ring.extend(_rows(columns))
    assert ring.writer.append_tensors(columns, 2) == range(2, 4)
    for at in (3, 5):
        with pytest.raises(NotAnAppend, match=rf"at: expected 4, .* got {at}"):
            ring.writer.append_tensors(columns, at)
    for wrong in ({("y",): columns["x",]}, {("x",): columns["x",].float()}):
        with pytest.raises(RowsMismatch, match=r"x is (missing|torch\.float32 \[\]), expected"):
            ring.writer.append_tensors(wrong, 4)
    with pytest.raises(BatchTooLong, match="at most 4 rows at once"):
        ring.writer.append_tensors({("x",): torch.arange(5, device=device)}, 4)
    assert ring.in_order()["x"].tolist() == [0, 1, 0, 1]


def _rows(columns: dict[Any, torch.Tensor]) -> TensorDictBase:
    return TensorDict({key[0]: each for key, each in columns.items()}, [2])


@on_gpu
def test_a_result_of_postproc_that_does_not_fit_is_refused(device: str) -> None:
    def halved(batch: TensorDictBase) -> TensorDictBase:
        if len(made) == 1:
            batch["observation"] = batch["observation"].half()
        made.append(len(batch))
        return batch

    made: list[int] = []
    ring = DeviceStorage(max_size=100, device=device)
    with SyncCollector(
        TensorCartPole(4, device), None, frames_per_batch=20, total_frames=60, storage=ring,
        postproc=halved,
    ) as collector:  # fmt: skip
        batches = iter(collector)
        next(batches)
        with pytest.raises(RowsMismatch, match=r"observation is torch\.float16 \[4\], expected"):
            next(batches)
    assert np.all(np.diff(ring.in_order()["collector", "lane"].cpu().numpy()) >= 0)
    assert ring.head == 20
