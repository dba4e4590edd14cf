"""Test that rows still located elsewhere reach every format as copies of them would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tallyroll.storage import MemmapStorage, Schema, open_storage
from tallyroll.storage.errors import RowsMismatch
from tallyroll.storage.rows.row_refs import LARGE_NBYTES, RowRefs
from tallyroll.storage.storages import storage_class

SHAPE = (37, 41, 3)
"""4,551 bytes of uint8."""
PATHS = ("rows", "rows.h5", "rows.zarr")
IMAGE, SMALL, WIDE = ("next", "img"), ("number",), ("wide",)
SIZES = (1, 3, 4, 57, 58, 200, 2, 115, 31)
"""Sizes around the limits of a write through the map (16 KiB) and of one gather (256 KiB)."""


def gathered(rng: np.random.Generator, count: int, sources: int, large: bool = True) -> RowRefs:
    """Return random rows of random sources, in runs like those of a batch's lanes."""
    shape = SHAPE if large else (2,)
    found = [
        rng.integers(0, 256, (int(rng.integers(1, 9)), *shape), np.uint8) for _ in range(sources)
    ]
    if sources == 1:
        return RowRefs(found, rng.integers(0, len(found[0]), count))
    origin = np.repeat(rng.integers(0, sources, count), rng.integers(1, 4, count))[:count]
    index = np.array([rng.integers(0, len(found[each])) for each in origin], np.intp)
    return RowRefs(found, index, origin)


def plain(rows: RowRefs) -> np.ndarray:
    """Copy row by row."""
    origin = np.zeros(len(rows), int) if rows.origin is None else rows.origin
    each = [rows.sources[o][i] for o, i in zip(origin, rows.index, strict=True)]
    return np.array(each, rows.dtype).reshape(rows.shape)


@pytest.mark.parametrize("seed", range(20))
def test_gathered_rows_are_what_a_loop_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, sources = int(rng.integers(0, 30)), int(rng.integers(1, 4))
    rows = gathered(rng, count, sources, large=False)
    wanted = plain(rows)
    assert (len(rows), rows.shape, rows.dtype) == (count, (count, 2), np.dtype(np.uint8))
    assert rows.nbytes == wanted.nbytes
    assert np.array_equal(np.asarray(rows), wanted)
    out = np.full((count + 2, 2), 7, np.uint8)
    rows.copy_to(out[1 : 1 + count])
    assert np.array_equal(out[1:-1], wanted)
    assert (out[[0, -1]] == 7).all()
    start, stop = sorted(rng.integers(0, count + 1, 2).tolist())
    assert np.array_equal(np.asarray(rows[start:stop]), wanted[start:stop])
    parts = [
        gathered(rng, int(rng.integers(1, 9)), int(rng.integers(1, 4)), False) for _ in range(3)
    ]
    every = np.concatenate([plain(part) for part in parts])
    order = rng.permutation(len(every))
    joined = RowRefs.joined(parts, order)
    assert np.array_equal(np.asarray(joined), every[order])
    again = RowRefs.joined([joined, rows], np.arange(len(joined) + count)[::-1])
    assert np.array_equal(np.asarray(again), np.concatenate([every[order], wanted])[::-1])


def batch(rng: np.random.Generator, count: int, contiguous: bool = True) -> dict[Any, Any]:
    """Return rows to gather: small ones, and large ones of which every second is left out."""
    wide = rng.integers(0, 2**40, (2 * count, LARGE_NBYTES // 8 + 1))
    return {
        IMAGE: gathered(rng, count, int(rng.integers(1, 4))),
        SMALL: rng.integers(0, 2**40, count),
        WIDE: wide[:count] if contiguous else wide[::2],
    }


def as_arrays(rows: dict[Any, Any]) -> dict[Any, np.ndarray]:
    return {key: plain(c) if isinstance(c, RowRefs) else c.copy() for key, c in rows.items()}


def schema() -> Schema:
    return Schema.of(as_arrays(batch(np.random.default_rng(0), 1)))


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("name", PATHS)
def test_every_format_takes_them(name: str, contiguous: bool, tmp_path: Path) -> None:
    """Some files are long enough from the start, and some grow."""
    rng = np.random.default_rng(3)
    wanted = []
    path = tmp_path / name
    with storage_class(name)(path, capacity=500) as storage:
        storage.initialise(schema())
        for size in SIZES:
            rows = batch(rng, size, contiguous)
            wanted.append(as_arrays(rows))
            storage.extend(rows)
    with open_storage(path, mode="read") as storage:
        for key in (IMAGE, SMALL, WIDE):
            every = np.concatenate([rows[key] for rows in wanted])
            assert np.array_equal(storage.column(key), every), key


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("ring", [201, 230])
def test_a_ring_takes_them_in_pieces(ring: int, held: bool, tmp_path: Path) -> None:
    """The ring is cold or warm, rows cross its end, and views of overwritten rows exist."""
    rng = np.random.default_rng(ring)
    wanted: dict[Any, np.ndarray] = {}
    with MemmapStorage(tmp_path / "rows", max_size=ring) as storage:
        storage.initialise(schema())
        for size in (*SIZES, *SIZES):
            rows = batch(rng, size, bool(size % 2))
            for key, column in as_arrays(rows).items():
                before = wanted.get(key, column[:0])
                wanted[key] = np.concatenate([before, column])[-ring:]
            storage.extend(rows)
            if held:
                storage.get(slice(0, len(storage)))
            at = storage.slots_of(np.array(storage.span))
            for key, column in wanted.items():
                assert np.array_equal(storage.column(key)[at], column), (key, size)


def test_views_of_a_ring_can_be_written_to_it_again(tmp_path: Path) -> None:
    """Rows that lie in slots to be overwritten are copied first."""
    rng = np.random.default_rng(1)
    with MemmapStorage(tmp_path / "rows", max_size=20) as storage:
        storage.initialise(schema())
        for _ in range(3):
            storage.extend(batch(rng, 13))
        own = {key: storage.column(key) for key in (SMALL, WIDE)}
        before = {key: column.copy() for key, column in own.items()}
        rows = {IMAGE: gathered(rng, 15, 2), **{key: own[key][3:18] for key in own}}
        image = plain(rows[IMAGE])
        span = storage.extend(rows)
        at = storage.slots_of(np.array(span))
        assert np.array_equal(storage.column(IMAGE)[at], image)
        for key, column in before.items():
            assert np.array_equal(storage.column(key)[at], column[3:18])


@pytest.mark.parametrize("name", PATHS)
def test_gathered_rows_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with storage_class(name)(tmp_path / name, capacity=50) as storage:
        storage.extend(good := as_arrays(batch(rng, 5)))
        for wrong in (gathered(rng, 4, 1), gathered(rng, 5, 2, large=False)):
            with pytest.raises(RowsMismatch, match="next"):
                storage.extend({**good, IMAGE: wrong})
        assert len(storage) == 5
