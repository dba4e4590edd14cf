"""Test our storages as `TensorStorage`: each part of its interface is implemented or refused.

TorchRL's storages run in parallel, with the same rows and the same random numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.checkpoint import Checkpoint
from torchrl.data import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    NestedStorageCheckpointer,
    ReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorageCheckpointer,
)
from torchrl.data.replay_buffers import SliceSampler, SliceSamplerWithoutReplacement
from torchrl.data.replay_buffers.sample_units import Sequence
from torchrl.data.replay_buffers.storages import Storage, TensorStorage
from torchrl.envs import RandomCropTensorDict

from tallyroll.storage import MemmapStorage, RowsMismatch
from tallyroll.storage.errors import NotAnAppend, NotPicklable, StateMismatch, TrajectoryIdTaken
from tallyroll.storage.replay.tensor_storage import AsTensorStorage
from tallyroll.storage.storages import FORMATS, DiskStorage

STEPS = 6
ROOM = 40
SLICE_KEYS = [{"end_key": ("next", "done")}, {"traj_key": ("collector", "traj_ids")}]


def rows(start: int, count: int) -> TensorDict:
    """Return rows ``[start, start + count)`` of one lane, in trajectories of 6 steps."""
    number = torch.arange(start, start + count)
    done = (number % STEPS == STEPS - 1)[:, None]
    state = number[:, None].float() + torch.arange(3)
    flags = {"done": done, "terminated": done, "truncated": torch.zeros_like(done)}
    none = {name: torch.zeros_like(done) for name in flags}
    collector = {"traj_ids": number // STEPS, "step": number % STEPS, "lane": 0 * number.int()}
    after = {"observation": state + 1, "reward": number[:, None].float(), **flags}
    columns = {"observation": state, **none, "next": after, "collector": collector}
    return TensorDict(columns, [count])


@pytest.fixture(params=["memmap", "ring", "hdf5", "zarr"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], DiskStorage]:
    """Return a function that makes storages of each kind, of 40 rows."""
    kind = FORMATS["memmap" if request.param == "ring" else request.param]
    room = {"max_size": ROOM} if request.param == "ring" else {"capacity": 3 * ROOM}
    return lambda name: kind(tmp_path / name, **room)


def crossed(
    names: str, cases: list[tuple[Any, ...]], of_ring: list[tuple[Any, ...]] | None = None
) -> pytest.MarkDecorator:
    """Combine all ``cases`` with files and a ring, and the first with the other formats."""
    kinds = [("memmap", *case) for case in cases]
    kinds += [("ring", *case) for case in of_ring or cases]
    kinds += [(kind, *cases[0]) for kind in ("hdf5", "zarr")]
    return pytest.mark.parametrize(f"make,{names}", kinds, indirect=["make"], ids=_spelled)


def _spelled(part: Any) -> str:
    return getattr(part, "__name__", str(part))


def both(storage: DiskStorage, **buffer: Any) -> tuple[ReplayBuffer, ReplayBuffer]:
    """Return a buffer over ours and one over TorchRL's, with generators of the same seed."""
    room = storage.ring or 3 * ROOM
    made = [
        TensorDictReplayBuffer(
            storage=over,
            generator=torch.Generator().manual_seed(7),
            **{name: each() if callable(each) else each for name, each in buffer.items()},
        )
        for over in (storage, LazyTensorStorage(room))
    ]
    return made[0], made[1]


# -- the class


def test_nothing_of_a_tensor_storage_is_left_as_it_is() -> None:
    plain = {"__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__init__"}
    for parent in (TensorStorage, Storage):
        for name in vars(parent):
            owner = next(each for each in DiskStorage.__mro__ if name in vars(each))
            if parent is TensorStorage or owner is TensorStorage:
                assert name in plain or owner is not TensorStorage, f"{name} is TorchRL's own"


@pytest.mark.parametrize(
    "name",
    [
        "_init",
        "_set_tree_map",
        "_get_new_len",
        "_raise_informative_lock_error",
        "_conditional_patch_leaf",
        "_validate_conditional_patch",
        "_apply_conditional_patch",
        "__setstate__",
    ],
)
def test_what_would_write_in_place_is_refused(name: str, tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(rows(0, 4))
        with pytest.raises(NotAnAppend, match="LazyMemmapStorage"):
            getattr(storage, name)(None)
        with pytest.raises(NotAnAppend, match="LazyMemmapStorage"):
            storage._len = 3
        with pytest.raises(NotPicklable):
            storage.__getstate__()
        with pytest.raises(AttributeError):
            storage._storage = rows(0, 2)  # type: ignore[misc]
        assert len(storage) == 4


def test_what_it_says_of_itself(make: Callable[[str], DiskStorage]) -> None:
    with make("rows") as storage:
        assert isinstance(storage, TensorStorage)
        assert isinstance(storage, AsTensorStorage)
        assert not storage.initialized
        assert storage._storage is None
        assert storage.shape == (0,)
        mine, other = both(storage, batch_size=4)
        for start in (0, 10, 20, 30, 40):
            mine.extend(rows(start, 10))
            other.extend(rows(start, 10))
            assert storage.initialized
            assert storage.ndim == other.storage.ndim == 1
            assert storage.shape == other.storage.shape == (len(storage),)
            assert storage.device == other.storage.device == torch.device("cpu")
            assert storage._len_along_dim0 == len(storage)
            assert storage._is_full == (storage.ring == len(storage))
            there = other.storage._storage[: len(storage)]
            assert (storage._storage.exclude("index") == there.exclude("index")).all()
            assert storage.flatten() is storage
        # TorchRL 0.15 calls them when it forks workers of a `DataLoader`.
        assert (storage._content_devices(), storage._content_leaves()) == ({storage.device}, [])
        assert storage._fork_safe()
        storage._share_memory_()


def test_a_key_gives_a_column(make: Callable[[str], DiskStorage]) -> None:
    """TorchRL's sequences of records read a column in this way to find ends of episodes."""
    with make("rows") as storage:
        mine, other = both(storage, batch_size=8, sample_unit=lambda: Sequence(length=4, burn_in=1))
        for start in range(0, 60, 12):
            mine.extend(rows(start, 12))
            other.extend(rows(start, 12))
            for key in ("observation", ("observation",), ("next", "done")):
                assert (storage.get(key) == other.storage.get(key)[: len(storage)]).all()
            assert (storage["next"] == other.storage["next"][: len(storage)]).all()
            with pytest.raises(KeyError):
                storage.get("nothing")
            assert_alike(mine, other, start)


@pytest.mark.filterwarnings("ignore:SliceSampler returned a short flat batch:UserWarning")
@crossed(
    "sampler_class,key",
    [(c, k) for c in (SliceSampler, SliceSamplerWithoutReplacement) for k in SLICE_KEYS],
)
def test_slices_are_those_of_torchrls_own(
    make: Callable[[str], DiskStorage], sampler_class: Any, key: dict[str, Any]
) -> None:
    with make("rows") as storage:
        mine, other = both(
            storage,
            sampler=lambda: sampler_class(slice_len=3, strict_length=True, **key),
            batch_size=12,
        )
        for start in range(0, 100, 13):
            mine.extend(rows(start, 13))
            other.extend(rows(start, 13))
            for _ in range(3):
                assert_alike(mine, other, start)


def assert_alike(mine: ReplayBuffer, other: ReplayBuffer, seed: int) -> None:
    """Check that both give the same sample, or that both refuse."""
    found: list[Any] = []
    for buffer in (mine, other):
        torch.manual_seed(seed)
        try:
            found.append(buffer.sample())
        except RuntimeError as error:
            found.append(str(error))
    assert type(found[0]) is type(found[1])
    if isinstance(found[0], str):
        assert found[0] == found[1]
    else:
        assert (found[0] == found[1]).all()


def test_items_in_time_come_back_as_they_went_in(make: Callable[[str], DiskStorage]) -> None:
    """`RandomCropTensorDict` crops such items."""
    items = torch.stack([rows(8 * item, 8) for item in range(5)])
    assert items.batch_size == (5, 8)
    with make("rows") as storage:
        mine, other = both(storage, batch_size=6, transform=lambda: RandomCropTensorDict(3))
        mine.extend(items)
        other.extend(items)
        for seed in range(4):
            torch.manual_seed(seed)
            a = mine.sample()
            torch.manual_seed(seed)
            b = other.sample()
            assert a.batch_size == b.batch_size == (6, 3)
            assert (a == b).all()


# -- rows that do not fit


def test_a_batch_longer_than_the_ring_leaves_its_tail(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "ring", max_size=10) as storage:
        buffers = both(storage, batch_size=4)
        head = 0
        for count in (25, 3, 11, 30, 7):
            index = [each.extend(rows(head, count)) for each in buffers]
            assert index[0].tolist() == index[1].tolist()
            head += count
            assert storage.span == range(head - 10, head)
            assert (buffers[0][:] == buffers[1][:].exclude("index")).all()
            a, b = (each.sample() for each in buffers)
            assert (a == b).all()
        assert storage.trajectories.ids.tolist() == sorted({n // STEPS for n in storage.span})
        before = storage.span
        wrong = rows(head, 30)
        wrong["collector", "traj_ids"][28:] = 0
        wrong["collector", "step"][28:] = torch.tensor([3, 2])
        with pytest.raises(TrajectoryIdTaken):
            buffers[0].extend(wrong)
        assert storage.span == before, "the first pieces were written"
        assert buffers[0].extend(rows(head, 2)).tolist() == [head % 10, (head + 1) % 10]


@pytest.mark.parametrize("data", [torch.zeros(4, 2), {"a": torch.zeros(4)}, (torch.zeros(4),)])
def test_payloads_without_names_are_refused(data: Any, tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        buffer = ReplayBuffer(storage=storage, batch_size=2)
        with pytest.raises(RowsMismatch, match="TensorDict"):
            buffer.extend(data)
        buffer.extend(rows(0, 4))
        assert len(buffer) == 4


WRITES: dict[str, Callable[[ReplayBuffer], Any]] = {
    "storage[i]": lambda buffer: buffer.storage.__setitem__(1, rows(1, 1)[0]),
    "buffer[i]": lambda buffer: buffer.__setitem__(torch.tensor([1, 2]), rows(1, 2)),
    "set_": lambda buffer: buffer.set_("observation", torch.zeros(8, 3)),
    "set_at_": lambda buffer: buffer.set_at_("observation", torch.zeros(1, 3), torch.tensor([2])),
    "update_": lambda buffer: buffer.update_({"observation": torch.zeros(8, 3)}),
    "write_at": lambda buffer: buffer.writer.write_at(torch.tensor([3]), rows(3, 1)),
}


@crossed("write", [(name,) for name in WRITES])
def test_writes_in_place_are_refused_and_leave_nothing(
    make: Callable[[str], DiskStorage], write: str
) -> None:
    with make("rows") as storage:
        buffer = ReplayBuffer(storage=storage, batch_size=2)
        buffer.extend(rows(0, 8))
        with pytest.raises(NotAnAppend, match="LazyMemmapStorage") as raised:
            WRITES[write](buffer)
        assert "\n" not in str(raised.value)
        for found in (storage.get(slice(None)), storage.get(torch.arange(8)), buffer[:]):
            assert (found == rows(0, 8)).all()
        buffer.extend(rows(8, 2))
        assert storage.head == 10


# -- checkpoints

CHECKPOINTERS = [
    TensorStorageCheckpointer,
    FlatStorageCheckpointer,
    NestedStorageCheckpointer,
    H5StorageCheckpointer,
]


def filled(buffer: ReplayBuffer, count: int) -> ReplayBuffer:
    for start in range(0, count, STEPS):
        buffer.extend(rows(start, STEPS))
    return buffer


@crossed(
    "checkpointer,count",
    [(each, 18) for each in CHECKPOINTERS],
    [*((each, 60) for each in CHECKPOINTERS), (CHECKPOINTERS[0], 18)],
)
def test_torchrls_checkpointers(
    make: Callable[[str], DiskStorage], checkpointer: Any, count: int, tmp_path: Path
) -> None:
    """Buffers save and load, also from ours to TorchRL's and back, as TorchRL's own do."""
    # The rows leave out the parts that these checkpointers do not keep.
    with make("rows") as storage, make("again") as again, make("third") as third:
        mine, other = both(storage, batch_size=4, checkpointer=checkpointer)
        filled(mine, count), filled(other, count)
        mine.dumps(tmp_path / "mine")
        other.dumps(tmp_path / "other")
        back, theirs = both(again, batch_size=4, checkpointer=checkpointer)
        back.loads(tmp_path / "mine")
        theirs.loads(tmp_path / "other")
        assert len(back) == len(mine) == len(storage)
        compare = ["observation", "next"]
        assert len(theirs) == len(back)
        assert (back[:].select(*compare) == theirs[:].select(*compare)).all()
        over, _ = both(third, batch_size=4, checkpointer=checkpointer)
        over.loads(tmp_path / "other")
        assert (over[:].select(*compare) == theirs[:].select(*compare)).all()
        assert over.writer._cursor == theirs.writer._cursor
        index = [each.extend(rows(count, 6)) for each in (back, theirs)]
        assert index[0].tolist() == index[1].tolist()
        assert (back[:].select(*compare) == theirs[:].select(*compare)).all()
        with pytest.raises(StateMismatch, match="new storage"):
            back.loads(tmp_path / "mine")


def test_hooks_go_to_torchrls_checkpointers(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        buffer = ReplayBuffer(storage=storage, batch_size=2)
        buffer.extend(rows(0, 4))
        for register in (buffer.register_save_hook, buffer.register_load_hook):
            with pytest.raises(TypeError, match="TensorStorageCheckpointer"):
                register(lambda data, path=None: data)
        buffer.storage.checkpointer = TensorStorageCheckpointer()
        buffer.register_save_hook(lambda data, path=None: data.select("observation"))
        buffer.dumps(tmp_path / "dump")
        names = json.loads((tmp_path / "dump" / "storage" / "meta.json").read_text())
        assert "observation" in names
        assert "next" not in names


@crossed(
    "checkpointer,format",
    [(None, "dir"), (TensorStorageCheckpointer, "zip")],
)
def test_torchrls_checkpoint(
    make: Callable[[str], DiskStorage], tmp_path: Path, checkpointer: Any, format: str
) -> None:
    def over(storage: Any) -> TensorDictReplayBuffer:
        return TensorDictReplayBuffer(
            storage=storage,
            batch_size=4,
            checkpointer=None if checkpointer is None else checkpointer(),
            generator=torch.Generator().manual_seed(1),
        )

    place = tmp_path / ("saved.zip" if format == "zip" else "saved")
    with make("rows") as storage, make("again") as again:
        buffer = filled(over(storage), 30)
        Checkpoint(buffer=buffer).save(place)
        back = over(again)
        Checkpoint(buffer=back).load(place)
        assert (back[:] == buffer[:]).all()
        assert (back.sample() == buffer.sample()).all()
        assert back.extend(rows(30, 3)).tolist() == buffer.extend(rows(30, 3)).tolist()


def test_a_state_names_its_rows_and_does_not_bring_them(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage, MemmapStorage(tmp_path / "new") as new:
        buffer = filled(ReplayBuffer(storage=storage, batch_size=2), 12)
        state = buffer.state_dict()
        buffer.load_state_dict(state)
        with pytest.raises(StateMismatch):
            ReplayBuffer(storage=new, batch_size=2).load_state_dict(state)
        theirs = filled(ReplayBuffer(storage=LazyTensorStorage(12), batch_size=2), 12)
        with pytest.raises(StateMismatch, match="extend the storage with the rows"):
            new.load_state_dict(theirs.state_dict()["_storage"])


def test_it_is_beside_a_lazy_memmap_storage(tmp_path: Path) -> None:
    """The samples equal those of the storage that ours replaces."""
    with MemmapStorage(max_size=30) as storage:
        theirs = LazyMemmapStorage(30, scratch_dir=tmp_path / "theirs")
        made = [
            TensorDictReplayBuffer(
                storage=over, batch_size=8, generator=torch.Generator().manual_seed(2)
            )
            for over in (storage, theirs)
        ]
        for start in range(0, 70, 7):
            for each in made:
                each.extend(rows(start, 7))
            a, b = (each.sample() for each in made)
            assert (a == b).all()
