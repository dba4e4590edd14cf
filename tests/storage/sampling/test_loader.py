"""Test `storage.loader`.

Batches are the same for any number of threads, and no thread is left over or waited for.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

from tallyroll.storage import MemmapStorage, n_step, open_storage
from tallyroll.storage.errors import IndexOutOfRange, LoaderForked, NoSlices, StorageClosed

from devices_kit import SIMULATED, on_gpu
from lane_model import Model

if SIMULATED:
    import fakegpu


def big(rows: int = 2000) -> Model:
    return Model.random(np.random.default_rng(0), rows=rows, lanes=8)


@pytest.fixture
def storage() -> Iterator[MemmapStorage]:
    with MemmapStorage() as storage:
        storage.extend(big().rows())
        yield storage


def threads() -> int:
    """Return the loader threads that are left after a grace period."""
    deadline = time.monotonic() + 5
    while True:
        found = sum("tallyroll-loader" in each.name for each in threading.enumerate())
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.002)


def slices(storage: MemmapStorage) -> Any:
    return lambda random: storage.trajectories.sample_slices(8, 5, random, short="pad")


def steps(storage: MemmapStorage) -> Any:
    def make(random: torch.Generator) -> TensorDict:
        return n_step(storage, torch.randint(len(storage), (64,), generator=random), 3, 0.9)

    return make


def slowly(batch: Any) -> Any:
    """Delay threads, so that they end in another order than they begin."""
    time.sleep(float(batch["observation"].sum()) % 7 / 2000)
    return batch


@pytest.mark.parametrize("what", ["rows", "slices", "n steps"])
def test_batches_are_the_same_for_any_number_of_threads(storage: MemmapStorage, what: str) -> None:
    batch = {"rows": 32, "slices": slices(storage), "n steps": steps(storage)}[what]

    def first(workers: int, seed: int = 7, **options: Any) -> list[TensorDict]:
        loader = storage.loader(batch, workers=workers, seed=seed, batches=12, **options)
        return [each.clone() for each in loader]

    alone = first(0)
    assert len(alone) == 12
    for found in (first(1), first(3, transform=slowly), first(4, ahead=1)):
        assert all((a == b).all() for a, b in zip(alone, found, strict=True))
    assert not all((a == b).all() for a, b in pairwise(alone))
    assert not (alone[0] == first(1, seed=8)[0]).all()
    assert threads() == 0


def test_rows_are_drawn_uniformly_from_all_that_are_stored(storage: MemmapStorage) -> None:
    rows = torch.cat([batch["action"] for batch in storage.loader(2000, seed=0, batches=10)])
    assert len(rows) == 20_000
    found = [batch["observation"] for batch in storage.loader(2000, seed=0, batches=20)]
    count = torch.bincount(torch.cat(found).long()[:, 0], minlength=2000).double()
    assert abs(((count - 20) ** 2 / 20).sum() - 1999) < 4 * (2 * 1999) ** 0.5


def test_without_a_seed_it_is_torchs(storage: MemmapStorage) -> None:
    torch.manual_seed(3)
    one, other = (next(storage.loader(8, workers=1)) for _ in range(2))
    torch.manual_seed(3)
    assert (next(storage.loader(8)) == one).all()
    assert not (one == other).all()


def test_no_more_are_made_than_asked_for(storage: MemmapStorage) -> None:
    made: list[int] = []
    with storage.loader(4, workers=2, ahead=3, transform=lambda _: made.append(1)) as loader:
        next(loader)
        time.sleep(0.05)
        assert len(made) == 3
        next(loader)
        time.sleep(0.05)
        assert len(made) == 4
    assert threads() == 0
    with pytest.raises(StopIteration):
        next(loader)
    loader.close()


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_error_is_raised_at_its_batch(storage: MemmapStorage, workers: int) -> None:
    wanted = [batch.clone() for batch in storage.loader(4, seed=0, batches=9)]
    hang = threading.Event()

    def fails(batch: TensorDict) -> TensorDict:
        (number,) = (at for at, each in enumerate(wanted) if (each == batch).all())
        if number == 4:
            raise KeyError("the fifth")
        if number > 4:
            hang.wait(20)  # no caller waits for it
        return batch

    with storage.loader(4, workers=workers, seed=0, batches=9, transform=fails) as loader:
        for number in range(4):
            assert (next(loader) == wanted[number]).all()
        begun = time.monotonic()
        with pytest.raises(KeyError, match="the fifth"):
            next(loader)
        with pytest.raises(StopIteration):
            next(loader)
        assert time.monotonic() - begun < 5
        hang.set()
    assert threads() == 0


def test_a_loader_that_is_dropped_leaves_no_thread(storage: MemmapStorage) -> None:
    for number, _batch in enumerate(storage.loader(64, workers=3)):
        if number == 5:
            break
    assert threads() == 0
    never = storage.loader(64)
    del never

    def is_left() -> None:
        cycle: list[Any] = [storage.loader(64, workers=2)]
        cycle.append(cycle)
        next(cycle[0])

    is_left()
    gc.collect()
    assert threads() == 0


def test_an_interrupt_loses_no_batch(storage: MemmapStorage) -> None:
    wanted = [batch.clone() for batch in storage.loader(16, workers=0, seed=1, batches=5)]
    go_on = threading.Event()

    def waits(batch: TensorDict) -> TensorDict:
        assert go_on.wait(20)
        return batch

    with storage.loader(16, seed=1, batches=5, transform=waits) as loader:
        timer = threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            next(loader)
        go_on.set()
        assert all((a == b).all() for a, b in zip(loader, wanted, strict=True))
    timer.join()
    assert threads() == 0


def test_a_storage_that_grows_and_one_that_is_closed() -> None:
    model, storage = big(3000), MemmapStorage(max_size=500)
    with pytest.raises(IndexOutOfRange, match="no rows yet to draw from"):
        next(storage.loader(4))
    with pytest.raises(NoSlices, match="no rows yet"):
        next(storage.loader(slices(storage)))
    storage.extend(model.rows(0, 400))
    with storage.loader(32) as rows, storage.loader(slices(storage)) as sequences:
        for start in range(400, 3000, 100):
            storage.extend(model.rows(start, start + 100))
            assert next(rows)["observation"].min() >= max(0, start - 1000)
            next(sequences)
        storage.close()
        with pytest.raises(StorageClosed):
            list(rows)  # batches that were already made come first
    with pytest.raises(StorageClosed):
        storage.loader(4)
    assert threads() == 0


def test_a_reader_beside_a_writer_of_a_ring(tmp_path: Path) -> None:
    """Another reader of the files acts like another process, while a thread writes."""
    rows, stop, full = big(2000).rows(), threading.Event(), threading.Event()

    def write() -> None:
        with MemmapStorage(tmp_path / "rows", max_size=2000) as storage:
            while not stop.is_set():
                lap = storage.head // 2000
                for part in rows.split(50):
                    part = part.clone()
                    part["observation"] += lap * 2000
                    part["next", "observation"] += lap * 2000
                    part["collector", "traj_ids"] += lap * 10_000
                    storage.extend(part)
                full.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert full.wait(30)
        with open_storage(tmp_path / "rows") as storage:
            for batch in storage.loader(200, workers=3, batches=100):
                assert (batch["next", "observation"] == batch["observation"] + 0.5).all()
                assert (batch["observation"] % 2 == batch["action"][:, None]).all()
            for batch in storage.loader(slices(storage), workers=2, batches=50):
                mask, ids = batch["collector", "mask"], batch["collector", "traj_ids"]
                assert ((ids == ids[:, :1]) | ~mask).all()
    finally:
        stop.set()
        writer.join()
    assert threads() == 0


def test_a_forked_child_is_told_to_make_its_own(storage: MemmapStorage) -> None:
    loader = storage.loader(4)
    next(loader)
    pid = loader._pid
    loader._pid = pid + 1
    try:
        with pytest.raises(LoaderForked, match="Create a loader in each process"):
            next(loader)
    finally:
        loader._pid = pid


def test_batches_go_to_a_device_and_have_no_gradients(storage: MemmapStorage) -> None:
    weight = torch.ones(1, dtype=torch.float64, requires_grad=True)

    def scaled(batch: TensorDict) -> TensorDict:
        return batch.set("scaled", batch["observation"] * weight)

    batch = next(storage.loader(4, device="cpu", transform=scaled))
    assert batch.device == torch.device("cpu")
    assert not batch["scaled"].requires_grad
    with pytest.raises(RuntimeError, match="device"):
        storage.loader(4, device="nowhere")


@on_gpu
def test_batches_are_pinned_and_go_to_a_gpu(storage: MemmapStorage, device: str) -> None:
    pinned: list[bool] = []

    def looked_at(batch: TensorDict) -> TensorDict:
        pinned.append(batch["observation"].is_pinned())
        return batch

    here = [batch.clone() for batch in storage.loader(500, seed=0, batches=40)]
    there = storage.loader(500, seed=0, batches=40, device=device, transform=looked_at)
    for one, other in zip(here, there, strict=True):
        assert other.device.type == device
        assert (other.cpu() == one).all()
    assert pinned == [False] * 40  # they are pinned afterwards
    with storage.loader(4, seed=0, device=device) as made:
        (packed,) = made._job(0)._packed
        assert packed._octets.is_pinned()


@on_gpu
@pytest.mark.skipif(not SIMULATED, reason="only the simulated GPU reports waits and copies")
def test_a_batch_goes_to_a_gpu_in_one_copy_without_a_wait(
    storage: MemmapStorage, device: str
) -> None:
    with storage.loader(500, seed=0, batches=10, device=device, workers=0) as loader:
        fakegpu.reset_counts()
        assert len([*loader]) == 10
        found = fakegpu.counts()
    assert {name: n for name, n in found.items() if name.startswith(("h2d", "d2h"))} == {
        "h2d_pinned_async": 10, "h2d_bytes": found["h2d_bytes"]
    }  # fmt: skip
    assert "waits" not in found


@on_gpu
def test_batches_of_other_objects_go_to_a_gpu_too(storage: MemmapStorage, device: str) -> None:
    """Only batches of plain tensors are packed."""
    here = TensorDict({"a": torch.arange(6).view(3, 2)}, [3])
    other = TensorDict({"b": here.clone(), "text": NonTensorData("text")}, [3], names=["row"])
    stack = LazyStackedTensorDict.lazy_stack([here[0], here[1]])
    for batch in (here, other, stack):
        with storage.loader(4, batches=1, device=device, transform=lambda _, b=batch: b) as loader:
            (there,) = loader
        assert type(there) is type(batch)
        assert (there.device.type, there.names) == (device, batch.names)
        assert (there.exclude("text").cpu() == batch.exclude("text")).all()
        assert batch is not other or there["text"] == "text"


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        (
            0,
            {},
            "batch: expected a number of rows above 0, or a function of a torch.Generator, got 0",
        ),
        (2.0, {}, "batch: expected a number of rows above 0"),
        (True, {}, "batch: expected a number of rows above 0"),
        (4, {"workers": -1}, "workers: expected a whole number of at least 0, got -1"),
        (4, {"workers": 1.5}, "workers: expected a whole number of at least 0, got 1.5"),
        (4, {"ahead": 0}, "ahead: expected a whole number of at least 1, got 0"),
        (4, {"seed": -1}, "seed: expected a whole number of at least 0, got -1"),
        (4, {"batches": 0}, "batches: expected a whole number of at least 1, got 0"),
        (4, {"transform": 3}, "transform: expected a function of a batch, or None, got 3"),
    ],
)
def test_loaders_that_cannot_be(
    storage: MemmapStorage, batch: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        storage.loader(batch, **options)
