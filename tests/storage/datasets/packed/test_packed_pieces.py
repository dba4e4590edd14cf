"""Test the pieces in which packing reads rows: consecutive wide rows are read in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallyroll.storage import MemmapStorage, fast_paths, open_storage
from tallyroll.storage.engine.kernel import compiled
from tallyroll.storage.ext.packed import column_writers, pack
from tallyroll.storage.ext.packed.column_writers import pieces
from tallyroll.storage.ext.packed.stacks import follows, same_bits
from tallyroll.storage.readers.file_reader import FileReader


@given(
    runs=st.lists(st.tuples(st.integers(0, 500), st.integers(1, 60)), max_size=8),
    row_nbytes=st.sampled_from([1, 1023, 1024, 2**17, 2**30]),
)
def test_pieces_are_all_rows_in_their_order(runs: Any, row_nbytes: int) -> None:
    rows = np.concatenate([np.zeros(0, np.int64), *(np.arange(a, a + n) for a, n in runs)])
    found = list(pieces(rows, row_nbytes))
    assert np.concatenate([rows[:0], *found]).tolist() == rows.tolist()
    most = max(1, column_writers._BLOCK_NBYTES // row_nbytes)
    assert all(1 <= len(piece) <= most for piece in found)
    if row_nbytes == 1:
        assert len(found) == min(1, len(rows))
    if row_nbytes == 1024:  # each long run is one piece
        cuts = np.flatnonzero(np.diff(rows) != 1) + 1
        long = [run.tolist() for run in np.split(rows, cuts) if len(run) >= 16]
        assert [piece.tolist() for piece in found if piece.tolist() in long] == long


@pytest.fixture
def storages(tmp_path: Path) -> Path:
    values = np.random.default_rng(0).integers(0, 255, (60, 2048), np.uint8)
    with MemmapStorage(tmp_path / "plain") as storage:
        storage.extend({("x",): values})
    with MemmapStorage(tmp_path / "ring", max_size=30) as storage:
        for start in (0, 30):
            storage.extend({("x",): values[start : start + 30]})
    return tmp_path


def test_wide_rows_are_not_copied(storages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring is the exception, alone or in a union.

    Its writer may overwrite rows while they are compressed.
    """
    shared: dict[str, set[bool]] = {}
    read = pack._read

    def watched(reader: Any, *args: Any) -> np.ndarray:
        found = read(reader, *args)
        source = reader if isinstance(reader, FileReader) else reader.members[-1].reader
        shared.setdefault(name, set()).add(np.shares_memory(found, source.column(("x",)).array))
        return found

    monkeypatch.setattr(pack, "_read", watched)
    for name in ("plain", "ring", "union"):
        source: Any = [storages / "ring"] if name == "union" else storages / name
        with open_storage(source) as storage:
            storage.pack(storages / f"{name}.packed")
            with open_storage(storages / f"{name}.packed") as packed:
                assert (packed.in_order()["x"] == storage.in_order()["x"]).all()
    assert shared == {"plain": {True}, "ring": {False}, "union": {False}}


@given(
    rows=st.integers(0, 5),
    n=st.integers(2, 4),
    frame=st.integers(1, 9),
    seed=st.integers(0, 2**32),
)
def test_rows_are_compared_alike_with_and_without_the_extension(
    rows: int, n: int, frame: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    before = generator.integers(0, 255, (rows, n, frame), np.uint8)
    after = np.concatenate([before[:, 1:], before[:, :1]], 1)
    for each in (before, after):  # some rows differ by one byte, at any position
        for row in np.flatnonzero(generator.integers(0, 2, rows)):
            each.reshape(rows, -1)[row, generator.integers(n * frame)] ^= 1
    equal = [before[row].tobytes() == after[row].tobytes() for row in range(rows)]
    moved = [before[row, 1:].tobytes() == after[row, :-1].tobytes() for row in range(rows)]
    for off in ((), ("kernel",)):
        with fast_paths.switched_off(*off):
            assert same_bits(before, after).tolist() == equal
            assert follows(before, after).tolist() == moved


@pytest.mark.skipif(compiled() is None, reason="the extension was not built")
def test_rows_that_cannot_be_compared() -> None:
    kernel = compiled()
    assert kernel is not None
    rows, same = np.zeros((3, 8), np.uint8), np.zeros(3, np.bool_)
    for one, other, skip in ((rows[:2], rows, 0), (rows, rows[:2], 0), (rows, rows, 9)):
        with pytest.raises(ValueError, match="differ in number or bytes"):
            kernel.same_rows(one, other, same, skip)
    with pytest.raises(ValueError, match="differ in number or bytes"):
        kernel.same_rows(rows, rows, same, -1)
    with pytest.raises((TypeError, BufferError, ValueError)):
        kernel.same_rows(rows[:, :4], rows[:, :4], same, 0)  # with gaps
    kernel.same_rows(rows[:0], rows[:0], same[:0], 0)
