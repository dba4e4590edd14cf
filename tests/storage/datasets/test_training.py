"""Compare PyTorch datasets with plain lists: each row occurs once, in an order that can resume."""

from __future__ import annotations

import contextlib
import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from tallyroll.storage import EpochBatches, MemmapStorage, ZarrStorage, open_storage
from tallyroll.storage.errors import ColumnsMissing, IndexOutOfRange, StateMismatch
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows
from tallyroll.storage.ext.training.epoch_batches import Order
from tallyroll.storage.stores.rewinds import rewind_to

from fork_server import warm_fork_server

LENGTHS = (1, 7, 3, 12, 2, 5)
"""Lengths of trajectories, in two lanes whose rows alternate."""


def write(path: Path, kind: Any = MemmapStorage, lengths: tuple[int, ...] = LENGTHS) -> Path:
    """Write rows that contain their trajectory and step, with lanes interleaved."""
    lanes: list[list[tuple[int, int, bool]]] = [[], []]
    for number, length in enumerate(lengths):
        lanes[number % 2] += [(number, step, step == length - 1) for step in range(length)]
    rows = [
        (number, step, last, lane)
        for at in range(max(map(len, lanes)))
        for lane in (0, 1)
        if at < len(lanes[lane])
        for number, step, last in [lanes[lane][at]]
    ]
    ids, steps, last, lane = map(np.array, zip(*rows, strict=True))
    done = last.astype(np.bool_)[:, None]
    columns: dict[Any, np.ndarray] = {
        ("x",): (ids * 100 + steps).astype(np.float32)[:, None].repeat(3, axis=1),
        ("next", "reward"): steps.astype(np.float32)[:, None] + 1,
        ("next", "done"): done,
        ("next", "terminated"): done.copy(),
        ("next", "truncated"): np.zeros_like(done),
        ("collector", "traj_ids"): ids,
        ("collector", "step"): steps,
        ("collector", "lane"): lane.astype(np.int32),
    }
    with kind(path, capacity=len(ids)) as storage:
        storage.extend(columns, ids="fresh")
    return path


ROWS = sum(LENGTHS)


# --- the order ------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    count=st.integers(0, 400),
    seed=st.integers(0, 3),
    block=st.integers(1, 9),
    window=st.integers(1, 5),
    cuts=st.lists(st.integers(0, 400), max_size=6),
)
def test_an_order_has_each_item_once_in_whatever_parts_it_is_asked_for(
    count: int, seed: int, block: int, window: int, cuts: list[int]
) -> None:
    order = Order(count, seed, 2, block, window)
    whole = order[:]
    assert sorted(whole.tolist()) == list(range(count))
    places = sorted({0, count, *(min(cut, count) for cut in cuts)})
    parts = [order[a:b] for a, b in itertools.pairwise(places)]
    assert np.concatenate([[], *parts]).tolist() == whole.tolist()
    assert order[1::3].tolist() == whole[1::3].tolist()
    if block > 1:  # an item stays within the window of its block
        blocks = -(-count // block)
        for at in range(-(-blocks // window)):
            begins = order._begins
            stop = begins[at + 1] if at + 1 < len(begins) else count
            assert len({*(whole[begins[at] : stop] // block).tolist()}) <= window


def test_orders_are_drawn_evenly() -> None:
    counts = np.zeros((12, 12), int)
    for seed in range(3000):
        counts[Order(12, seed, 0, 3, 2)[:], np.arange(12)] += 1
    # Each item is expected 250 times at each place; six standard deviations are 91.
    assert np.abs(counts - 250).max() < 91


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(0, 60),
    size=st.integers(1, 9),
    shuffle=st.booleans(),
    block=st.integers(1, 4),
    drop_last=st.booleans(),
    world=st.integers(1, 3),
    at=st.integers(0, 40),
)
def test_batches_go_on_at_any_batch_and_have_each_item_once(
    count: int, size: int, shuffle: bool, block: int, drop_last: bool, world: int, at: int
) -> None:
    def made(rank: int) -> EpochBatches:
        return EpochBatches(
            count,
            size,
            seed=5,
            shuffle=shuffle,
            block=block,
            window=2,
            drop_last=drop_last,
            rank=rank,
            world=world,
        )

    epochs = [[list(made(rank)) for rank in range(world)]]
    items = [item for rank in epochs[0] for batch in rank for item in batch]
    assert len({*items}) == len(items)
    assert drop_last or sorted(items) == list(range(count))
    for rank, batches in enumerate(epochs[0]):
        assert len(batches) == len(made(rank))
        assert all(len(batch) == size for batch in batches[:-1] or batches * drop_last)
    first = made(0)
    whole = [*first, *first]  # two epochs
    assert first.epoch == 2
    other, taken = made(0), 0
    for batch in other:
        assert batch == whole[taken]
        taken += 1
        if taken > at:
            break
    again = made(0)
    again.load_state_dict(other.state_dict())
    rest = [*again] + ([*again] if again.epoch < 2 else [])
    assert [*whole[:taken], *rest] == whole
    if whole and shuffle and count > 30:
        half = len(whole) // 2
        assert whole[:half] != whole[half:]


def test_a_state_of_another_order_and_wrong_numbers_are_refused() -> None:
    batches = EpochBatches(100, 10, seed=1)
    for wrong in ({"seed": 2}, {"count": 99}, {"batch_size": 5}, {"shuffle": False}):
        arguments: dict[str, Any] = {"count": 100, "batch_size": 10, "seed": 1} | wrong
        with pytest.raises(StateMismatch, match=next(iter(wrong))):
            EpochBatches(**arguments).load_state_dict(batches.state_dict())
    with pytest.raises(StateMismatch, match="no valid epoch and batch"):
        batches.load_state_dict({**batches.state_dict(), "batch": "3"})
    for name, value in (("batch_size", 0), ("block", 0), ("window", 1.5), ("seed", -1)):
        with pytest.raises(ValueError, match=f"{name}: expected a whole number"):
            EpochBatches(**{"count": 100, "batch_size": 10, name: value})
    with pytest.raises(ValueError, match="rank: expected a number from 0 to 1"):
        EpochBatches(100, 10, rank=2, world=2)
    with pytest.raises(ValueError, match="from 0 to 10"):
        batches.state_dict(taken=11)
    with pytest.raises(ValueError, match="epoch: expected a whole number"):
        batches.set_epoch(-1)


# --- partial epochs -------------------------------------------------------------------------------


class EpochModel:
    """Model of the batches in each iteration: whole epochs, numbered as they begin."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.epoch, self.first = 0, 0

    def whole(self, epoch: int) -> list[list[int]]:
        batches = EpochBatches(**self.arguments)
        batches.set_epoch(epoch)
        return list(batches)

    def begin(self) -> tuple[int, int, list[list[int]]]:
        """Return the epoch, the first batch and all batches of the iteration that begins."""
        epoch, first = self.epoch, self.first
        self.epoch, self.first = epoch + 1, 0
        return epoch, first, self.whole(epoch)[first:]

    def load(self, epoch: int, batch: int) -> None:
        whole = batch >= len(self.whole(epoch))
        self.epoch, self.first = (epoch + 1, 0) if whole else (epoch, batch)


OPERATIONS = st.one_of(
    st.tuples(st.sampled_from(["whole", "list", "zip", "nested", "past the end"])),
    st.tuples(st.sampled_from(["break", "raise", "peek", "save", "two"]), st.integers(1, 6)),
    st.tuples(st.just("set_epoch"), st.integers(0, 9)),
)


@given(
    st.integers(1, 23),
    st.integers(1, 6),
    st.booleans(),
    st.booleans(),
    st.integers(1, 3),
    st.lists(OPERATIONS, max_size=8),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_random_partial_epochs(
    count: int,
    size: int,
    shuffle: bool,
    drop_last: bool,
    world: int,
    operations: list[tuple[Any, ...]],
    loads: bool,
) -> None:
    arguments: dict[str, Any] = {"count": count, "batch_size": size, "shuffle": shuffle}
    arguments |= {"drop_last": drop_last, "rank": world - 1, "world": world, "block": world}
    batches, model = EpochBatches(**arguments), EpochModel(arguments)
    # A torch loader over item numbers returns the batches themselves.
    loader: Any = (
        DataLoader(range(count), batch_sampler=batches, collate_fn=list) if loads else batches
    )
    for name, *values in operations:
        if name == "set_epoch":
            batches.set_epoch(*values)
            model.epoch, model.first = values[0], 0
            continue
        if name == "zip":
            pairs = list(zip(loader, loader, strict=False))
            one = model.begin()[2]
            if one:  # otherwise the second is never started
                other = model.begin()[2]
                assert pairs == list(zip(one, other, strict=False))
            continue
        if name == "nested":
            found = [(each, list(loader)) for each in itertools.islice(loader, 2)]
            outer = model.begin()[2][:2]
            assert found == [(each, model.begin()[2]) for each in outer]
            continue
        epoch, first, wanted = model.begin()
        if name == "whole":
            assert [*loader] == wanted
        elif name == "list":
            assert len(loader) == len(model.whole(0))
            assert list(loader) == wanted
        elif name == "past the end":
            iterator = iter(loader)
            assert list(iterator) == wanted
            assert list(iterator) == []
        elif name == "break":
            assert list(itertools.islice(loader, *values)) == wanted[: values[0]]
        elif name == "raise":
            taken = []
            with contextlib.suppress(KeyError):
                for batch in loader:
                    taken.append(batch)
                    if len(taken) == values[0]:
                        raise KeyError
            assert taken == wanted[: values[0]]
        elif name == "peek":
            assert next(iter(loader), None) == (wanted[0] if wanted else None)
        elif name == "two":  # the first iterator continues after the second
            one = iter(loader)
            assert list(itertools.islice(one, *values)) == wanted[: values[0]]
            assert list(loader) == model.begin()[2]
            assert list(one) == wanted[values[0] :]
        elif name == "save":
            assert list(itertools.islice(loader, *values)) == wanted[: values[0]]
            state = batches.state_dict()
            at = min(first + values[0], first + len(wanted))
            assert (state["epoch"], state["batch"]) == (epoch, at)
            if values[0] % 2:  # another object, equivalent to another process
                batches = EpochBatches(**arguments)
                loader = (
                    DataLoader(range(count), batch_sampler=batches, collate_fn=list)
                    if loads
                    else batches
                )
            batches.load_state_dict(json.loads(json.dumps(state)))
            model.load(epoch, at)
        assert batches.epoch == model.epoch


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_give_whole_epochs_after_partial_ones(persistent: bool) -> None:
    batches = EpochBatches(22, 2, seed=1)
    model = EpochModel({"count": 22, "batch_size": 2, "seed": 1})
    warm_fork_server()
    loader: Any = DataLoader(
        range(22),  # type: ignore[arg-type]
        batch_sampler=batches,
        collate_fn=list,
        num_workers=2,
        multiprocessing_context="forkserver",
        persistent_workers=persistent,
    )
    peeked = next(iter(loader))
    assert peeked == model.begin()[2][0]
    assert list(loader) == model.begin()[2]
    wanted = model.begin()[2]
    for taken, batch in enumerate(loader, 1):
        assert batch == wanted[taken - 1]
        if taken == 9:  # the loader has requested all batches by now
            state = batches.state_dict(taken)
            break
    assert (state["epoch"], state["batch"]) == (2, 9)
    assert list(loader) == model.begin()[2]
    batches.load_state_dict(state)
    assert list(loader) == wanted[9:]
    assert list(loader) == model.whole(3)


def test_ranks_that_set_the_epoch_share_it_after_one_of_them_left_early() -> None:
    ranks = [EpochBatches(21, 4, rank=rank, world=3) for rank in range(3)]
    next(iter(ranks[1]))
    for rank in ranks:
        rank.set_epoch(5)
    items = [item for rank in ranks for batch in rank for item in batch]
    assert sorted(items) == list(range(21))


# --- rows and pieces ------------------------------------------------------------------------------


def ids_and_steps(found: Any) -> list[tuple[int, int]]:
    values = found["x"][..., 0].reshape(-1).long().tolist()
    return [(value // 100, value % 100) for value in values]


@pytest.mark.parametrize("kind", [MemmapStorage, ZarrStorage])
def test_items_are_rows(tmp_path: Path, kind: Any) -> None:
    with open_storage(write(tmp_path / "rows", kind)) as storage:
        data = storage.dataset()
        assert len(data) == ROWS
        batch = data.__getitems__([3, 0, -1])
        assert (batch == storage.get([3, 0, ROWS - 1])).all()
        assert (data[5] == storage.get(5)).all()
        some = storage.dataset(["x", ("next", "reward")], transform=lambda rows: rows["x"] * 2)
        assert (some.__getitems__(torch.tensor([1, 2])) == storage.get([1, 2])["x"] * 2).all()
        assert len(storage.dataset("x")[0].keys()) == 1
        for wrong in (ROWS, -ROWS - 1):
            with pytest.raises(IndexOutOfRange, match=f"from 0 to {ROWS - 1}"):
                data[wrong]
        with pytest.raises(ColumnsMissing):
            storage.dataset("y")


@pytest.mark.parametrize("length", [1, 2, 5, 12, 30])
@pytest.mark.parametrize("short", ["pad", "skip"])
def test_pieces_have_each_row_once_in_time_order(tmp_path: Path, length: int, short: Any) -> None:
    with open_storage(write(tmp_path / "rows")) as storage:
        data = storage.dataset(slice_len=length, short=short)
        expected = {
            tuple((number, step) for step in range(at, min(at + length, rows)))
            for number, rows in enumerate(LENGTHS)
            for at in range(0, rows, length)
            if short == "pad" or at + length <= rows
        }
        assert len(data) == len(expected)
        if not len(data):
            return
        batch = data.__getitems__(range(len(data)))
        assert batch.batch_size == (len(data), length)
        mask = batch["collector", "mask"]
        found = {tuple(ids_and_steps(piece[each])) for piece, each in zip(batch, mask, strict=True)}
        assert found == expected
        assert not batch["x"][~mask].any()
        last = mask.sum(1) - 1
        every = torch.arange(len(batch))
        assert batch["next", "done"][every, last].all()
        assert batch["next", "done"].sum() == len(batch)
        ended = batch["next", "terminated"][every, last, 0]
        assert (batch["collector", "cut"][every, last] == ~ended).all()
        assert int(ended.sum()) == sum(1 for piece in expected if (*piece[-1],) in ENDS)
        some = storage.dataset(["x"], slice_len=length, short=short).__getitems__([0])
        assert (some["x"] == batch["x"][:1]).all()


ENDS = {(number, rows - 1) for number, rows in enumerate(LENGTHS)}


def test_only_chosen_trajectories_are_items(tmp_path: Path) -> None:
    with open_storage(write(tmp_path / "rows")) as storage:
        data = storage.dataset(where="length >= 5")
        assert len(data) == 24
        assert {number for number, _ in ids_and_steps(data.__getitems__(range(24)))} == {1, 3, 5}
        pieces = storage.dataset(slice_len=4, where="length >= 5")
        assert len(pieces) == 2 + 3 + 2
        found = pieces.__getitems__(range(7))
        rows = ids_and_steps(found[found["collector", "mask"]])
        assert sorted(rows) == [(n, s) for n in (1, 3, 5) for s in range(LENGTHS[n])]


@pytest.mark.parametrize("start", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_workers_read_each_item_once_in_the_order_of_the_seed(tmp_path: Path, start: str) -> None:
    if start == "forkserver":
        warm_fork_server()
    with open_storage(write(tmp_path / "rows")) as storage:
        data = storage.dataset(["x"], slice_len=3, where="length > 1")
        alone = [batch["x"] for batch in DataLoader(data, batch_sampler=order(data), **plain(data))]
        loader = DataLoader(
            data,
            batch_sampler=order(data),
            num_workers=2,
            multiprocessing_context=start,
            persistent_workers=True,
            **plain(data),
        )
        by_workers = [batch["x"] for batch in loader]
        assert all(torch.equal(a, b) for a, b in zip(alone, by_workers, strict=True))
        after = [batch["x"] for batch in loader]  # the next epoch, by the same workers
        assert sorted(map(float, torch.cat(after).sum((1, 2)))) == sorted(
            map(float, torch.cat(alone).sum((1, 2)))
        )
        assert not all(map(torch.equal, alone, after))


def order(data: Any) -> EpochBatches:
    return EpochBatches(len(data), 2, seed=3)


def plain(data: Any) -> dict[str, Any]:
    return {"collate_fn": data.collate}


def test_a_dataset_is_pickled_as_its_storage_and_under_torchs_samplers(tmp_path: Path) -> None:
    with open_storage(write(tmp_path / "rows")) as storage:
        data = storage.dataset(slice_len=4)
        other = pickle.loads(pickle.dumps(data))
        assert (other.__getitems__(range(len(data))) == data.__getitems__(range(len(data)))).all()
        other.storage.close()
        seen: list[tuple[int, int]] = []
        rows = storage.dataset()
        for rank in (0, 1):
            sampler = DistributedSampler(rows, 2, rank, shuffle=True, seed=1)
            for batch in DataLoader(rows, batch_size=4, sampler=sampler, collate_fn=rows.collate):
                seen += ids_and_steps(batch)
        assert sorted(seen) == sorted((n, s) for n, rows in enumerate(LENGTHS) for s in range(rows))


def test_rows_that_come_go_or_change_are_no_items_and_no_other_rows() -> None:
    with MemmapStorage(max_size=20) as storage:
        storage.extend(trajectory_rows(0, 20, steps=5), ids="fresh")
        data, pieces = storage.dataset(), storage.dataset(slice_len=5)
        before = data[10]
        storage.extend(trajectory_rows(20, 5, steps=5), ids="fresh")
        assert len(data) == 20
        assert (data[10] == before).all()
        with pytest.raises(IndexOutOfRange):
            data[4]
        with pytest.raises(IndexOutOfRange, match="overwritten since the dataset"):
            pieces[0]
    with MemmapStorage() as storage:
        storage.extend(trajectory_rows(0, 20, steps=5), ids="fresh")
        data = storage.dataset()
        rewind_to(storage.writer, 10, None)
        storage.extend(trajectory_rows(10, 20, steps=5), ids="fresh")
        with pytest.raises(StateMismatch, match="this dataset"):
            data[3]
    with pytest.raises(Exception, match="was closed"):
        storage.dataset()


def test_wrong_arguments(tmp_path: Path) -> None:
    with open_storage(write(tmp_path / "rows")) as storage:
        with pytest.raises(ValueError, match="slice_len: expected a whole number above 0"):
            storage.dataset(slice_len=0)
        with pytest.raises(ValueError, match="short: expected 'pad' or 'skip'"):
            storage.dataset(slice_len=2, short="error")  # type: ignore[arg-type]


# --- tables ---------------------------------------------------------------------------------------


def test_tables_have_the_rows(tmp_path: Path) -> None:
    pandas, arrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    with open_storage(write(tmp_path / "rows")) as storage:
        every = storage.get(slice(None))
        frame = storage.to_pandas()
        assert isinstance(frame, pandas.DataFrame)
        assert list(frame.columns[:4]) == ["x.0", "x.1", "x.2", "next.reward"]
        assert np.array_equal(frame[["x.0", "x.1", "x.2"]].to_numpy(), every["x"])
        assert frame["collector.traj_ids"].dtype == np.int64
        assert np.array_equal(frame["next.done"], every["next", "done"][:, 0])
        table = storage.to_arrow(["x", ("next", "done")])
        assert table.column_names == ["x", "next.done"]
        assert table.schema.field("x").type == arrow.list_(arrow.float32(), 3)
        assert table.schema.field("x").metadata == {b"shape": b"[3]"}
        assert np.array_equal(np.array(table["x"].to_pylist(), np.float32), every["x"])
        assert table["next.done"].to_pylist() == every["next", "done"].tolist()
        with pytest.raises(ColumnsMissing):
            storage.to_arrow("y")
    with MemmapStorage() as wide:
        columns = {("p",): np.arange(400, dtype=np.uint8).reshape(2, 2, 100), ("b",): np.ones(2)}
        wide.extend(columns)
        assert list(wide.to_pandas().columns) == ["b"]
        with pytest.raises(ValueError, match="numbers per row for a pandas table, got 200"):
            wide.to_pandas("p")
        assert wide.to_arrow()["p"].to_pylist() == columns["p",].reshape(2, -1).tolist()
    with MemmapStorage() as odd:
        odd.extend({("z",): np.ones(2, np.complex64), ("n",): np.ones(2)})
        with pytest.raises(ValueError, match="complex numbers"):
            odd.to_arrow()
        brain = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    with MemmapStorage() as half:
        from tensordict import TensorDict

        half.extend(TensorDict({"h": brain}, [2]))
        assert half.to_arrow()["h"].to_pylist() == [1.5, -2.0]
        assert half.to_pandas()["h"].tolist() == [1.5, -2.0]
