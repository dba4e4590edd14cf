"""Slices of columns that are stored once decode nothing before a column is read."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tallyroll.storage import MemmapStorage, NotEnoughMemory
from tallyroll.storage.engine import available_memory, frame_pools
from tallyroll.storage.rows.deferred_tensor import DeferredTensor

VALUES = torch.arange(12, dtype=torch.int64).reshape(4, 3)


def deferred() -> tuple[DeferredTensor, list[int]]:
    """Return a deferred tensor, and a list that counts how often it is read."""
    reads: list[int] = []

    def make() -> torch.Tensor:
        reads.append(1)
        return VALUES.clone()

    return DeferredTensor(make, VALUES.shape, VALUES.dtype), reads


def test_metadata_reads_nothing() -> None:
    tensor, reads = deferred()
    rows = TensorDict({"a": tensor, "b": torch.zeros(4)}, [4])
    assert (tensor.shape, tensor.dtype, len(tensor)) == (VALUES.shape, VALUES.dtype, 4)
    assert (tensor.size(0), tensor.dim(), tensor.numel(), tensor.ndim) == (4, 2, 12, 2)
    assert tensor.device.type == "cpu"
    assert "a: DeferredTensor(shape=torch.Size([4, 3])" in repr(rows)
    assert list(rows.keys(True, True)) == ["a", "b"]
    assert rows["b"].sum() == 0
    assert list(rows.select("b").keys()) == list(rows.exclude("a").keys()) == ["b"]
    assert not tensor.is_read
    assert reads == []
    assert tensor.sum() == 66
    assert tensor.is_read


USES: list[Callable[[TensorDict], Any]] = [
    lambda rows: rows["a"] + 0,
    lambda rows: rows["a"].numpy(),
    lambda rows: np.asarray(rows["a"]),
    lambda rows: torch.tensor(rows["a"].tolist()),
    lambda rows: torch.cat([rows["a"][:1], rows["a"][1:]]),
    lambda rows: torch.stack(list(rows["a"])),
    lambda rows: rows[torch.arange(4)]["a"],
    lambda rows: rows.clone()["a"],
    lambda rows: rows.contiguous()["a"],
    lambda rows: rows.to("cpu", torch.int64)["a"],
    lambda rows: rows.reshape(2, 2).reshape(4)["a"],
    lambda rows: torch.cat([rows[:2], rows[2:]])["a"],
    lambda rows: pickle.loads(pickle.dumps(rows))["a"],
    lambda rows: copy.deepcopy(rows)["a"],
    lambda rows: rows.memmap()["a"],
]


@pytest.mark.parametrize("use", USES)
def test_each_use_gets_the_values(use: Callable[[TensorDict], Any]) -> None:
    tensor, reads = deferred()
    found = use(TensorDict({"a": tensor}, [4]))
    np.testing.assert_array_equal(np.asarray(found), VALUES.numpy())
    assert type(found) is not DeferredTensor
    assert reads == [1]


def test_code_below_the_functions_of_torch_gets_the_values() -> None:
    tensor, reads = deferred()
    with torch._C.DisableTorchFunctionSubclass():
        assert (tensor + 1).sum() == 78
    assert reads == [1]


def test_changes_are_kept() -> None:
    tensor, reads = deferred()
    rows = TensorDict({"a": tensor}, [4])
    rows["a"][1] = 7
    rows["a"][2:].zero_()
    rows["a"].add_(1)
    np.testing.assert_array_equal(rows["a"].numpy(), [[1, 2, 3], [8, 8, 8], [1] * 3, [1] * 3])
    assert reads == [1]


# --- slices of storages ---------------------------------------------------------------------------


def rows_of(count: int) -> TensorDict:
    frames = torch.arange(count + 1).to(torch.uint8)[:, None, None].expand(-1, 40, 40).contiguous()
    return TensorDict(
        {
            "observation": frames[:-1],
            "next": {"observation": frames[1:], "reward": torch.arange(count)},
        },
        [count],
    )


@pytest.fixture(autouse=True)
def _every_column_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available_memory, "_LITTLE_NBYTES", 1000)


@pytest.mark.parametrize("ring", [None, 50])
def test_slices_decode_columns_that_are_read(
    ring: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MemmapStorage(tmp_path / "rows", max_size=ring, once=True) as storage:
        storage.extend(rows_of(40))
        found = storage[:]
        part = storage[3:30:4]
        decoded: list[Any] = []
        original = frame_pools.PoolFile.read
        monkeypatch.setattr(
            frame_pools.PoolFile,
            "read",
            lambda self, *given, **more: decoded.append(1) or original(self, *given, **more),
        )
        assert found["next", "reward"].tolist() == list(range(40))
        assert found.shape == (40,)
        assert decoded == []
        assert torch.equal(found["observation"] + 0, rows_of(40)["observation"])
        assert decoded == [1]
        found["observation"].zero_()
        assert decoded == [1]
        assert storage[5]["observation"].max() == 5
    # The storage is closed.
    assert torch.equal(part["next", "observation"] + 0, rows_of(40)["next", "observation"][3:30:4])
    assert torch.equal(found["next", "observation"] + 0, rows_of(40)["next", "observation"])


def test_rows_of_a_slice_are_appended_to_other_storages(tmp_path: Path) -> None:
    with (
        MemmapStorage(tmp_path / "one", max_size=50, once=True) as one,
        MemmapStorage(tmp_path / "other", max_size=100) as other,
    ):
        one.extend(rows_of(40))
        other.extend(one[:])
        other.extend(one[10:20])
        one.extend(one[30:])
        expected = [*range(40), *range(10, 20)]
        assert other["observation"][:, 0, 0].tolist() == expected
        assert one["observation"][:, 0, 0].tolist() == [*range(40), *range(30, 40)]


@pytest.mark.parametrize("seed", range(3))
def test_a_ring_appends_slices_of_itself(seed: int, tmp_path: Path) -> None:
    """Rows of a slice are those of the call, although the append overwrites them."""
    rng = np.random.default_rng(seed)
    with (
        MemmapStorage(tmp_path / "one", max_size=50, once=True) as one,
        MemmapStorage(tmp_path / "plain", max_size=50) as plain,
    ):
        for storage in (one, plain):
            storage.extend(rows_of(50))
        for _ in range(20):
            start, stop = sorted(rng.integers(0, 51, 2).tolist())
            for storage in (one, plain):
                if stop > start:
                    storage.extend(storage[start:stop])
            for key in ("observation", ("next", "observation"), ("next", "reward")):
                assert torch.equal(one.in_order()[key], plain.in_order()[key])


def test_only_a_read_of_too_many_rows_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MemmapStorage(tmp_path / "rows", once=True) as storage:
        storage.extend(rows_of(40))
        monkeypatch.setattr(frame_pools, "available_bytes", lambda: 2 * 40 * 1600 - 1)
        found = storage[:]
        assert found["next", "reward"].sum() == 780
        with pytest.raises(NotEnoughMemory, match="a copy of these 40 rows"):
            found["observation"].sum()
        monkeypatch.setattr(frame_pools, "available_bytes", lambda: 2 * 40 * 1600)
        assert found["observation"].sum() == 1600 * 780
