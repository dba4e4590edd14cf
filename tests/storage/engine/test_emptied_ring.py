"""Test rings that a replay buffer empties: no row is left, and counts, ids and indices continue.

TorchRL's own storage, with the same rows and the same random numbers, is the oracle.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers import (
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)

from tallyroll.storage import (
    CorruptStorage,
    MemmapStorage,
    TrajectorySliceSampler,
    n_step,
    open_storage,
    verify,
)
from tallyroll.storage.engine import ring as ring_
from tallyroll.storage.errors import IndexOutOfRange, NoSlices, NotAnAppend, TrajectoryIdTaken
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows
from tallyroll.storage.files.commit_header import word_of
from tallyroll.storage.storages import FORMATS

from storage_contract import process

STEPS = 6
"""Rows per trajectory."""
ID, STEP, LANE = ("collector", "traj_ids"), ("collector", "step"), ("collector", "lane")
rows = partial(trajectory_rows, steps=STEPS)


def held(storage: Any) -> list[int]:
    """Return the numbers of the rows, in the order of their indices."""
    found: list[int] = storage.get(slice(None))["observation"][:, 0].long().tolist()
    return found


# -- the arithmetic


@given(st.integers(1, 12), st.integers(1, 60), st.data())
def test_indices_are_those_of_a_ring_that_began_at_the_floor(
    size: int, floor: int, data: Any
) -> None:
    head = floor + data.draw(st.integers(0, 3 * size))
    reserve = max(floor + size, head + data.draw(st.integers(0, size)))
    first = min(head, ring_.first_valid(reserve, size))
    assert first >= floor
    slots: list[int | None] = [None] * size
    for row in range(first, head):
        slots[(row - floor) % size] = row
    valid = np.array([row for row in slots if row is not None], dtype=np.int64)
    index = np.arange(len(valid))
    at = ring_.slots_at(index, head, reserve, size, floor)
    assert at.tolist() == [row % size for row in valid]
    assert ring_.rows_in(at, head, size).tolist() == valid.tolist()
    assert ring_.index_at(at, head, reserve, size, floor).tolist() == index.tolist()


# -- compared with TorchRL's own storage


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.integers(2, 12),
    steps=st.lists(
        st.one_of(st.just("empty"), st.just("reopen"), st.integers(1, 12)), min_size=2, max_size=14
    ),
    sampler=st.sampled_from([RandomSampler, SamplerWithoutReplacement]),
    kind=st.sampled_from([ReplayBuffer, TensorDictReplayBuffer]),
)
def test_an_emptied_ring_is_like_torchrls_own_storage(
    tmp_path: Path, size: int, steps: list[Any], sampler: Any, kind: Any
) -> None:
    path = tmp_path / str(len(list(tmp_path.iterdir())))
    storage = MemmapStorage(path, max_size=size)

    def buffer(over: Any) -> Any:
        return kind(
            storage=over,
            sampler=sampler(),
            batch_size=3,
            generator=torch.Generator().manual_seed(5),
        )

    mine, other = buffer(storage), buffer(LazyTensorStorage(size))
    head, left = 0, 0
    for step in steps:
        if step == "reopen" and head:
            # Its buffer is new as well, so its random numbers start over.
            state = other.state_dict()["_writer"]
            storage.close()
            storage = MemmapStorage(path, mode="append")
            mine = buffer(storage)
            over = other.storage
            other = buffer(over)
            other.writer.load_state_dict(state)
        elif step == "empty":
            mine.empty()
            other.empty()
            left = 0
        elif step != "reopen":
            count = min(step, size)
            index = mine.extend(rows(head, count))
            assert index.tolist() == other.extend(rows(head, count)).tolist()
            assert (mine[index]["observation"] == rows(head, count)["observation"]).all()
            head, left = head + count, min(size, left + count)
        assert storage.head == head
        assert storage.span == range(head - left, head)
        assert len(mine) == len(other) == left
        assert mine.writer._cursor == other.writer._cursor
        if not head:
            continue
        assert held(storage) == other.storage.get(slice(None))["observation"][:, 0].tolist()
        if left:
            a, info_a = mine.sample(return_info=True)
            b, info_b = other.sample(return_info=True)
            assert np.array_equal(info_a["index"], info_b["index"])
            assert (a["observation"] == b["observation"]).all()
        else:
            with pytest.raises(IndexOutOfRange):
                storage.get(0)
    storage.close()


@pytest.mark.filterwarnings("ignore:SliceSampler returned a short flat batch:UserWarning")
@pytest.mark.parametrize("sampler_class", [SliceSampler, SliceSamplerWithoutReplacement])
@pytest.mark.parametrize("by", ["end_key", "traj_key"])
def test_slices_of_an_emptied_ring_are_those_of_torchrls_own(
    tmp_path: Path, sampler_class: Any, by: str
) -> None:
    key = {"end_key": ("next", "done")} if by == "end_key" else {"traj_key": ID}
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    with MemmapStorage(tmp_path / "ring", max_size=30) as storage:
        mine, other = (
            TensorDictReplayBuffer(
                storage=over,
                sampler=sampler_class(slice_len=3, strict_length=True, **key),
                batch_size=12,
                generator=generator,
            )
            for over, generator in zip((storage, LazyTensorStorage(30)), generators, strict=True)
        )
        head = 0
        for count in (20, 0, 12, 12, 12, 6, 0, 30, 12):
            if not count:
                mine.empty()
                other.empty()
                continue
            mine.extend(rows(head, count))
            other.extend(rows(head, count))
            head += count
            for _ in range(4):
                torch.manual_seed(1)
                a = mine.sample()
                torch.manual_seed(1)
                b = other.sample()
                assert (a["observation"] == b["observation"]).all()
                assert (a["next", "done"] == b["next", "done"]).all()


def test_our_samplers_slices_and_n_steps_see_what_is_left(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "ring", max_size=30) as storage:
        buffer = TensorDictReplayBuffer(
            storage=storage, sampler=TrajectorySliceSampler(3), batch_size=30
        )
        buffer.extend(rows(0, 20))
        assert len(storage.trajectories) == 4
        buffer.empty()
        with pytest.raises(NoSlices):
            storage.trajectories.sample_slices(4, 2)
        assert len(storage.trajectories) == 0
        buffer.extend(rows(20, 14))
        assert storage.trajectories.ids.tolist() == [3, 4, 5]
        # Counted trajectories stay counted, although their first rows were emptied.
        assert storage.trajectories.lengths.tolist() == [6, 6, 4]
        assert storage.trajectories.whole.tolist() == [False, True, True]
        assert storage.trajectories.rows_of(3).tolist() == [20, 21, 22, 23]
        for _ in range(5):
            found = buffer.sample().reshape(10, 3)
            number = found["observation"][..., 0]
            assert (number.diff(dim=1) == 1).all()
            assert number.min() >= 20
        ahead = n_step(storage, torch.arange(14), n=3, gamma=1.0)
        assert ahead["observation"][:, 0].tolist() == list(range(20, 34))


# -- committed


def test_everybody_sees_what_is_left(tmp_path: Path) -> None:
    """Four readers agree.

    One is here, one is in another process, one opens the storage later, and one is `verify`.
    """
    path = tmp_path / "ring"
    with MemmapStorage(path, max_size=40) as storage:
        buffer = ReplayBuffer(storage=storage, batch_size=4)
        buffer.extend(rows(0, 36))
        with open_storage(path) as reader:
            assert reader.span == range(36)
            buffer.empty()
            assert reader.span == storage.span == range(36, 36)
            assert seen_elsewhere(path) == (36, [], True)
            assert not verify(path).findings
            buffer.extend(rows(36, 9))
            assert reader.span == range(36, 45)
            assert held(reader) == held(storage) == list(range(36, 45))
            assert seen_elsewhere(path) == (45, list(range(36, 45)), True)
    assert seen_elsewhere(path) == (45, list(range(36, 45)), True)
    with MemmapStorage(path, mode="append") as storage:
        assert storage.trajectories.ids.tolist() == [6, 7]
        buffer = ReplayBuffer(storage=storage, batch_size=4)
        assert buffer.extend(rows(45, 3)).tolist() == [9, 10, 11]
        assert (buffer[torch.arange(12)] == rows(36, 12)).all()


def seen_elsewhere(path: Path) -> tuple[int, list[int], bool]:
    """Return the head, the rows and the verdict from another process."""
    with process(_look, path) as (_, connection):
        assert connection.poll(60)
        found: tuple[int, list[int], bool] = connection.recv()
    return found


def _look(connection: Any, path: Path) -> None:
    with open_storage(path) as reader:
        connection.send((reader.head, held(reader), not verify(path).findings))


@pytest.mark.parametrize("emptied", [True, False])
@pytest.mark.parametrize("count", [20, 5])
def test_ids_of_rows_that_went_may_be_written_again(
    tmp_path: Path, count: int, emptied: bool
) -> None:
    """On-policy scripts write the same ids in every epoch.

    Of five rows, all belong to one trajectory.
    """
    ring = 40 if emptied else count
    with MemmapStorage(tmp_path / "ring", max_size=ring) as storage:
        buffer = ReplayBuffer(storage=storage, batch_size=4)
        for epoch in range(4):
            if epoch:
                if emptied:
                    with pytest.raises(TrajectoryIdTaken):
                        buffer.extend(rows(0, count))
                    buffer.empty()
                else:
                    with pytest.raises(TrajectoryIdTaken):
                        buffer.extend(rows(0, count - 1))
            buffer.extend(rows(0, count))
            assert storage.span == range(epoch * count, (epoch + 1) * count)
            assert held(storage) == list(range(count))
            table = storage.trajectories.table
            assert table["id"].tolist() == list(range(-(-count // STEPS)))
            assert table["length"].sum() == count
            assert table["return"].sum() == sum(range(count))
            assert storage.trajectories.rows_of(0).tolist() == [
                epoch * count + step for step in range(min(count, STEPS))
            ]
            assert not verify(tmp_path / "ring").findings
    assert not verify(tmp_path / "ring").findings
    with MemmapStorage(tmp_path / "ring", mode="append") as storage:
        assert storage.trajectories.lengths.sum() == count
        ReplayBuffer(storage=storage, batch_size=4).extend(rows(100, 3))
        assert storage.trajectories.ids[-1] == 17


def test_a_storage_that_keeps_every_row_is_not_emptied(tmp_path: Path) -> None:
    for name, kind in FORMATS.items():
        with kind(tmp_path / name, capacity=50) as storage:
            buffer = ReplayBuffer(storage=storage, batch_size=4)
            buffer.empty()  # there is nothing to empty
            buffer.extend(rows(0, 10))
            with pytest.raises(NotAnAppend, match="max_size"):
                buffer.empty()
            buffer.extend(rows(10, 10))
            assert held(storage) == list(range(20))


def test_a_ring_that_was_never_emptied_has_the_same_bytes(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "ring", max_size=8) as storage:
        storage.extend(rows(0, 6))
        storage.extend(rows(6, 6))
        header = storage.writer.files.header_path
    assert header.read_bytes()[256:264] == bytes(8)


def test_a_dump_of_an_emptied_ring_is_emptied(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "ring", max_size=20) as storage:
        buffer = ReplayBuffer(storage=storage, batch_size=4)
        buffer.extend(rows(0, 15))
        buffer.dumps(tmp_path / "dump")
        buffer.empty()
        buffer.dumps(tmp_path / "dump")
        with MemmapStorage(tmp_path / "none", max_size=20) as copy:
            ReplayBuffer(storage=copy, batch_size=4).loads(tmp_path / "dump")
            assert copy.span == range(15, 15)
        buffer.extend(rows(15, 8))
        buffer.dumps(tmp_path / "dump")
        with MemmapStorage(tmp_path / "copy", max_size=20) as copy:
            again = ReplayBuffer(storage=copy, batch_size=4)
            again.loads(tmp_path / "dump")
            assert copy.span == range(15, 23)
            assert again.extend(rows(23, 4)).tolist() == [8, 9, 10, 11]
            assert held(copy) == list(range(15, 27))


def test_a_damaged_floor_is_told(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    with MemmapStorage(path, max_size=10) as storage:
        storage.extend(rows(0, 6))
        header = storage.writer.files.header_path
    content = bytearray(header.read_bytes())
    for word in (word_of(6), word_of(3) ^ 1 << 20):
        content[256:264] = word.to_bytes(8, "little")
        header.write_bytes(content)
        with pytest.raises(CorruptStorage):
            MemmapStorage(path, mode="read")


def test_a_writer_that_was_killed_between_the_two_words(tmp_path: Path) -> None:
    """No row is valid anymore, and the next writer continues with the slot after the last row."""
    path = tmp_path / "ring"
    with MemmapStorage(path, max_size=10) as storage:
        storage.extend(rows(0, 6))
        header = storage.writer.files.header_path
    content = bytearray(header.read_bytes())
    content[64:72] = word_of(16).to_bytes(8, "little")
    header.write_bytes(content)
    with open_storage(path) as reader:
        assert reader.span == range(6, 6)
    with MemmapStorage(path, mode="append") as storage:
        buffer = ReplayBuffer(storage=storage, batch_size=2)
        for start in (6, 13):
            index = buffer.extend(rows(start, 7))
            assert index.tolist() == [(start - 6 + each) % 10 for each in range(7)]
            assert (buffer[index] == rows(start, 7)).all()
