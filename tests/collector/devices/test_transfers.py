"""Columns are packed for copies between the host and a device, and keep their bits."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tallyroll.storage.rows.transfers import ALONE_NBYTES, HOST, StagedBatch, move_columns

from devices_kit import SIMULATED, on_gpu

if SIMULATED:
    import fakegpu

DTYPES = [
    torch.bool, torch.uint8, torch.uint16, torch.float64, torch.complex128, torch.bfloat16,
    torch.int32, torch.float16, torch.int64, torch.uint64,
]  # fmt: skip


def columns() -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    numbers = torch.randn(5, 3, 2, generator=rng) * 50
    return {
        **{str(dtype): numbers.to(dtype) for dtype in DTYPES},
        "no rows": torch.zeros(0, 4),
        "no entries": torch.zeros(7, 0),
        "one number": torch.tensor(3.5),
        "transposed": torch.arange(12).view(3, 4).T,
        "NaN": torch.tensor([float("nan"), -0.0, float("inf")]),
    }


def bits(column: torch.Tensor) -> torch.Tensor:
    return column.contiguous().view(-1).view(torch.uint8)


@on_gpu
@pytest.mark.parametrize("staged", [False, True])
def test_columns_come_back_with_the_same_bits(staged: bool, device: str) -> None:
    here = columns()
    there = move_columns(here, torch.device(device))
    back = move_columns(there, HOST, staged=staged)
    assert list(back) == list(there) == list(here)
    for key, column in here.items():
        assert there[key].device.type == device
        assert (back[key].dtype, back[key].shape) == (column.dtype, column.shape)
        assert torch.equal(bits(back[key]), bits(column)), key
        assert back[key].is_pinned() is staged or not column.numel()


@on_gpu
def test_columns_that_are_there_are_not_copied(device: str) -> None:
    mixed = {"a": torch.zeros(3, device=device), "b": torch.zeros(3)}
    for place in (HOST, torch.device(device)):
        moved = move_columns(mixed, place)
        assert {column.device.type for column in moved.values()} == {place.type}
        assert sum(moved[key] is mixed[key] for key in mixed) == 1


@on_gpu
def test_a_large_column_keeps_no_other_alive(device: str) -> None:
    sizes = {"small": 10, "large": ALONE_NBYTES, "larger": 2 * ALONE_NBYTES, "other": 10}
    here = {key: torch.zeros(size, dtype=torch.uint8) for key, size in sizes.items()}
    there = move_columns(here, torch.device(device))
    for moved in (there, move_columns(there, HOST)):
        sizes_kept = [column.untyped_storage().nbytes() for column in moved.values()]
        assert sizes_kept == [20, ALONE_NBYTES, 2 * ALONE_NBYTES, 20]


@on_gpu
@pytest.mark.skipif(not SIMULATED, reason="only the simulated GPU counts copies")
def test_all_small_columns_take_one_copy_and_only_the_way_back_waits(device: str) -> None:
    here = columns()
    fakegpu.reset_counts()
    there = move_columns(here, torch.device(device))
    found = fakegpu.counts()
    assert found["h2d_pinned_async"] == 1
    assert "waits" not in found
    fakegpu.reset_counts()
    move_columns(there, HOST)
    found = fakegpu.counts()
    assert found["d2h_pageable"] == found["waits"] == 1


def test_columns_of_at_most_one_element_may_have_any_stride() -> None:
    columns = {
        "strided": torch.arange(6.0)[1::2][:1],
        "expanded": torch.tensor(3).expand(1),
        "empty": torch.tensor(3.0).expand(0),
        "one": torch.ones(1, dtype=torch.bool),
    }
    staged = StagedBatch.of(TensorDict(columns), HOST)
    assert staged is not None
    moved = staged.to(HOST)
    for key, column in columns.items():
        assert moved[key].dtype == column.dtype
        assert torch.equal(moved[key], column)
