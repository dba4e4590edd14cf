"""Test parts of the exchange code by themselves: numbers, roles, and exported and imported rows."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tallyroll.storage import MemmapStorage, open_storage
from tallyroll.storage.errors import (
    InvalidDataset,
    InvalidSchema,
    NotEnoughMemory,
    Overrun,
    StorageMissing,
)
from tallyroll.storage.ext.dataset_checks.lerobot.rows import FiniteStatistics
from tallyroll.storage.ext.exchange import dataset_import, export_rows
from tallyroll.storage.ext.exchange.base import Block, ExchangeFormat, Incoming
from tallyroll.storage.ext.exchange.dataset_import import imported
from tallyroll.storage.ext.exchange.export_rows import ExportRows
from tallyroll.storage.ext.exchange.lerobot.statistics import QUANTILES, Numbers
from tallyroll.storage.ext.exchange.numbering import TrajectoryNumbering
from tallyroll.storage.ext.exchange.roles import Roles, under
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.keys import (
    DONE,
    LANE,
    REWARD,
    STEP,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    Key,
    format_key,
)
from tallyroll.storage.rows.schema import Schema

ROW, AFTER, ACTION = ("observation",), ("next", "observation"), ("action",)


# --- statistics of LeRobot ------------------------------------------------------------------------

_VALUES = st.floats(-1e3, 1e3) | st.sampled_from([np.nan, np.inf, -np.inf, 0.0])


@given(st.lists(st.lists(st.tuples(_VALUES, _VALUES), min_size=1, max_size=6), min_size=1))
def test_statistics_leave_out_values_that_are_not_finite(
    blocks: list[list[tuple[float, float]]],
) -> None:
    numbers, checked = Numbers(sum(map(len, blocks))), FiniteStatistics()
    for block in blocks:
        numbers.add(np.array(block))
        checked.add(np.array(block))
    every = np.concatenate([np.array(block) for block in blocks])
    for column, found in zip(every.T, numbers.done().T, strict=True):
        finite = column[np.isfinite(column)]
        if not len(finite):
            assert not found.any()
            continue
        wanted = [finite.min(), finite.max(), finite.mean(), finite.std()]
        wanted += np.quantile(finite, [*QUANTILES.values()]).tolist()
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)
    assert checked.count == numbers.count == len(every)
    assert (checked.finite == np.isfinite(every).sum(0)).all()


# --- numbers --------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.sampled_from(["", "terminated", "truncated"]), max_size=5)))
def test_blocks_are_numbered_as_a_plain_loop_does(blocks: list[list[str]]) -> None:
    empty = {key: np.empty((0, 1), bool) for key in (TERMINATED, TRUNCATED)}
    numbering = TrajectoryNumbering(Schema.of(empty))
    trajectory = step = 0
    for ends in blocks:
        flags = {key: np.array([[end == key[-1]] for end in ends], bool) for key in empty}
        found = numbering.of({key: each.reshape(-1, 1) for key, each in flags.items()})
        wanted = []
        for end in ends:
            wanted.append((trajectory, step))
            trajectory, step = (trajectory + 1, 0) if end else (trajectory, step + 1)
        pairs = zip(found[TRAJ_IDS].tolist(), found[STEP].tolist(), strict=True)
        assert list(pairs) == wanted


@pytest.mark.parametrize(
    "rows",
    [
        {TRAJ_IDS: np.zeros(2, np.int64), DONE: np.zeros((2, 1), bool)},
        {("x",): np.zeros(2)},
        {DONE: np.zeros((2, 2), bool)},
        {DONE: np.zeros((2, 1), np.uint8)},
    ],
)
def test_rows_with_numbers_or_without_flags_are_left_alone(rows: Block) -> None:
    numbering = TrajectoryNumbering(Schema.of(rows))
    assert not numbering.needed
    assert numbering.of(rows) is rows
    assert numbering.schema.keys == tuple(Schema.of(rows).keys)


# --- roles ----------------------------------------------------------------------------------------


def columns(*left_out: Key, **more: np.ndarray) -> Schema:
    """Return transition columns except for some, plus others whose names contain slashes."""
    found = {ROW: np.zeros(2), AFTER: np.zeros(2), ACTION: np.zeros(2), REWARD: np.zeros((2, 1))}
    found |= {key: np.zeros((2, 1), bool) for key in (TERMINATED, TRUNCATED)}
    found |= {tuple(name.split("/")): each for name, each in more.items()}
    return Schema.of({key: each for key, each in found.items() if key not in left_out})


def test_roles_of_columns() -> None:
    """An observation has a successor of the same dtype and shape.

    Flags and counts are not observations.
    """
    seen = ["camera/left", "robots/action/x"]
    others = ["alone", "done", "next/done", "reward", "step_count", "next/step_count"]
    others += ["collector/note", "next/collector/note", "collector/action", "next/action"]
    more = dict.fromkeys([*seen, *(f"next/{each}" for each in seen), *others], np.zeros(2))
    more |= {"agents/action": np.zeros(2)}
    more |= {"wider": np.zeros(2), "next/wider": np.zeros((2, 2))}
    more |= {"other": np.zeros(2), "next/other": np.zeros(2, np.float32)}
    roles = Roles.of(columns(**more), "minari")
    assert {format_key(each.key) for each in roles.observations} == {"observation", *seen}
    assert {format_key(each.key) for each in roles.actions} == {"action", "agents/action"}
    left = {"wider", "next/wider", "other", "next/other"}
    assert {format_key(each.key) for each in roles.others} == {*others, *left}
    assert (roles.reward.key, roles.terminated.key) == (REWARD, TERMINATED)
    assert roles.truncated is not None
    assert Roles.of(columns(TRUNCATED), "minari").truncated is None


@pytest.mark.parametrize("key", [ROW, AFTER, ACTION, REWARD, TERMINATED])
def test_rows_that_are_no_transitions(key: Key) -> None:
    name = {ROW: "observation, with next/observation", AFTER: "observation, with next/observation"}
    with pytest.raises(InvalidSchema, match=f"have no {name.get(key, format_key(key))}\\."):
        Roles.of(columns(key), "minari")


@pytest.mark.parametrize("key", [TERMINATED, TRUNCATED])
def test_flags_that_are_no_flags(key: Key) -> None:
    for flag in (np.zeros((2, 1), np.uint8), np.zeros((2, 3), bool)):
        with pytest.raises(InvalidSchema, match=f"{format_key(key)}: expected one bool per row"):
            Roles.of(columns(**{format_key(key): flag}), "minari")


def test_places_under_a_name() -> None:
    schema = Schema.of({("a",): np.zeros(1), ("b", "c"): np.zeros(1)})
    one, two = schema.columns
    assert under("x", (one,)) == {("a",): ("x",)}
    assert under("x", (two,)) == {("b", "c"): ("x", "b", "c")}
    assert under("x", (one, two)) == {("a",): ("x", "a"), ("b", "c"): ("x", "b", "c")}


# --- export ---------------------------------------------------------------------------------------


def lanes_of(order: list[int], steps: int) -> dict[Any, np.ndarray]:
    """Return rows of lanes that take turns in this order, in trajectories of ``steps`` rows."""
    counts, ids, places = dict[int, int](), list[int](), list[int]()
    for lane in order:
        count = counts.get(lane, 0)
        counts[lane] = count + 1
        ids.append(4 * (count // steps) + lane)
        places.append(count % steps)
    number = np.arange(len(order))
    ended = np.array(places)[:, None] == steps - 1
    flags = {TERMINATED: ended, TRUNCATED: ended & False, DONE: ended}
    return {
        ROW: number.astype(np.float64),
        TRAJ_IDS: np.array(ids, np.int64),
        STEP: np.array(places, np.int64),
        LANE: np.array(order, np.int32),
        **flags,
    }


@settings(max_examples=15, deadline=None)
@given(
    order=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    steps=st.integers(1, 6),
    block=st.integers(1, 9),
    ring=st.booleans(),
    sorted=st.booleans(),
    ends=st.sets(st.integers(0, 50)),
)
@example(order=[0, 1] * 5, steps=3, block=4, ring=False, sorted=False, ends={1, 8})
@example(order=[0, 1] * 9, steps=3, block=4, ring=True, sorted=True, ends={7, 8})
def test_rows_go_out_in_their_order(
    order: list[int], steps: int, block: int, ring: bool, sorted: bool, ends: set[int]
) -> None:
    """Blocks and trajectories contain each row once, and the marked ends are flagged."""
    rows, told = lanes_of(order, steps), list[tuple[int, int]]()
    with written(rows, 12 if ring else None) as reader, pytest.MonkeyPatch.context() as patch:
        span, schema, table = reader.span, reader.schema, reader.trajectories.table
        marked = np.array([row for row in span if row in ends], np.int64)
        nbytes = schema.row_nbytes
        patch.setattr(export_rows, "BLOCK_NBYTES", block * nbytes)
        out = ExportRows(
            reader,
            span,
            schema,
            {},
            "rows",
            table,
            marked,
            sorted=sorted,
            progress=lambda done, total: told.append((done, total)),
        )
        ids, places = rows[TRAJ_IDS].tolist(), rows[STEP].tolist()
        first = {ids[row]: row for row in reversed(span)}
        wanted = [*span]
        if sorted:
            wanted.sort(key=lambda row: (first[ids[row]], places[row]))
        expected = {key: each[wanted] for key, each in rows.items()}
        for key in (TRUNCATED, DONE):
            expected[key] = expected[key] | np.isin(wanted, marked)[:, None]
        blocks = [*out.blocks()]
        compare(blocks, expected)
        sizes = [len(each[ROW]) for each in blocks]
        assert sizes[:-1] == [block] * (len(sizes) - 1)
        assert told == [(done, len(span) * nbytes) for done in np.cumsum(sizes) * nbytes]
        some = [*out.blocks([ROW])]
        assert {tuple(each) for each in some} == {(ROW,)}
        compare(some, {ROW: expected[ROW]})
        assert (len(out), out.trajectories) == (len(span), len(first))
        if sorted:
            before = told[-1][0]
            told.clear()
            found = [*out.episodes()]
            assert {each.seed for each in found} == {-1}
            episodes = [each.rows for each in found]
            compare(episodes, expected)
            lengths = [len(each[ROW]) for each in episodes]
            assert (len(lengths), out.stops()) == (len(first), np.cumsum(lengths).tolist())
            assert told[-1][0] - before == len(span) * nbytes, "rows are read twice"
            assert len(told) == groups(lengths, block)
        there = dict(zip(reader.keys, reader.copies(np.array(span)), strict=True))
        compare([there], {key: each[span.start :] for key, each in rows.items()})


@contextlib.contextmanager
def written(rows: dict[Any, np.ndarray], most: int | None = None) -> Iterator[RowReader]:
    """Yield a reader of the rows, stored in a ring if `most` limits their number."""
    with tempfile.TemporaryDirectory() as folder:
        with MemmapStorage(Path(folder, "rows"), max_size=most) as storage:
            for start in range(0, len(rows[ROW]), 7):
                storage.extend({key: each[start : start + 7] for key, each in rows.items()})
        with open_storage(Path(folder, "rows")) as storage:
            yield storage.reader


def groups(lengths: list[int], most: int) -> int:
    """Return the number of groups of consecutive lengths that fit together."""
    count, held = 0, most
    for length in lengths:
        held += length
        if held > most:
            count, held = count + 1, length
    return count


def compare(parts: list[Block], wanted: dict[Any, np.ndarray]) -> None:
    """Compare arrays, concatenated in order, with the whole."""
    for key, values in wanted.items():
        np.testing.assert_array_equal(np.concatenate([each[key] for each in parts]), values)


def test_rows_that_a_ring_overwrites_are_not_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_rows, "BLOCK_NBYTES", 8)
    with MemmapStorage(tmp_path / "rows", max_size=6) as storage:
        storage.extend({("x",): np.arange(6)})
        reader = storage.reader
        none = np.empty(0, np.int64)
        out = ExportRows(reader, reader.span, reader.schema, {}, "rows", None, none, sorted=False)
        blocks = out.blocks()
        assert out.trajectories == 0
        assert next(blocks)[("x",)].tolist() == [0]
        storage.extend({("x",): np.arange(6, 8)})
        with pytest.raises(Overrun):
            next(blocks)


def test_a_trajectory_that_does_not_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short trajectories are read together, within a block.

    A long one is read alone if there is enough memory.
    """
    with written(lanes_of([0] * 4 + [1] * 20 + [2] * 4, 20)) as reader:
        schema, table = reader.schema, reader.trajectories.table
        monkeypatch.setattr(export_rows, "BLOCK_NBYTES", 8 * schema.row_nbytes)
        none = np.empty(0, np.int64)
        out = ExportRows(reader, reader.span, schema, {}, "rows", table, none, sorted=True)
        memory = "tallyroll.storage.engine.available_memory.available_bytes"
        monkeypatch.setattr(memory, lambda: 2 * 20 * schema.row_nbytes)
        assert [len(each.rows[ROW]) for each in out.episodes()] == [4, 20, 4]
        monkeypatch.setattr(memory, lambda: 2 * 20 * schema.row_nbytes - 1)
        with pytest.raises(NotEnoughMemory, match="a trajectory of 20 rows"):
            list(out.episodes())


# --- import ---------------------------------------------------------------------------------------


class Given(ExchangeFormat):
    """Source of given blocks that declares a number of rows."""

    name = "given"

    def __init__(self, blocks: list[Block], rows: int) -> None:
        super().__init__()
        self._blocks, self._rows = blocks, rows

    def write(self, rows: ExportRows, place: Path) -> dict[str, int]:
        raise NotImplementedError

    @contextlib.contextmanager
    def read(self, place: Path) -> Iterator[Incoming]:
        schema = Schema.of(self._blocks[0])
        yield Incoming(schema, self._rows, iter(self._blocks), lost={"texts": 2, "none": 0})


@settings(max_examples=10, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    least=st.integers(1, 9),
    wrong=st.sampled_from([0, 0, 0, -1, 1]),
)
def test_rows_come_in_as_they_are_given(sizes: list[int], least: int, wrong: int) -> None:
    """Small blocks are merged. A source with another number of rows than it declares is refused."""
    total = sum(sizes)
    rows = {ROW: np.arange(total), DONE: np.arange(total)[:, None] % 3 == 0}
    stops = np.cumsum(sizes)[:-1]
    parts = zip(*(np.split(each, stops) for each in rows.values()), strict=True)
    blocks: list[Block] = [dict(zip(rows, each, strict=True)) for each in parts]
    told = list[tuple[int, int]]()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset_import, "BLOCK_NBYTES", 9 * least)
        place = Path(folder, "back")
        take = lambda: imported(  # noqa: E731
            Given(blocks, total + wrong),
            folder,
            place,
            progress=lambda done, every: told.append((done, every)),
        )
        if wrong:
            with pytest.raises(InvalidDataset, match="rows"):
                take()
            assert [*Path(folder).iterdir()] == []
            return
        report = take()
        assert (report.rows, report.lost, report.numbered) == (total, {"texts": 2}, True)
        with open_storage(place) as storage:
            reader = storage.reader
            found = dict(zip(reader.keys, reader.copies(np.arange(total)), strict=True))
            compare([found], rows)
            nbytes = reader.schema.row_nbytes
        commits, done = list[int](), 0
        for number, count in enumerate(np.cumsum(sizes).tolist()):
            if count - done >= least or number == len(sizes) - 1:
                commits.append(done := count)
        assert told == [(nbytes * count, nbytes * total) for count in commits]


def test_a_row_that_does_not_fit_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row is in memory four times, and so is a block. A few rows do not need a whole block."""
    rows = {ROW: np.zeros((2, 5000), np.uint8)}
    memory = "tallyroll.storage.engine.available_memory.available_bytes"
    for block, needed in ((1, 4 * 5000), (2**25, 4 * 10_000)):
        monkeypatch.setattr(dataset_import, "BLOCK_NBYTES", block)
        monkeypatch.setattr(memory, lambda wanted=needed: wanted - 1)
        with pytest.raises(NotEnoughMemory, match="rows of 5,000 bytes"):
            imported(Given([rows], 2), tmp_path, tmp_path / "out")


def test_sources_that_are_not_as_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_import, "BLOCK_NBYTES", 1)
    first, wide = {ROW: np.zeros(2)}, {ROW: np.zeros((2, 3))}
    faults: dict[str, tuple[list[Block], int]] = {
        r"declares -1 rows, expected 0 or more\. Nothing was written": ([first], -1),
        "cannot be imported: .*observation": ([first, wide], 4),
    }
    for match, (blocks, rows) in faults.items():
        with pytest.raises(InvalidDataset, match=match):
            imported(Given(blocks, rows), tmp_path, tmp_path / "out")
    with pytest.raises(StorageMissing):
        imported(Given([first], 2), tmp_path / "none", tmp_path / "out")
    assert [*tmp_path.iterdir()] == []
