"""Test a reader of a ring that its writer overtakes.

The tests choose the moment, and no row may be torn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tallyroll.storage import MemmapStorage, n_step, open_storage
from tallyroll.storage.engine import row_copies
from tallyroll.storage.engine.commit_engine import Engine
from tallyroll.storage.engine.committed_counts import CommittedCounts
from tallyroll.storage.engine.row_copies import RowCopies
from tallyroll.storage.errors import Overrun
from tallyroll.storage.files.commit_header import Header
from tallyroll.storage.files.record_slots import RecordSlots
from tallyroll.storage.sampling import n_steps
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.trajectories import mapping
from tallyroll.storage.trajectories.columns import RowOrder, unread
from tallyroll.storage.trajectories.row_index import RowIndex

from lane_model import Model

RING = 60
IDS, STEP = ("collector", "traj_ids"), ("collector", "step")
MODEL = Model.random(np.random.default_rng(2), rows=4000, lanes=3, skip=0.0, restart=0.0)


class Writer:
    """Writes the rows of `MODEL` to a ring in turn, each batch with a record of its head."""

    def __init__(self, path: Path) -> None:
        self.storage = MemmapStorage(path, max_size=RING)
        self.write(2 * RING + 7)

    def write(self, count: int, *, size: int = 20) -> None:
        stop = self.storage.head + count
        while (head := self.storage.head) < stop:
            to = min(head + size, stop)
            self.storage.extend(MODEL.rows(head, to), record=str(to).encode())


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    writer = Writer(tmp_path / "ring")
    yield writer
    writer.storage.close()


@pytest.fixture
def reader(writer: Writer) -> Iterator[DiskStorage]:
    with open_storage(writer.storage.path) as reader:
        yield reader


@contextmanager
def before(
    owner: Any, name: str, act: Callable[[], object], *, only: object = None
) -> Iterator[None]:
    """Call ``act`` before each use of the method or property ``name`` of ``owner``.

    Args:
        owner: a class or a module.
        name: the name of the method, function or property.
        act: the hook. It must not use ``name`` itself, or only on an object other than ``only``.
        only: the object whose uses count, None for any.
    """
    real = vars(owner)[name]

    def use(self: Any, *args: Any) -> Any:
        if only is None or self is only:
            act()
        return (real.fget if isinstance(real, property) else real)(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        kept = isinstance(real, property)
        patch.setattr(owner, name, property(use, real.fset) if kept else use)
        yield


@contextmanager
def after(
    owner: Any, name: str, act: Callable[[], object], *, only: object = None
) -> Iterator[None]:
    """Call ``act`` after each use of a method or function, as in `before`."""
    real = vars(owner)[name]

    def use(self: Any, *args: Any) -> Any:
        found = real(self, *args)
        if only is None or self is only:
            act()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, use)
        yield


@contextmanager
def during_copies(act: Callable[[], object], reader: DiskStorage) -> Iterator[None]:
    """Call ``act`` in each copy of rows by ``reader``, between the first column and the others."""
    mine, gather = reader.reader.engine.copies, RowCopies.gather

    def torn(self: RowCopies, *args: Any) -> list[np.ndarray]:
        first = gather(self, *args)[0]
        if self is mine:
            act()
        return [first, *gather(self, *args)[1:]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowCopies, "gather", torn)
        yield


def times(count: int, act: Callable[[], object]) -> Callable[[], None]:
    """Return ``act`` limited to ``count`` calls, none of them nested in another."""
    left, acts = count, False

    def use() -> None:
        nonlocal left, acts
        if left and not acts:
            left, acts = left - 1, True
            act()
            acts = False

    return use


def engine_of(storage: DiskStorage) -> Engine:
    assert storage.reader.engine is not None
    return storage.reader.engine


def assert_table(storage: DiskStorage, head: int) -> None:
    """Check that a ring's table has the trajectories with rows left, as a plain model counts."""
    table, first = storage.trajectories.table, head - RING
    every = MODEL.trajectories().items()
    left = {id: [row for row in rows if row < head] for id, rows in every}
    assert set(table["id"].tolist()) == {
        i for i, rows in left.items() if rows and rows[-1] >= first
    }
    for line in table:
        # Compare from the first row on that existed when the table was computed.
        rows = [row for row in left[line["id"]] if row >= line["first_row"]]
        assert (rows[0], rows[-1], len(rows)) == (
            line["first_row"], line["last_row"], line["length"]
        )  # fmt: skip
        assert line["first_step"] == MODEL.steps[rows[0]]
        assert line["return"] == MODEL.rewards[rows].sum()


def assert_slices(slices: TensorDict) -> torch.Tensor:
    """Check slices, and return the numbers of their rows.

    Each slice has consecutive steps of one trajectory, with its rows as written.
    """
    numbers = slices["observation"][..., 0].long()
    want = MODEL.rows()[numbers]
    for key in (("next", "observation"), ("next", "reward"), ("next", "terminated"), IDS, STEP):
        assert (slices[key] == want[key]).all(), key
    assert (want[IDS] == want[IDS][:, :1]).all()
    assert (want[STEP].diff(dim=1) == 1).all()
    return numbers


# --- counts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, RING - 1, RING, 3 * RING])
def test_rows_that_come_between_two_looks_at_the_counts_hide_none(
    writer: Writer, reader: DiskStorage, count: int
) -> None:
    header = engine_of(reader)._header
    with before(Header, "reserve", times(1, lambda: writer.write(count)), only=header):
        span = reader.span
    head = writer.storage.head
    assert span == range(head - RING, head)


def test_a_head_that_never_rests_hides_rows_and_shows_no_torn_one(
    writer: Writer, reader: DiskStorage
) -> None:
    header = engine_of(reader)._header
    with before(Header, "reserve", times(500, lambda: writer.write(1)), only=header):
        span = reader.span
    head = writer.storage.head
    assert head - RING <= span.start <= span.stop <= head


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("looks", [0, 1])
@pytest.mark.parametrize("slot", [0, 1])
def test_records_that_come_between_two_looks_hide_none(
    writer: Writer, reader: DiskStorage, count: int, looks: int, slot: int
) -> None:
    """The writer acts after the reader read the head, or one slot of two.

    The newest record is in either slot.
    """
    writer.write(1 + slot, size=1)
    waits = looks

    def act() -> None:
        nonlocal waits
        waits -= 1
        if waits == -1:
            writer.write(count, size=1)

    header = engine_of(reader)._header
    with before(RecordSlots, "read", act, only=header.records):
        record = reader.record
    head = writer.storage.head
    assert record == (head, str(head).encode())


# --- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("laps", [1, 3])
@pytest.mark.parametrize("count", [1, RING // 2, RING])
@pytest.mark.parametrize("moment", ["the counts", "their numbers", "a column"])
def test_rows_overwritten_during_the_copy_are_copied_again(
    writer: Writer, reader: DiskStorage, laps: int, count: int, moment: str
) -> None:
    """The overwrite comes after the reader read the counts, rows' numbers, or the first column."""
    index, oldest = torch.arange(RING).reshape(5, 12), writer.storage.span.start
    act = times(laps, lambda: writer.write(count))
    where: dict[str, AbstractContextManager[None]] = {
        "the counts": after(CommittedCounts, "read", act),
        "their numbers": after(row_copies, "rows_in", act),
        "a column": during_copies(act, reader),
    }
    with where[moment]:
        got = reader.get(index)
    numbers = got["observation"][..., 0].long()
    assert got.batch_size == index.shape
    assert (numbers % RING == index).all(), "another slot's row"
    assert numbers.min() >= oldest, "the row was overwritten before it was read"
    want = MODEL.rows()[numbers.reshape(-1)]
    assert (got.reshape(-1) == want).all(), "a mixture of two rows"


@pytest.mark.parametrize("begun", [1, 10, 40])
def test_rows_that_a_writer_began_to_overwrite_give_way_to_others(
    writer: Writer, reader: DiskStorage, begun: int
) -> None:
    """The overwrite comes after the reader knew the slots.

    The writer stops in the middle, as if killed.
    """
    mine, head = engine_of(writer.storage), writer.storage.head

    def begin() -> None:
        mine._reserve(head, head + begun)
        for column in mine.space.columns.arrays:
            column[writer.storage.slots_of(np.arange(head, head + begun))] = 1

    with after(row_copies, "rows_in", times(1, begin)):
        got = reader.get(torch.arange(RING - begun))
    numbers = got["observation"][:, 0].long()
    assert head + begun - RING <= numbers.min() <= numbers.max() < head
    assert (got == MODEL.rows()[numbers]).all()


@pytest.mark.parametrize("rows_per_row", [1, 3, 10])
def test_a_writer_that_overtakes_each_long_copy(
    writer: Writer, reader: DiskStorage, monkeypatch: pytest.MonkeyPatch, rows_per_row: int
) -> None:
    """The writer appends rows in proportion to the length of a copy, so short copies succeed."""
    mine, gather = reader.reader.engine.copies, RowCopies.gather

    def slow(self: RowCopies, slots: Any, *args: Any) -> Any:
        found = gather(self, slots, *args)
        if self is mine:
            assert writer.storage.head < 3000, "no copy succeeds"
            writer.write(rows_per_row * len(slots))
        return found

    monkeypatch.setattr(RowCopies, "gather", slow)
    before, index = writer.storage.span, torch.arange(RING)
    got = reader.get(index[RING // 2 :])
    numbers = got["observation"][:, 0].long()
    assert before.stop - RING // 2 <= numbers.min() <= numbers.max() < writer.storage.head
    assert (got == MODEL.rows()[numbers]).all()


def test_a_writer_that_is_always_faster_is_told_in_time(
    writer: Writer, reader: DiskStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tallyroll.storage.engine.row_copies._PATIENCE_SECONDS", 0.001)
    lap = times(60, lambda: writer.write(RING, size=RING))
    wording = (
        rf"is a ring of {RING} rows, and its writer overwrites rows faster than these 30 rows can"
    )
    with after(row_copies, "rows_in", lap), pytest.raises(Overrun, match=wording):
        reader.get(torch.arange(30))
    assert len(reader.get(torch.arange(30))) == 30, "the reader cannot go on"


# --- trajectories ---------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, RING - 1, RING, RING + 1, 5 * RING])
@pytest.mark.parametrize("known", [False, True])
def test_links_and_table_of_a_reader_that_is_lapped_between_two_looks(
    writer: Writer, reader: DiskStorage, count: int, known: bool
) -> None:
    """The writer laps the reader after it read the head and before it checked which rows remain."""
    if known:
        assert_table(reader, writer.storage.head)
        reader.trajectories.sample_slices(3, 2)
        writer.write(30)
    counts = engine_of(reader).counts
    for use in ("table", "slices"):
        with before(CommittedCounts, "span", times(1, lambda: writer.write(count)), only=counts):
            if use == "table":
                assert len(reader.trajectories.table)
            else:
                assert_slices(reader.trajectories.sample_slices(20, 3))
        assert_table(reader, writer.storage.head)
        assert_slices(reader.trajectories.sample_slices(20, 3))


def test_a_reader_that_comes_late_looks_at_no_row_that_is_gone(
    writer: Writer, reader: DiskStorage
) -> None:
    """A long run may have written many laps, but the reader skips all rows that are gone."""
    mine, links = reader.reader, RowIndex(RING)
    for _ in range(2):
        writer.write(10 * RING)
        for start, stop in unread(mine, links):
            assert writer.storage.head - RING <= start < stop
            links.extend(RowOrder(mine.schema).chunk(mine, start, stop))
        assert links.seen == writer.storage.head


@pytest.mark.parametrize("count", [1, RING - 1, RING, 5 * RING])
def test_a_reader_that_is_lapped_while_it_reads_whose_rows_are(
    writer: Writer, reader: DiskStorage, count: int
) -> None:
    act = times(2, lambda: writer.write(count))
    with after(RowOrder, "_column", act):
        assert len(reader.trajectories.table)
    assert_table(reader, writer.storage.head)
    act = times(2, lambda: writer.write(count))
    with after(RowOrder, "_column", act):
        assert_slices(reader.trajectories.sample_slices(20, 3))
    assert_slices(reader.trajectories.sample_slices(20, 3))


@pytest.mark.parametrize("laps", [1, 3])
@pytest.mark.parametrize("count", [RING // 3, RING])
def test_slices_overwritten_during_the_copy_are_drawn_again(
    writer: Writer, reader: DiskStorage, laps: int, count: int
) -> None:
    act = times(laps, lambda: writer.write(count))
    with after(mapping, "draw", act):
        slices = reader.trajectories.sample_slices(40, 3)
    assert slices.batch_size == (40, 3)
    assert assert_slices(slices).min() >= writer.storage.span.start


def test_slices_of_a_ring_whose_writer_is_always_faster(
    writer: Writer, reader: DiskStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapping, "_PATIENCE_SECONDS", 0.001)
    lap = times(60, lambda: writer.write(RING, size=RING))
    wording = rf"a ring of {RING} rows, .* faster than 40 slices of 3 can be read\. Read fewer"
    with after(mapping, "draw", lap), pytest.raises(Overrun, match=wording):
        reader.trajectories.sample_slices(40, 3)
    assert_slices(reader.trajectories.sample_slices(40, 3))


@pytest.mark.parametrize("laps", [1, 3])
def test_n_steps_overwritten_during_the_reading_are_read_again(
    writer: Writer, reader: DiskStorage, laps: int
) -> None:
    act = times(laps, lambda: writer.write(RING // 2))
    with after(n_steps, "_read", act):
        found = n_step(reader, torch.arange(RING), 3, 0.5)
    rows = found["observation"][..., 0].long()
    assert (rows % RING == torch.arange(RING)).all()
    assert rows.min() >= writer.storage.span.start
    for at, row in enumerate(rows.tolist()):
        total, last, used = MODEL.rewards[row], row, 1
        while used < 3 and not MODEL.ended(last) and MODEL.next_of(last) in rows:
            last, used = MODEL.next_of(last), used + 1
            total += 0.5 ** (used - 1) * MODEL.rewards[last]
        assert found["steps_to_next_obs"][at].item() == used
        assert found["next", "observation"][at].item() == last + 0.5
        assert found["next", "reward"][at].item() == total


@pytest.mark.parametrize("begun", [1, 12, 20, 50])
def test_n_steps_of_a_ring_that_is_half_overwritten(
    writer: Writer, reader: DiskStorage, begun: int
) -> None:
    """An index means the same row as in `get`. Overwritten rows are never used."""
    mine, head = engine_of(writer.storage), writer.storage.head
    mine._reserve(head, head + begun)
    for column in mine.space.columns.arrays:
        column[writer.storage.slots_of(np.arange(head, head + begun))] = 1
    for storage in (reader, writer.storage):
        index = torch.arange(len(storage))
        assert len(index) == RING - begun
        found, rows = n_step(storage, index, 3, 0.5), storage.get(index)
        assert (found["observation"] == rows["observation"]).all()
        assert (found["next", "original_reward"] == rows["next", "reward"]).all()
        numbers = rows["observation"][:, 0].long()
        assert sorted(numbers.tolist()) == list(range(head + begun - RING, head))


def test_n_steps_of_a_ring_whose_writer_is_always_faster(
    writer: Writer, reader: DiskStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(n_steps, "_PATIENCE_SECONDS", 0.001)
    lap = times(60, lambda: writer.write(RING, size=RING))
    wording = rf"a ring of {RING} rows, .* faster than 3 steps of these 12 can be read\. Read fewer"
    with after(n_steps, "_read", lap), pytest.raises(Overrun, match=wording):
        n_step(reader, torch.arange(12), 3, 0.5)
    assert len(n_step(reader, torch.arange(12), 3, 0.5)) == 12
