"""Compare `PrioritizedSampler`, under TorchRL's buffers and alone, with a model of each row."""

from __future__ import annotations

import json
import os
import pickle
import stat
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.scheduler import LinearScheduler

from tallyroll.storage import (
    H5Storage,
    MemmapStorage,
    PrioritizedSampler,
    ZarrStorage,
    fast_paths,
    open_storage,
)
from tallyroll.storage.errors import (
    ColumnsMissing,
    IndexOutOfRange,
    NoSlices,
    NotEnoughMemory,
    NotPicklable,
    ReadOnlyStorage,
    SlotsMayChange,
    StateMismatch,
)
from tallyroll.storage.ext.sampling import priorities as priorities_module
from tallyroll.storage.stores.rewinds import rewind_to

from lane_model import Model


def rows(start: int, stop: int) -> TensorDict:
    return TensorDict({"number": torch.arange(start, stop)}, [stop - start])


def filled(*args: Any, count: int = 100, **options: Any) -> MemmapStorage:
    storage = MemmapStorage(*args, **options)
    storage.extend(rows(0, count))
    return storage


def leaves(sampler: PrioritizedSampler) -> list[float]:
    sampler._priorities.follow()
    found: list[float] = sampler._priorities.leaves().tolist()
    return found


def buffer_of(sampler: PrioritizedSampler, batch: int = 10, **options: Any) -> Any:
    return TensorDictReplayBuffer(
        storage=sampler.storage,
        sampler=sampler,
        batch_size=batch,
        priority_key="td_error",
        **options,
    )


# --- draws ----------------------------------------------------------------------------------------


def test_a_sample_says_its_rows_and_weights() -> None:
    """The weight is TorchRL's: (p / least p)^-beta with p = (priority + eps)^alpha."""
    with filled(count=4) as storage:
        sampler = PrioritizedSampler(storage, alpha=0.5, beta=0.8, eps=0.0)
        sampler.update_priority([0, 1, 2, 3], [1.0, 4.0, 9.0, 16.0])
        batch = sampler.sample(5000)
        number = batch["number"]
        assert torch.equal(batch["collector", "row"], number)
        expected = (1.0 + number.double()) ** -0.8
        assert torch.allclose(batch["priority_weight"].double(), expected, rtol=1e-6)
        parts = torch.bincount(number, minlength=4) / 5000
        assert torch.allclose(parts, torch.tensor([1.0, 2.0, 3.0, 4.0]) / 10, atol=0.03)


def test_a_generator_draws_the_same_again() -> None:
    with filled() as storage:
        draws = [
            PrioritizedSampler(storage, generator=torch.Generator().manual_seed(7)).draw(50)[0]
            for _ in range(2)
        ]
        torch.manual_seed(3)
        sampler = PrioritizedSampler(storage)
        draws += [sampler.draw(50)[0]]
        torch.manual_seed(3)
        draws += [sampler.draw(50)[0]]
    assert np.array_equal(draws[0], draws[1])
    assert np.array_equal(draws[2], draws[3])
    assert not np.array_equal(draws[0], draws[2])


@pytest.mark.parametrize("ring", [None, 300])
@pytest.mark.parametrize("length", [1, 2, 6])
def test_sequences_start_wherever_one_can(ring: int | None, length: int) -> None:
    """Compare with a plain loop over the rows of every trajectory, after every batch."""
    model = Model.random(np.random.default_rng(length), rows=900, lanes=4)
    with MemmapStorage(max_size=ring) as storage:
        sampler = PrioritizedSampler(storage, slice_len=length)
        for start in range(0, 900, 90):
            storage.extend(model.rows(start, start + 90))
            batch, span = sampler.sample(20), storage.span
            assert batch.shape == (20, length)
            assert torch.equal(batch["observation"].squeeze(-1).long(), batch["collector", "row"])
            starts = {
                part[0]
                for each in model.trajectories().values()
                for at in range(len(each))
                if len(part := each[at : at + length]) == length
                and part[0] >= span.start
                and part[-1] < span.stop
                and (np.diff(model.steps[part]) == 1).all()
            }
            assert {span.start + at for at in np.flatnonzero(leaves(sampler))} == starts
            sampler.update_priority(batch, torch.rand(20))
        assert sampler.gone == 0


def test_sequences_under_a_buffer_are_marked_and_updated_by_their_reduction() -> None:
    model = Model.random(np.random.default_rng(0), rows=300, lanes=3)
    with MemmapStorage() as storage:
        storage.extend(model.rows())
        sampler = PrioritizedSampler(storage, alpha=1, slice_len=4, reduction="mean")
        buffer = buffer_of(sampler, 12)
        batch = buffer.sample()
        parts = batch.reshape(3, 4)
        assert parts["next", "done"][:, -1].all()
        assert (parts["collector", "step"].diff(dim=1) == 1).all()
        assert (parts["priority_weight"] == parts["priority_weight"][:, :1]).all()
        batch["td_error"] = torch.arange(12.0)
        buffer.update_tensordict_priority(batch)
        found = leaves(sampler)
        for first, mean in zip(parts["index"][:, 0].tolist(), [1.5, 5.5, 9.5], strict=True):
            assert found[first] == pytest.approx(mean)


def test_sequences_are_taken_back_with_their_rows() -> None:
    """A start stays with its row. If its later rows are gone, it is no longer a start."""
    model = Model.random(np.random.default_rng(1), rows=400, lanes=3, skip=0.0)
    with MemmapStorage() as storage:
        storage.extend(model.rows())
        sampler = PrioritizedSampler(storage, slice_len=5)
        sampler.draw(1)
        rewind_to(storage.writer, 200, None)
        with MemmapStorage() as other:
            other.extend(model.rows(0, 200))
            assert leaves(sampler) == leaves(PrioritizedSampler(other, slice_len=5))
        storage.extend(model.rows(200, 400))
        with MemmapStorage() as other:
            other.extend(model.rows())
            assert leaves(sampler) == leaves(PrioritizedSampler(other, slice_len=5))


def test_rows_that_another_writer_commits_come_in(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with filled(path, count=10):
        pass
    with open_storage(path) as storage:
        sampler = PrioritizedSampler(storage, alpha=1, eps=0)
        sampler.update_priority(torch.arange(10), torch.full((10,), 2.5))
        with open_storage(path, "append") as writer:  # another process, to the reader
            writer.extend(rows(10, 30))
        assert leaves(sampler) == [2.5] * 30
        assert sampler.sample(200)["number"].max() >= 10
        with pytest.raises(ReadOnlyStorage, match="dumps"):
            sampler.save()


# --- in place of TorchRL's ------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_buffer_updates_the_rows_that_it_drew(prefetch: int) -> None:
    with MemmapStorage(max_size=64) as storage:
        sampler = PrioritizedSampler(storage, alpha=1, eps=0)
        buffer = buffer_of(sampler, 16, prefetch=prefetch or None)
        buffer.extend(rows(0, 64))
        for turn in range(1, 6):
            batch = buffer.sample()
            assert torch.equal(batch["collector", "row"], batch["number"])
            batch["td_error"] = torch.full((16, 1), float(turn))
            buffer.update_tensordict_priority(batch)
            there = set(storage.span)
            for row in set(batch["number"].tolist()) & there:
                assert leaves(sampler)[row - storage.span.start] == turn
        assert sampler.gone == 0


def test_a_late_update_never_changes_the_row_that_came_instead() -> None:
    with filled(count=8, max_size=8) as storage:
        sampler = PrioritizedSampler(storage, alpha=1, eps=0)
        buffer = buffer_of(sampler, 8)
        late = buffer.sample()
        buffer.extend(rows(8, 16))
        buffer.update_priority(late["index"], torch.full((8,), 9.0))
        sampler.update_priority(late, torch.full((8,), 9.0))
        assert leaves(sampler) == [1.0] * 8
        assert sampler.gone == 16
        new = buffer.sample()
        sampler.update_priority(late, 9.0)  # by row: still the old rows
        assert sampler.gone == 24
        buffer.update_priority(new["index"], 3.0)
        assert sampler.gone == 24
        assert {3.0} <= set(leaves(sampler)) <= {1.0, 3.0}


@pytest.mark.parametrize("one_by_one", [False, True])
def test_priorities_that_come_with_rows_are_theirs(one_by_one: bool) -> None:
    with MemmapStorage(max_size=6) as storage:
        sampler = PrioritizedSampler(storage, alpha=1, eps=0)
        buffer = buffer_of(sampler, 6)
        for start in (0, 6):
            new = rows(start, start + 6).set("td_error", torch.arange(1.0, 7.0) + start)
            if one_by_one:
                for row in new:
                    buffer.add(row)
            else:
                buffer.extend(new)
            buffer.sample()  # the index now means these rows
            assert leaves(sampler) == (np.arange(1.0, 7.0) + start).tolist()
        assert sampler.gone == 0


def test_a_new_buffer_leaves_the_priorities_as_they_are() -> None:
    """TorchRL's resets all priorities to the default when it is created."""
    with filled(count=10) as storage:
        sampler = PrioritizedSampler(storage, alpha=1, eps=0)
        sampler.update_priority(range(10), np.arange(1.0, 11.0))
        buffer = buffer_of(sampler)
        assert leaves(sampler) == np.arange(1.0, 11.0).tolist()
        assert sampler.default_priority == 10
        assert sampler.gone == 0
        buffer.update_priority(torch.arange(10), torch.full((10,), 4.0))
        assert leaves(sampler) == [4.0] * 10, "and only then"


def test_an_index_that_extend_returned_means_the_rows_that_it_wrote() -> None:
    with MemmapStorage(max_size=4) as storage:
        sampler = PrioritizedSampler(storage, alpha=1, eps=0)
        buffer = buffer_of(sampler, 4)
        index = buffer.extend(rows(0, 4))
        storage.extend(rows(4, 6))  # as by a collector: rows 0 and 1 are gone
        buffer.update_priority(index, torch.tensor([5.0, 6.0, 7.0, 8.0]))
        assert sampler.gone == 2
        assert leaves(sampler) == [7.0, 8.0, 1.0, 1.0]
        buffer.update_priority(torch.arange(4), torch.full((4,), 1.0))
        assert leaves(sampler) == [1.0] * 4, "all of them, of which none was drawn"


def test_emptied_rings_and_plain_buffers() -> None:
    with filled(count=10, max_size=10) as storage:
        sampler = PrioritizedSampler(storage, alpha=1, eps=0)
        buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=4)
        sampler.update_priority(range(10), 7.0)
        buffer.empty()
        with pytest.raises(NoSlices, match="no rows yet"):
            buffer.sample()
        assert not sampler.can_sample(storage, 4)
        storage.extend(rows(10, 14))
        assert leaves(sampler) == [1.0] * 4
        batch, info = buffer.sample(return_info=True)
        assert torch.equal(batch["number"], info["collector", "row"])
        buffer.mark_update(torch.tensor([0]))
        sampler.update_priority(torch.tensor([0]), 5.0)
        buffer.mark_update(torch.tensor([1]))
        assert leaves(sampler) == [5.0, 5.0, 1.0, 1.0]


def test_the_exponents_may_be_annealed() -> None:
    with filled(count=3) as storage:
        sampler = PrioritizedSampler(storage, alpha=1, eps=0)
        sampler.update_priority(range(3), [1.0, 4.0, 9.0])
        schedule = LinearScheduler(sampler, "beta", final_value=1.0, num_steps=2)
        schedule.step()
        schedule.step()
        assert sampler.beta == 1.0
        sampler.alpha = 0.5
        assert leaves(sampler) == [1.0, 2.0, 3.0]
        assert sampler.default_priority == 9
        sampler.alpha = 0.0
        assert leaves(sampler) == [1.0] * 3
        with pytest.raises(ValueError, match="alpha=0 all rows have the same probability"):
            sampler.alpha = 0.5
        sampler.update_priority(range(3), [1.0, 4.0, 9.0])
        assert leaves(sampler) == [1.0] * 3


# --- saved priorities -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [MemmapStorage, H5Storage, ZarrStorage])
def test_a_restart_goes_on_with_them(tmp_path: Path, kind: Any) -> None:
    path = tmp_path / ("rows.h5" if kind is H5Storage else "rows")
    with kind(path, capacity=100) as storage:
        sampler = PrioritizedSampler(storage)  # before the first row
        storage.extend(rows(0, 50))
        sampler.update_priority(range(50), torch.rand(50))
        before = leaves(sampler)
    with open_storage(path, "append") as storage:
        sampler = PrioritizedSampler(storage)
        assert leaves(sampler) == before
        storage.extend(rows(50, 60))
        assert leaves(sampler) == before + [max(before)] * 10
        sampler.save()
    with open_storage(path) as storage:
        assert leaves(PrioritizedSampler(storage)) == before + [max(before)] * 10
        other = PrioritizedSampler(storage, alpha=1.0, eps=0.0)
        expected = np.array(before, np.float32) ** (1 / 0.6)
        assert leaves(other)[:50] == pytest.approx(expected.tolist(), rel=1e-5, abs=2e-8)


def test_rows_with_overlays_have_the_priorities_of_the_rows(tmp_path: Path) -> None:
    """Draws include the overlays, alone and under a buffer, and both share one file."""
    with MemmapStorage(tmp_path / "rows", max_size=60) as storage:
        storage.extend(rows(0, 50))
        tens = storage.overlay("tens", torch.int64, fill=-1)
        overlaid = storage.with_overlays("tens")
        sampler = PrioritizedSampler(overlaid, alpha=1, eps=0)
        tens.set(rows=np.arange(50), values=np.arange(50) * 10)
        buffer = buffer_of(sampler, 30)
        for batch in (sampler.sample(30), buffer.sample()):
            assert torch.equal(batch["tens"], batch["number"] * 10)
            sampler.update_priority(batch, batch["number"] + 1.0)
        storage.extend(rows(50, 70))  # into the second lap
        batch = sampler.sample(200)
        assert torch.equal(batch["tens"], batch["number"].where(batch["number"] < 50, -0.1) * 10)
        sampler.update_rows(range(10, 70), range(1, 61))
        sampler.update_rows([9], [1.0])
        assert sampler.gone == 1
        sampler.save()
        sampler.update_rows([10], [100.0])
    with open_storage(tmp_path / "rows", "append") as storage:
        for each in (storage, storage.with_overlays("tens")):
            assert leaves(PrioritizedSampler(each, alpha=1, eps=0)) == [100.0, *range(2, 61)]
    with pytest.raises(SlotsMayChange), open_storage(tmp_path / "rows") as storage:
        PrioritizedSampler(storage.with_overlays("tens"))


def test_an_emptied_ring_that_was_saved_is_saved_again(tmp_path: Path) -> None:
    """The save of no rows is older than the new rows, so closing the storage saves again."""
    with filled(tmp_path / "rows", count=10, max_size=10) as storage:
        storage._empty()
        sampler = PrioritizedSampler(storage, alpha=1, eps=0)
        sampler.save()
        storage.extend(rows(10, 13))
    with open_storage(tmp_path / "rows", "append") as storage:  # any warning is an error here
        assert leaves(PrioritizedSampler(storage, alpha=1, eps=0)) == [1.0] * 3


def test_a_checkpoint_that_takes_rows_back_leaves_the_others(tmp_path: Path) -> None:
    with filled(tmp_path / "rows", count=20) as storage:
        sampler = PrioritizedSampler(storage, alpha=1, eps=0)
        sampler.update_priority(range(20), np.arange(1.0, 21.0))
    with open_storage(tmp_path / "rows", "append") as storage:
        rewind_to(storage.writer, 5, None)
        storage.extend(rows(0, 10))
        with pytest.warns(UserWarning, match=r"has priorities of 20 rows, but .* has 15 rows"):
            sampler = PrioritizedSampler(storage, alpha=1, eps=0)
        assert leaves(sampler) == [1.0, 2.0, 3.0, 4.0, 5.0] + [5.0] * 10


def damaged(content: bytes) -> bytes:
    return content[:-20] + bytes([content[-20] ^ 1]) + content[-19:]


def says(**what: Any) -> Any:
    """Return a function that changes the description in a file and fixes the checksum."""

    def change(content: bytes) -> bytes:
        name, line, rest = content[:-4].split(b"\n", 2)
        body = b"\n".join([name, json.dumps({**json.loads(line), **what}).encode(), rest])
        return body + zlib.crc32(body).to_bytes(4, "little")

    return change


def summed(change: Any) -> Any:
    def changed(content: bytes) -> bytes:
        body = change(content[:-4])
        return body + zlib.crc32(body).to_bytes(4, "little")

    return changed


NAN = np.array([np.nan], "<f4").tobytes()
FILES = {
    "damaged": (damaged, "checksum"),
    "cut short": (lambda content: content[:-50], "checksum"),
    "empty": (lambda content: b"", "did not write this file"),
    "another program's": (lambda content: b"x" * 500, "did not write this file"),
    "newer": (
        lambda content: content.replace(b"ies 1\n", b"ies 2\n", 1),
        "version 1 of the file, got 2",
    ),
    "foreign": (says(id="other"), "another storage"),
    "of later rows": (says(stop=99, first=79), "the storage is older"),
    "of a later rewind": (says(rewinds=3), "the storage is older"),
    "of sequences": (says(slice_len=4), "slice_len=4"),
    "without alpha": (says(alpha=None), "is invalid"),
    "without a leaf of new rows": (says(entering=0.0), "is invalid"),
    "infinite": (says(entering=1e300), "is invalid"),
    "of other rows than it has": (says(stop=19), "number of priorities differs"),
    "a long head": (says(more="x" * 2**20), "cannot be read"),
    "no JSON": (summed(lambda body: body.replace(b'{"id"', b'["id"', 1)), "is not JSON"),
    "a list": (summed(lambda body: b"tallyroll priorities 1\n[]\n" + body[-80:]), "is incomplete"),
    "NaN": (summed(lambda body: body[:-4] + NAN), "negative, infinite or NaN"),
    "negative": (
        summed(lambda body: body[:-1] + bytes([body[-1] | 128])),
        "negative, infinite or NaN",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_not_of_these_rows_is_not_used(tmp_path: Path, name: str) -> None:
    change, why = FILES[name]
    with filled(tmp_path / "rows", count=20) as storage:
        PrioritizedSampler(storage).update_priority(range(20), np.arange(1.0, 21.0))
        sampler = PrioritizedSampler(storage)
        sampler.update_priority(range(20), np.arange(1.0, 21.0))
    file = tmp_path / "rows" / "priorities.leaves"
    file.write_bytes(change(file.read_bytes()))
    with open_storage(tmp_path / "rows", "append") as storage:
        with pytest.warns(UserWarning, match=f"(?s)is not used.*{why}"):
            sampler = PrioritizedSampler(storage)
        assert len(set(leaves(sampler))) == 1
    with open_storage(tmp_path / "rows") as storage:
        PrioritizedSampler(storage)  # it was written again


@pytest.mark.parametrize("kind", ["link", "folder", "hard link"])
def test_a_file_of_another_kind_is_not_used(tmp_path: Path, kind: str) -> None:
    with filled(tmp_path / "rows", count=5) as storage:
        sampler = PrioritizedSampler(storage)
        sampler.update_priority(range(5), np.arange(5.0))
    file, elsewhere = tmp_path / "rows" / "priorities.leaves", tmp_path / "elsewhere"
    file.rename(elsewhere)
    before = elsewhere.read_bytes()
    match kind:
        case "link":
            file.symlink_to(elsewhere)
        case "hard link":
            os.link(elsewhere, file)
        case "folder":
            file.mkdir()
    storage = open_storage(tmp_path / "rows", "append")
    if kind == "hard link":  # a copy on the same disk, as `cp -l` makes: it is read
        sampler = PrioritizedSampler(storage)
    else:
        with pytest.warns(UserWarning, match="is not used"):
            sampler = PrioritizedSampler(storage)
        assert len(set(leaves(sampler))) == 1
    sampler.update_priority(range(5), 1.0)
    if kind == "folder":
        with pytest.raises(Exception, match="priorities"):
            storage.close()
    storage.close()
    assert elsewhere.read_bytes() == before


def test_states_and_dumps(tmp_path: Path) -> None:
    with filled(tmp_path / "rows", count=15, max_size=15) as storage:
        storage.extend(rows(15, 20))
        sampler = PrioritizedSampler(storage, alpha=0.5, beta=0.9)
        buffer = buffer_of(sampler)
        sampler.update_rows(range(5, 20), np.arange(15.0))
        torch.save(buffer.state_dict(), tmp_path / "state")
        buffer.dumps(tmp_path / "dump")
        before = leaves(sampler)
        storage.extend(rows(20, 25))
        for load in ("state", "dump"):
            again = PrioritizedSampler(storage)
            other = buffer_of(again)
            if load == "state":
                other.load_state_dict(torch.load(tmp_path / "state"))
            else:
                again.loads(tmp_path / "dump" / "sampler")
            assert leaves(again) == before[5:] + [max(before)] * 5
            assert (again.alpha, again.beta) == (0.5, 0.9)
        state = sampler.state_dict()
        wrong = {
            "saved rows is incomplete": {},
            "another storage": {**state, "id": "other"},
            "expected the state of": {**state, "leaves": state["leaves"].double()},
            "number of priorities differs": {**state, "leaves": state["leaves"][1:]},
        }
        for why, each in wrong.items():
            with pytest.raises(StateMismatch, match=why):
                sampler.load_state_dict(each)
        with pytest.raises(StateMismatch, match="priorities does not exist"):
            sampler.loads(tmp_path)
        (tmp_path / "priorities").write_bytes(b"x")
        with pytest.raises(StateMismatch, match="cannot be used"):
            sampler.loads(tmp_path)
        with pytest.raises(NotPicklable, match="state_dict"):
            pickle.dumps(sampler)


def test_a_sampler_that_is_gone_is_not_kept_by_its_storage(tmp_path: Path) -> None:
    with filled(tmp_path / "rows") as storage:
        PrioritizedSampler(storage).sample(3)
    assert not (tmp_path / "rows" / "priorities.leaves").exists()
    with filled() as temporary:
        sampler = PrioritizedSampler(temporary)
        sampler.save()  # no file: the storage is temporary
        assert not (temporary.path / "priorities.leaves").exists()


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("priority", "message"),
    [
        ([1.0, np.nan, -1.0], "got nan at position 1, the first of 2 invalid ones of 3"),
        ([1.0, 2.0, -0.5], "got -0.5 at position 2"),
        ([np.inf, 2.0, 1.0], "got inf at position 0"),
        ([1.0, 1e200, 1.0], r"below 3.4e\+38, got 1e\+200 at position 1"),
        ([1.0, 2.0], "expected 3 priorities, one per row, or a single one, got 2"),
        ([1.0] * 4, "got 4"),
        ("many", "priority: expected numbers, got 'many'"),
        ([None] * 3, "got nan"),
    ],
)
@pytest.mark.parametrize("off", [(), ("kernel",)])
def test_priorities_that_are_none_change_nothing(
    priority: Any, message: str, off: tuple[str, ...]
) -> None:
    with filled(count=5) as storage, fast_paths.switched_off(*off):
        sampler = PrioritizedSampler(storage, alpha=2.0)
        sampler.update_priority(range(5), np.arange(1.0, 6.0))
        before = leaves(sampler)
        for call in (sampler.update_priority, sampler.update_rows):
            with pytest.raises(ValueError, match=message):
                call(torch.arange(3), priority)
        assert leaves(sampler) == before


def test_rows_that_never_were() -> None:
    for size, message in ((None, "cannot set priorities of rows"), (5, "index: expected slots")):
        with filled(count=5, max_size=size) as storage:
            sampler = PrioritizedSampler(storage)
            for index in ([5], [-1], [0, 99]):
                with pytest.raises(IndexOutOfRange, match=message):
                    sampler.update_priority(index, 1.0)
                with pytest.raises(IndexOutOfRange, match=r"never written: .* has had 5 rows"):
                    sampler.update_rows(index, 1.0)
            with pytest.raises(ValueError, match="expected whole numbers, got float64"):
                sampler.update_priority([0.5], 1.0)
            with pytest.raises(
                ValueError,
                match=r"expected a batch with \('collector', 'row'\), as sample\(\) returns",
            ):
                sampler.update_priority(rows(0, 2), 1.0)
            sampler.update_priority([], [])
            assert sampler.gone == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -0.1}, "alpha: expected a finite number of at least 0, got -0.1"),
        ({"alpha": np.nan}, "alpha: expected a finite number"),
        ({"beta": np.inf}, "beta: expected a finite number"),
        ({"beta": "high"}, "beta: expected a finite number of at least 0, got 'high'"),
        ({"eps": -1e-8}, "eps: expected a finite number"),
        ({"alpha": True}, "alpha: expected a finite number"),
        ({"slice_len": 0}, "slice_len: expected a whole number above 0"),
        ({"reduction": "sum"}, "reduction: expected one of max, mean, median, min, got 'sum'"),
    ],
)
def test_arguments_out_of_their_range(options: dict[str, Any], message: str) -> None:
    with filled() as storage, pytest.raises(ValueError, match=message):
        PrioritizedSampler(storage, **options)


def test_storages_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="got LazyTensorStorage"):
        PrioritizedSampler(LazyTensorStorage(10))  # type: ignore[arg-type]
    with (
        filled(tmp_path / "ring", max_size=100) as storage,
        open_storage(tmp_path / "ring") as ring,
    ):
        with pytest.raises(SlotsMayChange, match="another process may write"):
            PrioritizedSampler(ring)
        sampler = PrioritizedSampler(storage)
        with filled() as other, pytest.raises(ValueError, match="Give both the same storage"):
            sampler.sample(other, 4)
    with filled() as storage:
        sampler = PrioritizedSampler(storage, slice_len=3)
        for _ in range(2):
            with pytest.raises(ColumnsMissing, match="These columns define trajectories"):
                sampler.sample(1)
        with pytest.raises(ValueError, match="Use 3 times the number of sequences"):
            sampler.sample(storage, 4)
    with MemmapStorage() as storage:
        sampler = PrioritizedSampler(storage)
        with pytest.raises(NoSlices, match="no rows yet to draw from"):
            sampler.sample(1)
        storage.extend(rows(0, 3))
        with pytest.raises(
            ValueError, match="number of draws: expected a whole number above 0, got 0"
        ):
            sampler.draw(0)
    model = Model.random(np.random.default_rng(0), rows=30, lanes=3)
    with MemmapStorage() as storage:
        storage.extend(model.rows())
        sampler = PrioritizedSampler(storage, slice_len=99)
        with pytest.raises(NoSlices, match="a sequence of 99 consecutive steps"):
            sampler.sample(1)
        with pytest.raises(ValueError, match="whole sequences, a multiple of 99, got 3 rows"):
            sampler.update_priority(range(3), 1.0)


def test_a_priority_of_0_without_eps() -> None:
    with filled() as storage:
        sampler = PrioritizedSampler(storage, eps=0.0)
        with pytest.raises(ValueError, match="numbers above 0 with eps=0, got 0 at position 1"):
            sampler.update_priority([0, 1], [1.0, 0.0])
        tiny = PrioritizedSampler(storage, alpha=3.0, eps=1e-30)
        tiny.update_priority(range(100), 0.0)  # none is rounded to 0
        assert len(tiny.sample(100)) == 100


def test_memory_that_does_not_suffice_is_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    with MemmapStorage(max_size=10**12) as storage, pytest.raises(NotEnoughMemory, match="MiB"):
        PrioritizedSampler(storage)
    with filled() as storage:
        sampler = PrioritizedSampler(storage)
        sampler.draw(1)

        def refuse(nbytes: int, what: str) -> None:
            raise NotEnoughMemory(what)

        monkeypatch.setattr(priorities_module, "require_memory", refuse)
        for start in range(100, 8100, 1000):
            storage.extend(rows(start, start + 1000))
        with pytest.raises(NotEnoughMemory, match="the priorities of 8,100 rows"):
            sampler.draw(1)
        monkeypatch.undo()
        assert len(sampler.draw(10)[0]) == 10
        assert len(leaves(sampler)) == 8100


@pytest.mark.parametrize("way", ["save", "dumps"])
def test_a_save_is_on_the_disk(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is synced after the rename. Otherwise, a power cut may leave the old file."""
    calls = list[str]()
    real_sync, real_replace = os.fsync, os.replace

    def sync(file: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "file")
        real_sync(file)

    def replace(*args: Any, **options: Any) -> None:
        calls.append("name")
        real_replace(*args, **options)

    with filled(tmp_path / "rows", durability="power") as storage:
        sampler = PrioritizedSampler(storage)
        sampler.sample(storage, 5)
        monkeypatch.setattr(os, "fsync", sync)
        monkeypatch.setattr(os, "replace", replace)
        sampler.save() if way == "save" else sampler.dumps(tmp_path / "folder")
        monkeypatch.undo()
    assert calls == ["file", "name", "folder"]
