"""Compare the index of rows with a plain model of every lane."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tallyroll.storage.errors import CorruptStorage, NoSlices
from tallyroll.storage.trajectories import lane_stretches
from tallyroll.storage.trajectories.blocks import growable
from tallyroll.storage.trajectories.lane_stretches import MOST_LANES, RowChunk
from tallyroll.storage.trajectories.row_index import RowIndex

from lane_model import Model, models


def chunks(model: Model, sizes: Sequence[int]) -> list[RowChunk]:
    """Yield the rows of `model` in chunks of these sizes in turn."""
    found, start = [], 0
    while start < len(model.ids):
        stop = start + sizes[len(found) % len(sizes)]
        part = slice(start, stop)
        found.append(RowChunk(start, model.ids[part], model.steps[part], model.lane[part]))
        start = stop
    return found


def linked(model: Model, ring: int = 0, sizes: Sequence[int] = (7,)) -> RowIndex:
    links = RowIndex(ring)
    for chunk in chunks(model, [min(size, ring or size) for size in sizes]):
        links.extend(chunk)
    return links


def picks(seed: int = 0) -> Callable[[int, int], np.ndarray]:
    generator = np.random.default_rng(seed)
    return lambda count, below: generator.integers(below, size=count)


@settings(max_examples=60, deadline=None)
@given(models(), st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(0, 60))
def test_rows_are_walked_as_a_plain_model_says(model: Model, sizes: list[int], ring: int) -> None:
    links = linked(model, ring, sizes)
    first = max(0, len(model.ids) - ring) if ring else 0
    for rows in model.trajectories().values():
        left = [row for row in rows if row >= first]
        if left:
            assert links.back_from(left[-1], first).tolist() == left
    every = np.arange(first, len(model.ids))
    ahead = [model.next_of(row) for row in every]
    assert links.onward(every, 2).tolist() == [
        every.tolist(),
        [row if after < 0 else after for row, after in zip(every, ahead, strict=True)],
    ]
    assert links.longest(first) == max(map(len, model.stretches(first)), default=0)


@settings(max_examples=60, deadline=None)
@given(models(), st.integers(1, 6), st.integers(0, 60), st.lists(st.integers(1, 40), min_size=1))
def test_slices_are_those_of_a_plain_model(
    model: Model, length: int, ring: int, sizes: list[int]
) -> None:
    first = max(0, len(model.ids) - ring) if ring else 0
    every = set(model.slices(length, first))
    # One index looks for slices from the first row on, and another starts late.
    early = RowIndex(ring)
    early.count_slices(length)
    for chunk in chunks(model, [min(size, ring or size) for size in sizes]):
        early.extend(chunk)
    for links in (early, linked(model, ring, sizes)):
        if not every:
            with pytest.raises(NoSlices, match=f"slices of {length} rows were requested"):
                links.draw(3, length, first, picks())
            continue
        drawn = links.draw(40 * len(every), length, first, picks())
        assert {tuple(rows) for rows in drawn.tolist()} == every
        if not first:
            assert links.count_slices(length) == len(every)


def test_every_slice_is_as_likely_as_the_others() -> None:
    model = Model.random(np.random.default_rng(3), rows=400, lanes=5)
    for ring in (0, 150):
        links, first = linked(model, ring), 250 if ring else 0
        every = {rows: i for i, rows in enumerate(model.slices(4, first))}
        counts = np.zeros(len(every))
        drawn = links.draw(200 * len(every), 4, first, picks(1))
        for rows in drawn.tolist():
            counts[every[tuple(rows)]] += 1
        chi_square = float(((counts - 200) ** 2 / 200).sum())
        # The 99.9 % quantile for these degrees of freedom (Wilson and Hilferty).
        freedom = len(every) - 1
        limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
        assert chi_square < limit, (chi_square, limit)


def test_slices_that_few_ends_have_are_found_in_a_small_ring() -> None:
    # One row per lane in turn: of 32 rows, only the last ones end a slice of 4 that still exists.
    rows = np.arange(800)
    model = Model(ids=rows % 8, steps=rows // 8, lane=rows % 8)
    links = linked(model, ring=32, sizes=(8,))
    drawn = links.draw(5, 4, 800 - 32, picks())
    assert set(drawn[:, 0].tolist()) <= set(range(768, 776))
    assert (np.diff(drawn, axis=1) == 8).all()
    with pytest.raises(NoSlices, match="has 4"):
        links.draw(5, 5, 800 - 32, picks())


def test_slices_do_not_cross_rows_that_were_never_stored() -> None:
    model = Model(ids=np.zeros(6, int), steps=np.array([0, 1, 2, 4, 5, 6]), lane=np.zeros(6, int))
    links = linked(model)
    assert links.back_from(5).tolist() == [0, 1, 2, 3, 4, 5]
    assert links.onward(np.array([0, 2, 3]), 4).T.tolist() == [[0, 1, 2, 2], [2] * 4, [3, 4, 5, 5]]
    assert {tuple(r) for r in links.draw(50, 3, 0, picks()).tolist()} == {(0, 1, 2), (3, 4, 5)}


def test_rows_lost_before_they_were_seen() -> None:
    model = Model.random(np.random.default_rng(0), rows=300, lanes=4)
    links = RowIndex(50)
    for start, stop in ((0, 40), (130, 170), (170, 200), (280, 300)):
        links.extend(
            RowChunk(start, model.ids[start:stop], model.steps[start:stop], model.lane[start:stop])
        )
    every = set(model.slices(3, 280))
    assert {tuple(r) for r in links.draw(500, 3, 280, picks()).tolist()} == every


def test_distances_beyond_32_bits() -> None:
    links = RowIndex(4)
    far = 2**33
    ids, lane = np.array([7, 9]), np.array([0, 1])
    links.extend(RowChunk(0, ids, np.array([0, 0]), lane))
    links.extend(RowChunk(far, ids, np.array([1, 1]), lane))
    links.extend(RowChunk(far + 2, ids, np.array([2, 2]), lane))
    assert links.back_from(far + 3, far).tolist() == [far + 1, far + 3]
    assert links.draw(2, 2, far, picks()).tolist()[0] in ([far, far + 2], [far + 1, far + 3])
    with pytest.raises(NoSlices):
        links.draw(1, 3, far, picks())


@pytest.mark.parametrize("lane", [-1, MOST_LANES])
def test_a_lane_that_cannot_be_is_told(lane: int) -> None:
    one = np.zeros(3, int)
    with pytest.raises(CorruptStorage, match=f"row 12 has lane {lane}"):
        RowIndex().extend(RowChunk(10, one, one, np.array([0, 1, lane])))


def test_nothing_is_linked_at_first() -> None:
    links = RowIndex()
    links.extend(RowChunk(0, *(np.empty(0, np.int64) for _ in range(3))))
    assert links.longest() == links.count_slices(1) == links.seen == 0
    with pytest.raises(NoSlices, match="has 0"):
        links.draw(1, 1, 0, picks())


# --- cost -----------------------------------------------------------------------------------------


class Counting(np.ndarray):
    """Array that counts the elements that NumPy's functions take and return."""

    tally: dict[str, int] = defaultdict(int)  # noqa: RUF012

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return self._count(getattr(ufunc, method), inputs, kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return self._count(func, args, kwargs)

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if isinstance(key, np.ndarray):
            self._add(found.size)
        return found

    def __setitem__(self, key: Any, value: Any) -> None:
        self._add(key.size if isinstance(key, np.ndarray) else getattr(value, "size", 1))
        super().__setitem__(key, value)

    def take(self, *args: Any, **kwargs: Any) -> Any:
        return self._count(np.ndarray.take, (self, *args), kwargs)

    def argsort(self, *args: Any, **kwargs: Any) -> Any:
        return self._count(np.ndarray.argsort, (self, *args), kwargs)

    def copy(self, *args: Any, **kwargs: Any) -> Any:
        return self._count(np.ndarray.copy, (self, *args), kwargs)

    def _count(self, func: Any, args: Any, kwargs: Any) -> Any:
        def plain(value: Any) -> Any:
            if isinstance(value, (tuple, list)):
                return type(value)(map(plain, value))
            return value.view(np.ndarray) if isinstance(value, Counting) else value

        found = func(*plain(args), **{name: plain(value) for name, value in kwargs.items()})
        self._add(max([getattr(value, "size", 1) for value in (found, *args)]))
        return found.view(Counting) if isinstance(found, np.ndarray) else found

    def _add(self, elements: int) -> None:
        self.tally["elements"] += int(elements)
        self.tally["calls"] += 1


@pytest.fixture
def counted_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the elements of arrays that are moved to grow, too."""

    def grow(array: np.ndarray, length: int) -> np.ndarray:
        if length > len(array):
            Counting.tally["elements"] += len(array)
        return lane_stretches.grown(array, length)

    monkeypatch.setattr(growable, "grown", grow)


def cost(rows: int, per_chunk: int, lanes: int = 64, length: int = 100) -> tuple[int, int]:
    """Return the elements and calls that linking takes if rows of the lanes alternate."""
    number = np.arange(rows)
    lane = number % lanes
    step = number // lanes
    ids = step // length * lanes + lane
    Counting.tally.clear()
    links = RowIndex()
    links.count_slices(16)
    for start in range(0, rows, per_chunk):
        part = slice(start, start + per_chunk)
        columns = (a[part].view(Counting) for a in (ids, step % length, lane))
        links.extend(RowChunk(start, *columns))
    assert links.seen == rows
    return Counting.tally["elements"], Counting.tally["calls"]


@pytest.mark.usefixtures("counted_growth")
def test_operations_for_a_million_rows_are_linear_in_their_number() -> None:
    few, many = cost(2**18, 2**16), cost(2**20, 2**16)
    assert many[0] < 4 * few[0] * 1.15, "elements grow faster than rows"
    assert many[0] < 60 * 2**20, "elements a row"
    assert many[1] <= 4 * few[1], "calls grow faster than chunks"


@pytest.mark.usefixtures("counted_growth")
def test_a_small_commit_costs_the_same_however_many_rows_there_are() -> None:
    before, after = cost(2**14, 64), cost(2**16, 64)
    assert after[0] < 4 * before[0] * 1.15
    assert after[1] / (2**16 / 64) < 60, "calls of NumPy a commit"
