"""Compare the rows of sampled slices with a plain list of each lane's windows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tallyroll.storage.errors import NoSlices, ShortTrajectory
from tallyroll.storage.trajectories.lane_stretches import RowChunk
from tallyroll.storage.trajectories.row_index import RowIndex
from tallyroll.storage.trajectories.windows import Slices, Windows, draw_slices

from lane_model import Model, models

Window = tuple[int, ...]
KINDS: list[dict[str, Any]] = [
    {"short": "pad"},
    {"by": "trajectory"},
    {"by": "trajectory", "short": "pad"},
    {"from_start": True},
    {"from_start": True, "short": "pad"},
]


def linked(model: Model, ring: int = 0, sizes: Sequence[int] = (7,)) -> RowIndex:
    links, start = RowIndex(ring), 0
    while start < len(model):
        stop = start + min(sizes[start % len(sizes)], ring or len(model))
        part = slice(start, stop)
        links.extend(RowChunk(start, model.ids[part], model.steps[part], model.lane[part]))
        start = min(stop, len(model))
    return links


def drawn(
    links: RowIndex, model: Model, windows: Windows, count: int, first: int, seed: int = 0
) -> Slices:
    rng = np.random.default_rng(seed)
    return draw_slices(
        links,
        windows,
        count,
        first,
        lambda count, below: rng.integers(below, size=count),
        lambda rows: model.steps[rows],
    )


def shares(model: Model, windows: Windows, first: int) -> dict[Window, float]:
    """Return the probability of each window from a plain loop over the lanes."""
    length, each = windows.slice_len, []
    for rows in model.stretches(first):
        if windows.from_start and model.steps[rows[0]] != 0:
            continue
        found = [tuple(rows[at : at + length]) for at in range(len(rows) - length + 1)]
        if not found and windows.short != "skip":
            found = [tuple(rows)]
        if found:
            each.append(found[:1] if windows.from_start else found)
    total = sum(map(len, each))
    if windows.by == "window":
        return {window: 1 / total for found in each for window in found}
    return {window: 1 / len(each) / len(found) for found in each for window in found}


def before(model: Model, window: Window, count: int, first: int) -> Window:
    """Return up to `count` rows directly before a window."""
    (rows,) = (rows for rows in model.stretches(first) if window[0] in rows)
    at = rows.index(window[0])
    return tuple(rows[max(0, at - count) : at])


def mask_of(slices: Slices) -> np.ndarray:
    return np.ones(slices.rows.shape, np.bool_) if slices.mask is None else slices.mask


def windows_in(slices: Slices, burn_in: int = 0) -> list[tuple[Window, Window]]:
    """Return the rows before each slice, and those of the slice."""
    parts = slice(burn_in), slice(burn_in, None)
    return [
        tuple(tuple(rows[part][mask[part]].tolist()) for part in parts)  # type: ignore[misc]
        for rows, mask in zip(slices.rows, mask_of(slices), strict=True)
    ]


@settings(max_examples=80, deadline=None)
@given(
    models(),
    st.sampled_from(KINDS),
    st.integers(1, 9),
    st.integers(0, 5),
    st.sampled_from([0, 25, 60]),
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
)
def test_slices_are_those_of_a_plain_list(
    model: Model, kind: dict[str, Any], length: int, burn_in: int, ring: int, sizes: list[int]
) -> None:
    if kind.get("from_start"):
        burn_in = 0
    windows = Windows(length, burn_in=burn_in, **kind)
    first = max(0, len(model) - ring) if ring else 0
    every = shares(model, windows, first)
    links = linked(model, ring, sizes)
    if not every:
        with pytest.raises(NoSlices, match=f"slices of {length} rows"):
            drawn(links, model, windows, 3, first)
        return
    found = drawn(links, model, windows, 40, first)
    every_mask = mask_of(found)
    assert found.rows.shape == every_mask.shape == (40, length + burn_in)
    assert found.rows.min() >= first
    for (warm, window), rows, mask in zip(
        windows_in(found, burn_in), found.rows, every_mask, strict=True
    ):
        assert window in every
        assert warm == before(model, window, burn_in, first)
        # Rows surround the first place of the slice itself. All other places repeat one of them.
        assert mask[burn_in - len(warm) : burn_in + len(window)].all()
        assert set(rows.tolist()) == {*warm, *window}
    places = np.arange(length + burn_in)
    at = np.broadcast_to(places, every_mask.shape)
    assert (np.where(every_mask, places, 99).min(axis=1) == at[found.first]).all()
    assert (np.where(every_mask, places, -1).max(axis=1) == at[found.last]).all()


@pytest.mark.parametrize("ring", [0, 70])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_window_is_drawn_by_its_share(kind: dict[str, Any], ring: int) -> None:
    model = Model.random(np.random.default_rng(5), rows=200, lanes=3, mean_length=9.0, skip=0.1)
    windows, first = Windows(6, **kind), len(model) - ring if ring else 0
    every, count = shares(model, windows, first), 40_000
    assert len({len(window) for window in every}) > 1 or kind.get("short") != "pad"
    slices = drawn(linked(model, ring), model, windows, count, first)
    found = Counter(window for _, window in windows_in(slices))
    chi_square = sum((found[w] - count * p) ** 2 / (count * p) for w, p in every.items())
    free = len(every) - 1
    assert found.keys() == every.keys()
    assert abs(chi_square - free) < 4 * math.sqrt(2 * free)


def test_the_few_windows_among_many_rows_are_found() -> None:
    """One trajectory has many rows, and two more have their first steps among them."""
    rows = 50_000
    ids, steps, lane = np.zeros(rows, int), np.arange(rows) + 7, np.zeros(rows, np.int32)
    for at, id in ((30_000, 1), (40_000, 2)):
        ids[at : at + 2], lane[at : at + 2], steps[at : at + 2] = id, id, (0, 1)
    model = Model(ids, steps, lane)
    links = linked(model, sizes=(rows,))
    for kind, length in (({"from_start": True}, 2), ({"from_start": True, "short": "pad"}, 5)):
        slices = drawn(links, model, Windows(length, **kind), 20, 0)
        found = Counter(window for _, window in windows_in(slices))
        assert found.keys() == {(30_000, 30_001), (40_000, 40_001)}
    with pytest.raises(NoSlices, match="from the first step of a trajectory"):
        drawn(links, model, Windows(3, from_start=True), 20, 0)


def test_windows_that_are_longer_than_all_rows_cost_no_more() -> None:
    """The search is bounded by the number of existing rows."""
    model = Model.random(np.random.default_rng(0), rows=30, lanes=2, mean_length=5.0)
    slices = drawn(linked(model), model, Windows(5000, "pad", burn_in=5000), 10, 0)
    assert slices.rows.shape == (10, 10_000)
    every = shares(model, Windows(5000, "pad"), 0)
    assert {window for _, window in windows_in(slices, 5000)} <= every.keys()


def test_a_short_trajectory_raises_when_it_is_drawn() -> None:
    model = Model(np.array([0, 0, 0, 1, 1]), np.array([0, 1, 2, 0, 1]), np.zeros(5, np.int32))
    links = linked(model)
    drawn(links, model, Windows(2, "error"), 50, 0)
    with pytest.raises(ShortTrajectory, match=r'slices of 3 rows.*drawn has 2\. .*short="pad"'):
        drawn(links, model, Windows(3, "error"), 50, 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"slice_len": 0}, "slice_len: expected a whole number above 0, got 0"),
        ({"burn_in": -1}, "burn_in: expected a whole number of rows or 0, got -1"),
        ({"burn_in": True}, "burn_in: expected a whole number of rows or 0, got True"),
        ({"short": "trim"}, "short: expected one of 'skip', 'pad', 'error', got 'trim'"),
        ({"by": "row"}, "by: expected one of 'window', 'trajectory', got 'row'"),
        ({"from_start": 1}, "from_start: expected True or False, got 1"),
        ({"from_start": True, "burn_in": 3}, "from_start=True or burn_in=3, got both"),
    ],
)
def test_windows_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Windows(**{"slice_len": 4, **given})


def test_it_says_which_windows() -> None:
    assert str(Windows(4)) == "slice_len=4"
    assert str(Windows(4, "pad", burn_in=2)) == "slice_len=4, short='pad', burn_in=2"
