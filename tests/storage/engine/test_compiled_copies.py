"""Test that the compiled functions that copy and commit rows match their Python fallbacks."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from fast_paths_kit import built
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from tallyroll.storage import MemmapStorage, fast_paths
from tallyroll.storage.engine.columns import FixedRows, IndexedRows
from tallyroll.storage.engine.kernel import Kernel, compiled, table_of
from tallyroll.storage.files.commit_header import CommitCounts
from tallyroll.storage.rows.schema import Schema


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    """Return the compiled functions, which exist if a compiler was available."""
    return built(compiled())


@pytest.mark.parametrize("nbytes", [1, 2, 3, 4, 8, 12, 16, 32, 40, 5000])
@pytest.mark.parametrize("count", [1, 7, 300])
def test_rows_are_copied_and_gathered(kernel: Kernel, nbytes: int, count: int) -> None:
    rng = np.random.default_rng(nbytes)
    source = rng.integers(0, 256, (400, nbytes), np.uint8)
    other = rng.integers(0, 256, (400, 8), np.uint8)
    for index in (range(30, 30 + count), rng.permutation(400)[:count]):
        targets = [np.zeros((count + 9, each.shape[1]), np.uint8) for each in (source, other)]
        words = zip(
            [each.ctypes.data for each in targets],
            [source.ctypes.data, other.ctypes.data],
            [nbytes, 8],
            strict=True,
        )
        table = table_of(chain.from_iterable(words))
        if isinstance(index, range):
            kernel.copy_rows(table, 5, index.start, count)
        else:
            kernel.gather_rows(table, 5, index, 400)
        for target, rows in zip(targets, (source, other), strict=True):
            assert (target[5 : 5 + count] == rows[np.asarray(index)]).all()
            assert not target[:5].any()
            assert not target[5 + count :].any()


@given(data=st.data())
def test_runs_are_packed(kernel: Kernel, data: Any) -> None:
    """Runs are packed column by column for each part, as NumPy concatenates them."""
    kinds = st.sampled_from([1, 2, 3, 4, 8, 16, 32, 40])
    sizes = data.draw(st.lists(kinds, min_size=1, max_size=4))
    columns = [np.arange(20 * size, dtype=np.uint8).reshape(20, size) for size in sizes]
    run = st.integers(0, 19).flatmap(lambda at: st.tuples(st.just(at), st.integers(1, 20 - at)))
    parts = data.draw(st.lists(st.lists(run, max_size=5), max_size=4))
    wanted = [
        column[slot : slot + count].tobytes()
        for part in parts
        for column in columns
        for slot, count in part
    ]
    runs = np.array([each for part in parts for each in part], np.int64).reshape(-1, 2)
    rows = int(runs[:, 1].sum())
    room = np.zeros(rows * sum(sizes) + 9, np.uint8)
    words = zip([room.ctypes.data] * 4, (each.ctypes.data for each in columns), sizes, strict=False)
    table, lengths = table_of(chain.from_iterable(words)), np.array([*map(len, parts)], np.int64)
    kernel.pack_runs(table, runs, lengths, 20, rows)
    assert room.tobytes() == b"".join(wanted) + bytes(9)


@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=12), ring=st.sampled_from([0, 16]))
def test_commits_are_alike(
    kernel: Kernel, tmp_path_factory: pytest.TempPathFactory, counts: list[int], ring: int
) -> None:
    """Every byte of the header is equal, and so are the rows."""
    rng = np.random.default_rng(0)
    arrays: dict[Any, np.ndarray] = {
        ("a",): rng.random((40, 3)),
        ("b",): rng.integers(0, 9, 40),
        ("c",): rng.random(40) < 0.5,
    }
    rows = TensorDict({key: torch.from_numpy(array) for key, array in arrays.items()}, [40])
    found = []
    for off in ((), ("kernel",)):
        path = tmp_path_factory.mktemp("rows") / "rows"
        with fast_paths.switched_off(*off), MemmapStorage(path, max_size=ring or None) as storage:
            storage.initialise(Schema.of(rows))
            fixed = FixedRows(storage.schema, arrays)
            for first, count in enumerate(counts):
                index = range(first, first + count)
                storage.writer.append(IndexedRows(fixed, index), b"of %d" % first)
            header = np.fromfile(path / "tallyroll.header", np.uint8)
            header[192:224] = 0  # which file it is
            columns = [storage.column(key).tobytes() for key in arrays]
            found.append((storage.head, storage.record, header.tobytes(), columns))
    assert found[0] == found[1]
    assert found[0][0] == sum(counts)


def test_wrong_arguments_are_errors(kernel: Kernel) -> None:
    anything: Any = kernel
    with pytest.raises(TypeError):
        anything.copy_rows(b"")
    with pytest.raises(ValueError, match="too short"):
        anything.copy_rows(b"12345678", 0, 0, 1)
    with pytest.raises(ValueError, match="too short"):
        anything.commit_rows(bytes(24), 0, 0, 1, bytes(24), CommitCounts().address, b"")
    with pytest.raises(TypeError):
        anything.commit_rows(bytes(24), 0, 0, 1, bytes(32), CommitCounts().address, "text")
    for wrong in ([0, 4], [-1, 0], [2**62, 1]):
        with pytest.raises(IndexError):
            anything.gather_rows(bytes(24), 0, np.array(wrong), 4)
    for runs, parts, most in (
        ([0, 5], [1], 9),  # beyond the rows
        ([4, 1], [1], 9),
        ([-1, 1], [1], 9),
        ([2**62, 2**62], [1], 9),
        ([0, 0], [1], 9),
        ([0, 3], [1], 2),  # more than the free space
        ([0, 2, 0, 1], [2], 2),
        ([0, 1], [2], 9),  # parts that belong to other runs
        ([0, 1], [], 9),
        ([0, 1], [2, -1], 9),
    ):
        with pytest.raises(IndexError):
            anything.pack_runs(bytes(24), np.array(runs), np.array(parts, np.int64), 4, most)
    with pytest.raises(TypeError):
        anything.pack_runs(bytes(24), np.array([0, 1]), "text", 4, 9)
    with pytest.raises(TypeError):
        anything.pack_runs(bytes(24), 1, np.array([1]), 4, 9)
