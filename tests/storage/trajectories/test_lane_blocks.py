"""Compare the index of rows by blocks with a plain list of every lane: small blocks of all kinds.

``TALLYROLL_BLOCKS=5000 pytest -n0 tests/storage/trajectories/test_lane_blocks.py`` tries that many.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from tallyroll.storage import fast_paths
from tallyroll.storage.errors import NoSlices
from tallyroll.storage.trajectories.blocks import tail
from tallyroll.storage.trajectories.lane_stretches import RowChunk
from tallyroll.storage.trajectories.row_index import RowIndex

from lane_model import Model

TRIED = int(os.environ.get("TALLYROLL_BLOCKS", "30"))


@pytest.fixture(params=["extension", "numpy"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run with the extension and without it."""
    with fast_paths.switched_off(*(() if request.param == "extension" else ("kernel",))):
        yield


@dataclass
class Case:
    """Rows, with the ring and the chunks in which an index receives them."""

    model: Model
    ring: int
    sizes: list[int]
    length: int

    @property
    def first(self) -> int:
        """The first remaining row."""
        return max(0, len(self.model) - self.ring) if self.ring else 0

    def index(self) -> RowIndex:
        """Return an index that was queried occasionally while rows were added."""
        found, model, start = RowIndex(self.ring), self.model, 0
        for size in self.sizes * len(model):
            stop = min(len(model), start + min(size, self.ring or size))
            part = slice(start, stop)
            found.extend(RowChunk(start, model.ids[part], model.steps[part], model.lane[part]))
            if stop % 3 == 0:
                found.count_slices(self.length, max(0, stop - self.ring) if self.ring else 0)
            if (start := stop) == len(model):
                break
        return found


def drawn_case(rng: np.random.Generator, set_to: Callable[[str, int], None]) -> Case:
    """Draw rows of random lanes and small blocks, whose limits ``set_to`` sets."""
    few = [("_FEWEST", [1, 3, 8, 40, 100]), ("_SLOTS", [1, 2, 5]), ("_FIRST_ROOM", [2, 64])]
    for name, values in [*few, ("_MOST_CELLS", [16, 100, 10**6])]:
        set_to(name, int(rng.choice(values)))
    model = Model.random(
        rng,
        rows=int(rng.integers(1, 300)),
        lanes=int(rng.choice([1, 2, 5, 9, 20, 70])),
        mean_length=float(rng.choice([1, 3, 20])),
        skip=float(rng.choice([0, 0.1, 0.4])),
        restart=float(rng.choice([0, 0.05])),
        lane_by_lane=bool(rng.integers(2)),
    )
    ids, steps, lane = model.ids, model.steps, model.lane.astype(np.int64)
    if rng.integers(3) == 0:  # lanes take turns at random
        turns, took = rng.permutation(lane), np.empty(len(lane), np.int64)
        took[turns.argsort(kind="stable")] = lane.argsort(kind="stable")
        ids, steps, lane = ids[took], steps[took], lane[took]
    if rng.integers(3) == 0:  # some were never stored
        kept = rng.random(len(ids)) < 0.8
        kept[0] = True
        ids, steps, lane = ids[kept], steps[kept], lane[kept]
    if rng.integers(2):
        lane = lane * 1000 + 7
    return Case(
        Model(ids=ids, steps=steps, lane=lane),
        int(rng.choice([0, 0, 5, 30, 100])),
        rng.integers(1, int(rng.choice([3, 40, 200])), 3).tolist(),
        int(rng.integers(1, 7)),
    )


@pytest.mark.usefixtures("way")
def test_rows_are_found_as_a_plain_list_of_lanes_says(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = set()
    compiled = fast_paths.is_on("kernel")
    for seed in range(TRIED if compiled else TRIED // 4):
        rng = np.random.default_rng(seed)
        case = drawn_case(rng, lambda name, value: monkeypatch.setattr(tail, name, value))
        index = case.index()
        assert_walks(index, case)
        assert_slices(index, case, rng)
        kinds |= {type(shelf).__name__ for shelf in index._blocks._shelves}
    assert not compiled or kinds == {"BitEncoding", "TableEncoding", "OrderEncoding"}


def assert_walks(index: RowIndex, case: Case) -> None:
    """Check trajectories, by id and by a row, and walks onward, against the model."""
    model, first = case.model, case.first
    for id, rows in model.trajectories().items():
        left = [row for row in rows if row >= first]
        assert index.rows_of(id, first).tolist() == left
        if left:
            middle = len(left) // 2
            assert index.back_from(left[middle], first).tolist() == left[: middle + 1]
    assert not len(index.rows_of(10**9, first))
    every = np.arange(first, len(model))
    ahead = [every.tolist()]
    for _ in range(case.length):
        after = [model.next_of(row) for row in ahead[-1]]
        ahead.append([b if a < 0 else a for a, b in zip(after, ahead[-1], strict=True)])
    assert index.onward(every, case.length + 1).tolist() == ahead
    assert index.longest(first) == max(map(len, model.stretches(first)), default=0)
    before, last = index.places(every)
    assert last.tolist() == [model.next_of(row) < 0 for row in every.tolist()]
    for stretch in model.stretches():
        left = [row for row in stretch if row >= first]
        gone = len(stretch) - len(left)
        if left:
            assert before[np.array(left) - first].tolist() == [*range(gone, len(stretch))]
            rows = np.array(left)
            back = index.back(rows, np.minimum(before[rows - first], 2))
            known = back >= first
            assert (
                back[known].tolist()
                == np.array(stretch)[np.maximum(np.arange(gone, len(stretch)) - 2, 0)][
                    known
                ].tolist()
            )


def assert_slices(index: RowIndex, case: Case, rng: np.random.Generator) -> None:
    """Check slices, drawn by rows and from the list of all, against the model."""
    every, first, length = set(case.model.slices(case.length, case.first)), case.first, case.length
    counted = index.count_slices(length, first)
    assert counted >= len(every) if first else counted == len(every)

    def pick(count: int, below: int) -> np.ndarray:
        return rng.integers(below, size=count)

    for draw in (index.draw, index._draw_of_all):
        if every:
            found = draw(20 * len(every), length, first, pick)
            assert {tuple(rows) for rows in found.tolist()} <= every
            assert len(set(map(tuple, found.tolist()))) > 0.9 * len(every) - 1
        else:
            with pytest.raises(NoSlices, match=f"slices of {length} rows"):
                draw(1, length, first, pick)


@pytest.mark.parametrize("batch", [64, 128, 2**16])
@pytest.mark.parametrize("mean", [22, 50, 300])
def test_bytes_a_row(batch: int, mean: int) -> None:
    """64 lanes omit their reset slots, as with `NEXT_STEP`."""
    index = RowIndex()
    model = next_step_rows(2**17, mean, batch)
    for start in range(0, len(model), 2**16):
        part = slice(start, start + 2**16)
        index.extend(RowChunk(start, model.ids[part], model.steps[part], model.lane[part]))
    rows, trajectories = index._blocks.tail.first, len(np.unique(model.ids))
    most = 1.0 * rows if mean >= 50 else 0.2 * rows + 24 * trajectories
    assert rows > 2**16
    assert index.nbytes < most, index.nbytes / rows


def next_step_rows(count: int, mean: float, batch: int, lanes: int = 64) -> Model:
    """Return rows [count] of lanes that spend a slot on each reset, in batches lane by lane."""
    rng = np.random.default_rng(0)
    slots = int(count // lanes * (1.1 + 1 / mean))
    lengths = [rng.geometric(1 / mean, size=int(3 * slots / mean) + 50) for _ in range(lanes)]
    columns = []
    for lane, each in enumerate(lengths):
        number = np.repeat(np.arange(len(each)), each + 1)[:slots]  # one more for the reset slot
        step = np.concatenate([np.arange(n + 1) for n in each])[:slots]
        stored = step[:slots] < np.repeat(each, each + 1)[: len(step)]
        slot = np.flatnonzero(stored)
        columns.append((slot, np.full(len(slot), lane), number[slot] * lanes + lane, step[slot]))
    slot, lane, ids, steps = (np.concatenate(column) for column in zip(*columns, strict=True))
    order = np.lexsort((lane, slot))[:count]
    lane, ids, steps = lane[order], ids[order], steps[order]
    if batch > lanes:
        laid_out = np.lexsort((np.arange(count), lane, np.arange(count) // batch))
        lane, ids, steps = lane[laid_out], ids[laid_out], steps[laid_out]
    return Model(ids=ids, steps=steps, lane=lane)
