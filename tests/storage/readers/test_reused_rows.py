"""Compare batches read into reused memory with the results of `get`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from tallyroll.storage import (
    DiskStorage,
    H5Storage,
    MemmapStorage,
    RowReader,
    ZarrStorage,
    fast_paths,
    open_storage,
)
from tallyroll.storage.engine import kernel
from tallyroll.storage.errors import (
    ColumnsMissing,
    IndexOutOfRange,
    NotEnoughMemory,
    NotInitialised,
    StorageClosed,
)
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows
from tallyroll.storage.stores.rewinds import rewind_to

COUNT = 16


def grown(path: Path) -> Iterator[DiskStorage]:
    with MemmapStorage(path) as storage:
        storage.extend(trajectory_rows(0, 40, steps=5))
        yield storage


def ring(path: Path, rows: int, emptied: int = 0) -> Iterator[DiskStorage]:
    with MemmapStorage(path, max_size=30) as storage:
        for start in range(0, emptied + rows, 5):
            if start == emptied > 0:
                storage._empty()
            storage.extend(trajectory_rows(start, 5, steps=5))
        yield storage


def rewound(path: Path) -> Iterator[DiskStorage]:
    with MemmapStorage(path, max_size=30) as storage:
        storage.extend(trajectory_rows(0, 25, steps=5))
        storage.extend(trajectory_rows(25, 25, steps=5))
        rewind_to(storage.writer, 45, None)
        yield storage


def torn(path: Path) -> Iterator[DiskStorage]:
    """Leave a ring as an append that failed half-way: five slots may have other rows."""
    for storage in ring(path, 75):
        header = storage.reader.running().counts._header  # type: ignore[attr-defined]
        header.set_reserve(header.head + 5)
        yield storage


def other(path: Path, kind: type[DiskStorage]) -> Iterator[DiskStorage]:
    with kind(path, capacity=40) as storage:
        storage.extend(trajectory_rows(0, 40, steps=5))
        yield storage


def read(path: Path, slots: int | None) -> Iterator[DiskStorage]:
    """Read while the writer adds rows."""
    with MemmapStorage(path, max_size=slots) as writer:
        writer.extend(trajectory_rows(0, 20, steps=5))
        with open_storage(path) as storage:
            writer.extend(trajectory_rows(20, 20, steps=5))
            yield storage


CASES: dict[str, Any] = {
    "grown": grown,
    "ring, part": lambda path: ring(path, 20),
    "ring, full": lambda path: ring(path, 75),
    "ring, emptied": lambda path: ring(path, 20, emptied=40),
    "ring, emptied and full": lambda path: ring(path, 45, emptied=40),
    "ring, rewound": rewound,
    "ring, torn": torn,
    "h5": lambda path: other(path.with_suffix(".h5"), H5Storage),
    "zarr": lambda path: other(path.with_suffix(".zarr"), ZarrStorage),
    "reader": lambda path: read(path, None),
    "reader of a ring": lambda path: read(path, 30),
}


@contextmanager
def opened(name: str, path: Path) -> Iterator[DiskStorage]:
    yield from CASES[name](path)


def forms(index: np.ndarray) -> list[Any]:
    """Return the same index in all forms."""
    twice = np.repeat(index, 2)
    tensor = torch.from_numpy(index)
    return [index, tensor, index.tolist(), index.astype(np.int32), twice[::2], tensor.int()]


@pytest.mark.parametrize("off", [(), ("kernel",)])
@pytest.mark.parametrize("name", CASES)
def test_it_has_the_rows_that_get_returns(name: str, off: tuple[str, ...], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with fast_paths.switched_off(*off), opened(name, tmp_path / "r") as storage:
        reused = storage.reused(COUNT)
        tensors = {key: value.data_ptr() for key, value in reused.rows.items(True, True)}
        for _ in range(3):
            index = rng.integers(len(storage), size=COUNT)
            for form in [*forms(index), *forms(index - len(storage)), slice(2, 2 + COUNT)]:
                wanted = storage.get(form)
                for array in reused.arrays.values():
                    array.fill(1)
                assert storage.get(form, out=reused) is reused.rows
                assert (reused.rows == wanted).all()
                assert reused.rows.batch_size == wanted.batch_size
        found = {key: value.data_ptr() for key, value in reused.rows.items(True, True)}
        assert found == tensors


@pytest.mark.parametrize("name", ["grown", "ring, part", "ring, full", "reader", "h5"])
def test_it_is_copied_in_one_call(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel.compiled() is None:
        pytest.skip("there is no extension")
    with opened(name, tmp_path / "r") as storage:
        reused, index = storage.reused(COUNT), np.arange(COUNT)
        wanted = storage.get(index)
        monkeypatch.delattr(RowReader, "get_into")
        for form in (index, torch.from_numpy(index)):
            reused.rows.zero_()
            assert (storage.get(form, out=reused) == wanted).all()


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(index=st.lists(st.integers(-60, 60), min_size=1, max_size=8), count=st.integers(1, 8))
@pytest.mark.parametrize("name", ["grown", "ring, full", "ring, emptied", "reader of a ring"])
def test_what_is_wrong_is_told_as_without_it(
    name: str, index: list[int], count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with opened(name, tmp_path_factory.mktemp("r") / "r") as storage:
        reused = storage.reused(count)
        for form in (np.array(index), torch.tensor(index)):
            if any(not -len(storage) <= each < len(storage) for each in index):
                with pytest.raises(IndexOutOfRange, match=r"row -?\d+ is out of range"):
                    storage.get(form, out=reused)
            elif len(index) != count:
                message = (
                    rf"out: expected space for the \[{len(index)}\] rows of the index, got {count}"
                )
                with pytest.raises(ValueError, match=message):
                    storage.get(form, out=reused)
            else:
                assert (storage.get(form, out=reused) == storage.get(form)).all()


def test_some_columns_and_overlays(tmp_path: Path) -> None:
    keys: Any = [("next", "reward"), "observation"]
    with MemmapStorage(tmp_path / "r") as storage:
        storage.extend(trajectory_rows(0, 40, steps=5))
        value = storage.overlay("value", torch.float32)
        value.set(np.arange(10), np.arange(10, dtype=np.float32))
        index = np.arange(3, 3 + COUNT)
        some, more = storage.reused(COUNT, keys), storage.reused(COUNT, [*keys, "value"])
        assert {*some.arrays} == {("next", "reward"), ("observation",)}
        assert (storage.get(index, out=some) == storage.get(index, keys)).all()
        assert (storage.get(index, out=more) == storage.get(index, [*keys, "value"])).all()
        assert more.rows["value"][:7].flatten().tolist() == [*range(3, 10)]
        shown = storage.with_overlays("value")
        every = shown.reused(COUNT)
        assert (shown.get(index, out=every) == shown.get(index)).all()
        assert "value" in every.rows.keys()
        with pytest.raises(ColumnsMissing):
            storage.reused(COUNT, ["nothing"])
        with pytest.raises(ValueError, match="expected keys or out, got both"):
            storage.get(index, keys, out=some)


def test_bits_and_batch_dimensions(tmp_path: Path) -> None:
    rows = TensorDict(
        {
            "half": torch.randn(20, 3).bfloat16(),
            "of": TensorDict({"agents": torch.randn(20, 4, 2)}, [20, 4]),
        },
        [20],
    )
    with MemmapStorage(tmp_path / "r") as storage:
        storage.extend(rows)
        found = storage.get(torch.arange(4, 9), out=storage.reused(5))
        assert found["of"].batch_size == (5, 4)
        assert found["half"].dtype is torch.bfloat16
        assert (found == rows[4:9]).all()


def test_it_is_of_storages_with_these_columns(tmp_path: Path) -> None:
    index = np.arange(COUNT)
    with MemmapStorage(tmp_path / "a") as one, MemmapStorage(tmp_path / "b") as other:
        one.extend(trajectory_rows(0, 40, steps=5))
        other.extend(trajectory_rows(7, 40, steps=5))
        reused = one.reused(COUNT)
        assert (other.get(index, out=reused) == other.get(index)).all()
    with MemmapStorage(tmp_path / "c") as wide:
        wide.extend(trajectory_rows(0, 40, steps=5).double())
        with pytest.raises(
            ValueError,
            match=r"out: expected float64 .*got float32 \[1\]\. .*made for another storage",
        ):
            wide.get(index, out=reused)
    with MemmapStorage(tmp_path / "e") as deep:
        rows = trajectory_rows(0, 40, steps=5)
        deep.extend(rows.set("observation", rows["observation"].expand(40, 3)))
        with pytest.raises(
            ValueError, match=r"expected float32 \[3\] in column observation, got float32 \[1\]"
        ):
            deep.get(index, out=reused)
        narrow = MemmapStorage(tmp_path / "f")
        narrow.extend(trajectory_rows(0, 40, steps=5))
        with (
            narrow,
            pytest.raises(
                ValueError, match=r"expected float32 \[1\] in column observation, got float32 \[3\]"
            ),
        ):
            narrow.get(index, out=deep.reused(COUNT))
    with MemmapStorage(tmp_path / "d") as less:
        less.extend(trajectory_rows(0, 40, steps=5).select("observation"))
        with pytest.raises(ColumnsMissing):
            less.get(index, out=reused)


def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemmapStorage(tmp_path / "r")
    with pytest.raises(NotInitialised):
        storage.reused(3)
    storage.extend(trajectory_rows(0, 40, steps=5))
    for wrong in (0, -1, 2.0, True, None):
        with pytest.raises(ValueError, match="rows: expected a positive number"):
            storage.reused(wrong)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="lock"):
        storage.reused(3).rows["observation"] = torch.zeros(3, 1)
    with monkeypatch.context() as patched:
        patched.setattr("tallyroll.storage.engine.available_memory.available_bytes", lambda: 2**20)
        with pytest.raises(NotEnoughMemory, match="a batch of 1000000 rows"):
            storage.reused(10**6)
    with pytest.raises(TypeError, match="out: expected the result of reused"):
        storage.get([1, 2, 3], out=storage[:3])
    reused = storage.reused(3)
    storage.close()
    with pytest.raises(StorageClosed):
        storage.get(np.arange(3), out=reused)
