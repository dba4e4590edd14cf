"""A `DeviceStorage` against a list of rows, and its errors."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from tallyroll.storage import DeviceStorage, MemmapStorage
from tallyroll.storage.errors import (
    BatchTooLong,
    ColumnsMissing,
    IndexOutOfRange,
    NotAnAppend,
    NotEnoughMemory,
    NotInitialised,
    NotPicklable,
    RowsMismatch,
    StorageClosed,
)
from tallyroll.storage.ext.device import device_rows
from tallyroll.storage.rows.dtypes import NUMPY

from devices_kit import ACCELERATOR, SIMULATED, here_and_there, on_gpu

if SIMULATED:
    import fakegpu

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in NUMPY}
ROW_NBYTES = sum(dtype.itemsize for dtype in DTYPES.values()) + 4 * 1000 + 8


def rows(start: int, stop: int, device: str = "cpu") -> TensorDict:
    """Return rows with a column of each dtype, and one of 4 kB."""
    numbers = torch.arange(start, stop)
    found = {name: (numbers % 120).to(dtype) for name, dtype in DTYPES.items()}
    wide = numbers[:, None].expand(-1, 1000).float()
    nested = {"wide": wide, "group": {"number": numbers}}
    return TensorDict({**found, "nested": nested}, [stop - start]).to(device)


def numbers_in(batch: TensorDictBase) -> torch.Tensor:
    """Return the number of each row, after a comparison of all its columns."""
    numbers = batch["nested", "group", "number"].cpu()
    for name, dtype in DTYPES.items():
        assert batch[name].dtype is dtype
        wanted = (numbers % 120).to(dtype)
        assert np.array_equal(_bits(batch[name].cpu()), _bits(wanted)), name
    wide = batch["nested", "wide"].cpu()
    assert (wide == numbers[..., None]).all()
    return numbers


def _bits(values: torch.Tensor) -> np.ndarray:
    return (values.view(torch.int16) if values.dtype is torch.bfloat16 else values).numpy()


@here_and_there
@pytest.mark.parametrize("source", ["cpu", "device"])
def test_rows_come_back_after_any_number_of_wraps(device: str, source: str) -> None:
    ring, head = DeviceStorage(max_size=7, device=device), 0
    place = device if source == "device" else "cpu"
    for count in (3, 4, 1, 7, 5, 2, 6, 7, 0, 7):
        assert ring.extend(rows(head, head + count, place)) == range(head, head + count)
        head += count
        valid = range(max(0, head - 7), head)
        assert (ring.span, ring.head, len(ring)) == (valid, head, len(valid))
        assert numbers_in(ring.in_order()).tolist() == [*valid]
        assert numbers_in(ring.get(slice(None))).tolist() == sorted(valid, key=lambda row: row % 7)
        assert ring.last_index == (head - 1) % 7
        assert numbers_in(ring.get(ring.last_index)).item() == head - 1
    assert ring.get(0).device.type == torch.device(device).type
    assert ring.nbytes == 7 * ring.schema.row_nbytes


@here_and_there
def test_every_form_of_index_selects_the_rows_of_a_storage_on_disk(device: str) -> None:
    with MemmapStorage(max_size=10) as disk, DeviceStorage(max_size=10, device=device) as ring:
        for storage in (disk, ring):
            storage.extend(rows(0, 10))
            storage.extend(rows(10, 13))
        mask = torch.arange(10) % 3 == 0
        indices: list[Any] = [
            *(0, -1, 9, slice(2, 8), slice(None, None, 3), slice(8, 2, -2), range(3), [1, -2]),
            *([], np.array([[4, 5], [6, -7]]), mask, mask.numpy(), torch.tensor(3)),
            *(torch.tensor([[1], [2]]), torch.tensor([2, 3], dtype=torch.uint8)),
        ]
        indices += [each.to(device) for each in indices if isinstance(each, torch.Tensor)]
        indices += [torch.tensor([-1, -10, 5]).to(device), torch.empty(0, dtype=int).to(device)]
        for index in indices:
            wanted = disk.get(index.cpu() if isinstance(index, torch.Tensor) else index)
            found = ring.get(index)
            assert found.batch_size == wanted.batch_size, index
            assert torch.equal(numbers_in(found), numbers_in(wanted)), index
        keys = ["uint16", ("nested", "group")]
        assert set(ring.get([1], [("nested", "wide"), "bool"]).keys(True, True)) == {
            "bool",
            ("nested", "wide"),
        }
        with pytest.raises(ColumnsMissing):
            ring.get([1], keys)


@here_and_there
@pytest.mark.parametrize("index", [[9], [-10], 9, torch.tensor([3, 9]), torch.tensor([-10, 0])])
def test_a_row_that_does_not_exist_is_refused(device: str, index: Any) -> None:
    ring = DeviceStorage(max_size=20, device=device)
    ring.extend(rows(0, 9))
    index = index.to(device) if isinstance(index, torch.Tensor) else index
    with pytest.raises(IndexOutOfRange, match=r"row (9|-10) is out of range: the"):
        ring.get(index)
    with pytest.raises(IndexOutOfRange, match="one value for each of the 9 rows"):
        ring.get(torch.ones(20, dtype=torch.bool, device=device))
    with pytest.raises(TypeError, match="whole numbers"):
        ring.get(torch.ones(3, device=device))


@on_gpu
def test_an_index_on_another_device_is_refused(device: str) -> None:
    ring = DeviceStorage(max_size=5, device="cpu")
    ring.extend(rows(0, 5))
    with pytest.raises(ValueError, match=rf"index: expected a tensor on cpu.* got one on {device}"):
        ring.get(torch.arange(3, device=device))


@pytest.mark.parametrize("count", [-1, 2.0, None, "3"])
def test_a_sample_of_no_number_of_rows_is_refused(count: Any) -> None:
    ring = DeviceStorage(max_size=5, device="cpu")
    ring.extend(rows(0, 5))
    with pytest.raises(ValueError, match="count: expected a number of rows, 0 or more, got"):
        ring.sample(count)
    assert len(ring.sample(np.int64(0))) == 0


@here_and_there
def test_an_emptied_ring_counts_its_indices_from_the_next_row(device: str) -> None:
    with MemmapStorage(max_size=7) as disk, DeviceStorage(max_size=7, device=device) as ring:
        buffers = [ReplayBuffer(storage=each, batch_size=3) for each in (ring, disk)]
        head = 0
        for count in (10, 0, 2, 4, 5, 0, 7, 3):
            for buffer in buffers:
                if count:
                    buffer.extend(rows(head, head + count))
                else:
                    buffer.empty()
            head += count
            assert (ring.span, len(ring), ring.last_index) == (
                *(disk.span, len(disk), disk.last_index),
            )
            found, wanted = (numbers_in(each.get(slice(None))) for each in (ring, disk))
            assert torch.equal(found, wanted)
            assert numbers_in(ring.in_order()).tolist() == [*ring.span]
        assert head == ring.head


# --- samples --------------------------------------------------------------------------------------


@here_and_there
def test_samples_are_uniform_and_repeatable(device: str) -> None:
    ring = DeviceStorage(max_size=8, device=device)
    ring.extend(rows(0, 5))
    generator = torch.Generator(device)
    found = [
        numbers_in(ring.sample(2000, generator=generator.manual_seed(seed))) for seed in (1, 1, 2)
    ]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert (found[0].bincount() > 300).all()
    assert len(found[0].unique()) == 5
    assert ring.sample(3, ["int8"]).device == ring.device
    on_host = ring.sample(3, generator=torch.Generator().manual_seed(1))
    assert on_host.device == ring.device


@here_and_there
@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_a_replay_buffer_of_torchrl_draws_rows(device: str, kind: Any) -> None:
    ring = DeviceStorage(max_size=8, device=device)
    buffer = kind(storage=ring, batch_size=64)
    for start in range(0, 15, 5):
        buffer.extend(rows(start, start + 5, device))
    buffer.add(rows(15, 16)[0])
    assert set(numbers_in(buffer.sample()).tolist()) == set(range(8, 16))
    assert len(buffer) == 8
    assert numbers_in(buffer[:]).tolist() == [8, 9, 10, 11, 12, 13, 14, 15]
    with pytest.raises(NotAnAppend, match="Stored rows can only be appended"):
        ring.set(5, rows(0, 1))


@pytest.mark.gpu
@pytest.mark.skipif(not SIMULATED, reason="only the simulated GPU reports waits")
def test_extending_and_sampling_wait_for_no_device() -> None:
    ring = DeviceStorage(max_size=300, device=ACCELERATOR)
    buffer = ReplayBuffer(storage=ring, batch_size=32)
    here, there = rows(0, 100), rows(0, 100, ACCELERATOR)
    ring.extend(there)
    fakegpu.reset_counts()
    for _ in range(5):
        ring.extend(there)
        buffer.extend(there)
        ring.sample(16)
        buffer.sample()
        ring.get(slice(3, 9))
        ring.get(np.arange(5))
        ring.get(2)
    counts = fakegpu.counts()
    assert counts.get("waits", 0) == 0, counts
    ring.get(torch.arange(5, device=ACCELERATOR))
    assert fakegpu.counts()["waits"] == 1
    fakegpu.reset_counts()
    ring.extend(here)  # small columns in one copy
    counts = fakegpu.counts()
    assert counts.get("waits", 0) == 0, counts
    assert sum(each for name, each in counts.items() if name.startswith("h2d_p")) == 1, counts


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["nothing", "meta", "cuda:99", 1.5, None])
def test_a_device_that_does_not_exist_is_refused(device: Any) -> None:
    if device is None:
        with pytest.raises(TypeError, match="device"):
            DeviceStorage(max_size=5)  # type: ignore[call-arg]
        return
    with pytest.raises(ValueError, match=r"device: expected a device .*Choose another device\."):
        DeviceStorage(max_size=5, device=device)


@pytest.mark.parametrize("size", [0, -1, 2.0, True, None])
def test_a_size_that_is_no_number_of_rows_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match="max_size: expected a positive number of rows, got"):
        DeviceStorage(max_size=size, device="cpu")


def test_a_ring_larger_than_the_memory_is_refused_before_it_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = rows(0, 1)
    ring = DeviceStorage(max_size=10**12, device="cpu")
    with pytest.raises(NotEnoughMemory, match=r"at most [\d,]+ rows.* got 1,000,000,000,000 rows"):
        ring.extend(row)
    assert ring.head == 0
    with pytest.raises(NotInitialised):
        _ = ring.schema
    monkeypatch.setattr(device_rows, "free_bytes", lambda device: None)
    with pytest.raises(NotEnoughMemory, match=r"which cpu cannot allocate \(.*Make max_size small"):
        DeviceStorage(max_size=10**13, device="cpu").extend(row)
    nbytes = 10 * ROW_NBYTES
    monkeypatch.setattr(device_rows, "free_bytes", lambda device: nbytes)
    DeviceStorage(max_size=10, device="cpu").extend(row)
    with pytest.raises(NotEnoughMemory, match=rf"{nbytes:,} bytes are free on cpu, got 11 rows"):
        DeviceStorage(max_size=11, device="cpu").extend(row)


def _changed(**columns: Any) -> TensorDict:
    found = rows(0, 3)
    for name, value in columns.items():
        found = found.set(name, value) if value is not None else found.exclude(name)
    return found


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (_changed(int8=None), "int8 is missing, expected torch.int8"),
        (_changed(more=torch.zeros(3)), "more is not a column here"),
        (_changed(int8=torch.zeros(3)), r"int8 is torch.float32 \[\], expected torch.int8 \[\]"),
        (_changed(int8=torch.zeros(3, 2).char()), r"int8 is torch.int8 \[2\], expected"),
        (rows(0, 1)[0], r"expected a batch size \[N\], got \[\]"),
        ({"int8": torch.zeros(3)}, "expected a TensorDict"),
    ],
)
def test_rows_of_another_schema_are_refused(wrong: Any, named: str) -> None:
    ring = DeviceStorage(max_size=5, device="cpu")
    ring.extend(rows(0, 4))
    with pytest.raises(RowsMismatch, match=named):
        ring.extend(wrong)
    assert numbers_in(ring.in_order()).tolist() == [0, 1, 2, 3]


def test_rows_of_gradients_and_conjugates_become_values() -> None:
    ring = DeviceStorage(max_size=4, device="cpu")
    values = torch.randn(3, requires_grad=True)
    conjugate = torch.randn(3, dtype=torch.complex64).conj()
    ring.extend(TensorDict({"x": values * 2, "y": conjugate}, [3]))
    found = ring.in_order()
    assert not found["x"].requires_grad
    assert torch.equal(found["x"], values.detach() * 2)
    assert torch.equal(found["y"], conjugate.resolve_conj())


def test_more_rows_than_slots_are_refused_but_a_buffer_keeps_the_last_ones() -> None:
    ring = DeviceStorage(max_size=4, device="cpu")
    with pytest.raises(BatchTooLong, match="at most 4 rows at once"):
        ring.extend(rows(0, 5))
    ReplayBuffer(storage=ring).extend(rows(0, 10))
    assert numbers_in(ring.in_order()).tolist() == [6, 7, 8, 9]


def test_an_interrupted_write_invalidates_the_rows_that_it_overwrote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ring = DeviceStorage(max_size=6, device="cpu")
    ring.extend(rows(0, 6))
    ring.extend(rows(6, 8))
    real, calls = torch.Tensor.copy_, iter(range(9))

    def interrupted(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return real(self, source)

    monkeypatch.setattr(torch.Tensor, "copy_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ring.extend(rows(8, 10))
    monkeypatch.undo()
    assert ring.span == range(4, 8)
    assert numbers_in(ring.in_order()).tolist() == [4, 5, 6, 7]
    assert numbers_in(ring.get(slice(None))).tolist() == [4, 5, 6, 7]
    for head in range(8, 14):
        ring.extend(rows(head, head + 1))
        assert numbers_in(ring.in_order()).tolist() == [*ring.span]
        assert numbers_in(ring.get(ring.last_index)).item() == head
    assert ring.span == range(8, 14)


def test_a_storage_without_rows_says_so() -> None:
    ring = DeviceStorage(max_size=4, device="cpu")
    assert (len(ring), ring.span, ring.head, ring.nbytes, ring.last_index) == (
        *(0, range(0), 0, 0, None),
    )
    with pytest.raises(IndexOutOfRange, match="has no rows yet to draw from"):
        ring.sample(3)
    for read in (ring.in_order, lambda: ring.get(slice(None)), lambda: ring.schema):
        with pytest.raises(NotInitialised, match="has no rows and no schema yet"):
            read()
    with pytest.raises(RuntimeError):
        ReplayBuffer(storage=ring, batch_size=3).sample()


def test_a_closed_storage_releases_its_memory_and_refuses_everything() -> None:
    with DeviceStorage(max_size=4, device="cpu") as ring:
        ring.extend(rows(0, 4))
        column = weakref.ref(ring.reader._columns["int8",])
    assert column() is None
    assert ring.closed
    assert ring.head == 4
    for use in (ring.in_order, lambda: ring.get(0), lambda: ring.sample(1),
                lambda: ring.extend(rows(0, 1)), lambda: ring.set(0, rows(0, 1))):  # fmt: skip
        with pytest.raises(StorageClosed, match="its rows are gone"):
            use()
    ring.close()


def test_a_dropped_storage_releases_its_memory_at_once() -> None:
    ring = DeviceStorage(max_size=4, device="cpu")
    ring.extend(rows(0, 4))
    reader = weakref.ref(ring.reader)
    gc.collect()
    gc.disable()
    try:
        del ring
        assert reader() is None
    finally:
        gc.enable()


def test_states_and_copies_are_refused() -> None:
    ring = DeviceStorage(max_size=4, device="cpu")
    ring.extend(rows(0, 4))
    buffer = ReplayBuffer(storage=ring, batch_size=2)
    saves: list[Any] = [
        *(ring.state_dict, lambda: ring.dumps("x"), lambda: ring.loads("x")),
        *(lambda: ring.load_state_dict({}), lambda: pickle.dumps(ring)),
        *(lambda: copy.deepcopy(ring), buffer.state_dict, lambda: buffer.dumps("x")),
    ]
    for save in saves:
        with pytest.raises(NotPicklable, match="only in the memory of this process"):
            save()
