"""Batch sizes of nested TensorDicts are preserved in batches, storages and samples."""

from __future__ import annotations

import importlib.util
import json
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.envs import Compose, EnvBase, SerialEnv, StepCounter, TransformedEnv
from torchrl.envs.transforms import RandomCropTensorDict

from tallyroll.collector import SyncCollector, split_trajectories
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.storage import MemmapStorage, Schema, TrajectorySliceSampler, n_step, verify
from tallyroll.storage.errors import CorruptStorage, InvalidSchema, RowsMismatch
from tallyroll.storage.files.manifest import schema_crc, sealed
from tallyroll.storage.rows.batch_dims import batch_dims_of, fitting, from_counts, shapes_of
from tallyroll.storage.storages import storage_class

from agents_kit import AGENTS, DEEP, GROUP, RED, AgentsEnv
from collect_kit import LENGTHS, assert_same, collect
from toy_systems import TOYS
from warm_cli import WarmServer
from worker_kit import collect_all, in_threads, start

NAMES = ["rows", "rows.h5", "rows.zarr"]
every_format = pytest.mark.parametrize("name", NAMES)


def sizes(td: TensorDictBase) -> dict[Any, tuple[int, ...]]:
    """Return the batch size of each level of `td`."""
    found: dict[Any, tuple[int, ...]] = {(): tuple(td.batch_size)}
    for key, value in td.items(True, False):
        if isinstance(value, TensorDictBase):
            found[key if isinstance(key, tuple) else (key,)] = tuple(value.batch_size)
    return found


def agents_sizes(*batch: int) -> dict[Any, tuple[int, ...]]:
    """Return the batch sizes that `AgentsEnv` gives at each level of a batch of this size."""
    found: dict[Any, tuple[int, ...]] = dict.fromkeys([(), ("collector",)], batch)
    for prefix in ((), ("next",)):
        found |= {prefix: batch, (*prefix, GROUP): (*batch, AGENTS)}
        found |= {(*prefix, "team"): batch, (*prefix, *DEEP): (*batch, RED)}
    return found


# --- collectors ---------------------------------------------------------------------------------


def serial() -> EnvBase:
    makes = [partial(AgentsEnv, None, LENGTHS, first_lane=lane) for lane in range(3)]
    return SerialEnv(3, makes)


ENVS: dict[str, Any] = {
    "lanes": partial(AgentsEnv, 3, LENGTHS),
    "one-lane": partial(AgentsEnv, None, LENGTHS),
    "serial": serial,
    "transformed": lambda: TransformedEnv(AgentsEnv(3, LENGTHS), Compose(StepCounter())),
}


@pytest.mark.parametrize("env", list(ENVS))
@pytest.mark.parametrize("layout", ["rows", "lanes", "trajectories"])
def test_every_layout_has_those_of_the_specs(env: str, layout: Any) -> None:
    batches, _ = collect(ENVS[env](), frames_per_batch=10, total_frames=37, layout=layout)
    for batch in batches:
        assert batch.ndim == (1 if layout == "rows" else 2)
        assert sizes(batch) == agents_sizes(*batch.batch_size)
        for part in split_trajectories(batch, out="list"):
            assert sizes(part) == agents_sizes(len(part))
        padded = split_trajectories(batch)
        assert sizes(padded) == agents_sizes(*padded.batch_size)
        whole = split_trajectories(batch, out="offsets").rows
        assert sizes(whole) == agents_sizes(len(whole))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_workers_give_them_too(mode: str) -> None:
    makes = [partial(AgentsEnv, 2, LENGTHS), partial(AgentsEnv, 1, LENGTHS, first_lane=2)]
    with in_threads():
        run = collect_all(start(makes, frames_per_batch=10, total_frames=37, mode=mode))
    for batch in run.batches:
        assert sizes(batch) == agents_sizes(len(batch))


class Policy:
    """Policy that writes to the agents' group and to two own groups, with and without agents."""

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        batch = td.batch_size
        td[GROUP]["action"] = torch.zeros(*batch, AGENTS, dtype=torch.int64)
        td[GROUP]["logits"] = torch.zeros(*batch, AGENTS, 3)
        td["mine"] = TensorDict({"z": torch.ones(*batch, 4, 2)}, [*batch, 4])
        td["plain", "z"] = torch.ones(*batch, 4, 2)
        return td


@pytest.mark.parametrize("env", ["lanes", "one-lane"])
def test_groups_of_the_policy_have_what_it_gave_them(env: str) -> None:
    for batch in collect(ENVS[env](), Policy(), frames_per_batch=9, total_frames=27)[0]:
        wanted = agents_sizes(9) | {("mine",): (9, 4), ("plain",): (9,)}
        assert sizes(batch) == wanted
        assert batch[GROUP, "logits"].shape == (9, AGENTS, 3)


@every_format
def test_a_run_is_stored_with_them_and_goes_on_with_them(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=10)
    for resume, total in ((False, 20), (True, 37)):
        kwargs: dict[str, Any] = {"replay_buffer": buffer} if not resume else {}
        collect(
            ENVS["lanes"](),
            frames_per_batch=10,
            total_frames=total,
            storage=path,
            resume=resume,
            **kwargs,
        )
    assert sizes(buffer.sample()) == agents_sizes(10)
    with storage_class(path)(path, mode="read") as storage:
        every_reading(storage, 37)
    assert verify(path).sound


def every_reading(storage: Any, count: int) -> None:
    """Check that each way of reading the storage returns the batch sizes of `AgentsEnv`."""
    assert sizes(storage.get(slice(None))) == agents_sizes(count)
    assert sizes(storage.get(3)) == agents_sizes()
    assert sizes(storage.get(torch.tensor([[1, 2, 3], [3, 4, 5]]))) == agents_sizes(2, 3)
    for rows in storage.trajectories.values():
        assert sizes(rows) == agents_sizes(len(rows))
    id = int(storage.trajectories.ids[0])
    assert sizes(storage.trajectories[id])[GROUP,][1:] == (AGENTS,)
    assert sizes(storage.trajectories.sample_slices(4, 2)) == agents_sizes(4, 2)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=8)
    assert sizes(buffer.sample()) == agents_sizes(8)
    assert sizes(buffer[:]) == agents_sizes(count)
    slices = TensorDictReplayBuffer(
        storage=storage, sampler=TrajectorySliceSampler(2), batch_size=8
    ).sample()
    assert sizes(slices) == agents_sizes(8)
    assert sizes(slices.reshape(4, 2)) == agents_sizes(4, 2)


def flat_reward(batch: TensorDictBase) -> TensorDictBase:
    batch["next", "reward"] = batch["next", GROUP, "reward"].sum(1)
    return batch


def test_n_step_returns_and_postprocs_keep_them(tmp_path: Path) -> None:
    batches, _ = collect(
        ENVS["lanes"](),
        frames_per_batch=10,
        total_frames=40,
        storage=tmp_path / "s",
        postproc=flat_reward,
    )
    assert all(sizes(batch) == agents_sizes(10) for batch in batches)
    with MemmapStorage(tmp_path / "s", mode="read") as storage:
        for index in (torch.arange(5), torch.tensor([[1, 2], [3, 4]])):
            found = n_step(storage, index, 3, 0.9)
            assert sizes(found) == agents_sizes(*index.shape)
        batch = TensorDictReplayBuffer(storage=storage, batch_size=8).sample()
        assert sizes(n_step(storage, batch, 2, 0.5)) == agents_sizes(8)


def test_a_buffer_over_the_storage_and_its_dumps(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "s", max_size=30) as storage:
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=8)
        collect(ENVS["lanes"](), frames_per_batch=10, total_frames=50, replay_buffer=buffer)
        assert sizes(buffer.sample()) == agents_sizes(8)
        buffer.dumps(tmp_path / "dump")
    with MemmapStorage(tmp_path / "again", max_size=30) as other:
        fresh = TensorDictReplayBuffer(storage=other, batch_size=8)
        fresh.loads(tmp_path / "dump")
        assert sizes(fresh.sample()) == agents_sizes(8)
        assert sizes(other.get(slice(None))) == agents_sizes(30)


# --- storages, like TorchRL's -------------------------------------------------------------------


def grouped(count: int, *time: int) -> TensorDict:
    """Return a batch [count, *time] with nested groups and a group without agents."""
    batch = [count, *time]
    numbers = torch.arange(float(np.prod([*batch, 3, 4]))).view(*batch, 3, 4)
    deep = TensorDict({"z": torch.zeros(*batch, 3, 2, 5)}, [*batch, 3, 2])
    return TensorDict(
        {
            "x": torch.arange(np.prod(batch)).view(batch),
            "agents": TensorDict({"o": numbers, "deep": deep}, [*batch, 3]),
            "flat": TensorDict({"q": torch.zeros(*batch, 7)}, batch),
            "hollow": TensorDict(
                {"in": TensorDict({"y": torch.ones(*batch, 2)}, [*batch, 2])}, batch
            ),
        },
        batch,
    )


INDICES: list[Any] = [
    0,
    -1,
    slice(None),
    slice(1, 4),
    torch.tensor([3, 0, 3]),
    torch.tensor([[0, 1], [4, 2]]),
    np.array([2]),
    range(2),
    [1, 2],
    torch.tensor([True, False, True, False, False]),
]


@every_format
@pytest.mark.parametrize("time", [(), (5,), (5, 2)])
def test_rows_come_back_as_from_torchrls_storage(
    name: str, time: tuple[int, ...], tmp_path: Path
) -> None:
    kind, path = storage_class(tmp_path / name), tmp_path / name
    theirs = TensorDictReplayBuffer(storage=LazyTensorStorage(5), batch_size=4)
    with kind(path, capacity=5) as storage:
        ours = TensorDictReplayBuffer(storage=storage, batch_size=4)
        for count in (2, 3):
            ours.extend(grouped(count, *time))
            theirs.extend(grouped(count, *time))
        as_theirs(ours, theirs, storage)
    with kind(path, mode="read") as storage:
        as_theirs(TensorDictReplayBuffer(storage=storage, batch_size=4), theirs, storage)
    with kind(path, mode="append") as storage:
        storage.finalize()
    with kind(path, mode="read") as storage:
        assert sizes(storage.get(slice(None))) == sizes(theirs.storage.get(slice(None)))
    assert verify(path).sound


def as_theirs(ours: Any, theirs: Any, storage: Any) -> None:
    for index in INDICES:
        got = storage.get(index)
        where = torch.tensor(index) if isinstance(index, range) else index
        wanted = theirs.storage.get(where).exclude("index")
        assert sizes(got) == sizes(wanted), index
        assert_same(got, wanted)
    one, other = ours.sample(), theirs.sample()
    assert sizes(one) == sizes(other)
    assert {k: v.shape for k, v in one.items(True, True)} == {
        k: v.shape for k, v in other.items(True, True)
    }


def test_items_with_a_time_dimension_are_cropped_in_a_buffer(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "s") as storage:
        buffer = TensorDictReplayBuffer(
            storage=storage, batch_size=3, transform=RandomCropTensorDict(10, -1)
        )
        for _ in range(4):
            buffer.extend(grouped(1, 50))
        sample = buffer.sample()
    assert sizes(sample)[()] == (3, 10)
    assert sizes(sample)["agents", "deep"] == (3, 10, 3, 2)
    x = sample["x"]
    assert torch.equal(x[:, 1:] - x[:, :-1], torch.ones(3, 9, dtype=x.dtype))


@pytest.mark.parametrize("time", [(), (5,)])
def test_tensordict_opens_the_files_with_them(time: tuple[int, ...], tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "s") as storage:
        storage.extend(grouped(4, *time))
    loaded = TensorDict.load_memmap(tmp_path / "s")
    assert sizes(loaded) == sizes(grouped(4, *time))
    assert_same(loaded, grouped(4, *time))


def test_other_libraries_read_the_files(tmp_path: Path) -> None:
    import h5py
    import zarr

    for name in NAMES[1:]:
        with storage_class(tmp_path / name)(tmp_path / name, capacity=4) as storage:
            storage.extend(grouped(4))
    with h5py.File(tmp_path / "rows.h5") as file:
        assert file["agents/o"][:4].tolist() == grouped(4)["agents", "o"].tolist()
    group = zarr.open_group(tmp_path / "rows.zarr", mode="r")
    assert group["agents/o"][:].tolist() == grouped(4)["agents", "o"].tolist()


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_the_first_rows_decide_whatever_comes_later(first: int, tmp_path: Path) -> None:
    dense = grouped(3)
    plain = TensorDict(
        {"agents": {"o": dense["agents", "o"], "deep": {"z": dense["agents", "deep", "z"]}}}, [3]
    )
    arrays = {tuple(key): leaf.numpy() for key, leaf in plain.items(True, True)}
    lazy = LazyStackedTensorDict(*dense.select("agents").unbind(0), stack_dim=0)
    batches: list[Any] = [dense.select("agents"), lazy, plain, arrays]
    batches = [*batches[first:], *batches[:first]]
    with MemmapStorage(tmp_path / "s") as storage:
        for batch in batches:
            storage.extend(batch)
        rows = storage.get(slice(None))
    behind = (3, 2) if first < 2 else ()
    assert sizes(rows)["agents", "deep"] == (12, *behind)
    for at in range(0, 12, 3):
        assert_same(rows[at : at + 3], plain)


def test_other_numbers_of_agents_are_refused_as_ever(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "s") as storage:
        storage.extend(grouped(3))
        other = grouped(3)
        other["agents"] = TensorDict(
            {"o": torch.zeros(3, 2, 4), "deep": TensorDict({"z": torch.zeros(3, 2, 2, 5)}, [3, 2])},
            [3, 2],
        )
        with pytest.raises(RowsMismatch, match=r"agents/o has .*shape \[3, 2, 4\], expected"):
            storage.extend(other)


# --- schemas ------------------------------------------------------------------------------------


def test_a_schema_without_them_is_written_as_before() -> None:
    rows = {("x",): np.zeros((1, 3), np.float32), ("next", "y"): np.zeros(1, np.int64)}
    wanted = [
        {"key": ["x"], "dtype": "float32", "shape": [3]},
        {"key": ["next", "y"], "dtype": "int64", "shape": []},
    ]
    nested = TensorDict({"x": torch.zeros(1, 3), "next": {"y": torch.zeros(1).long()}}, [1])
    for schema in (Schema.of(rows), Schema.of(nested)):
        assert json.dumps(schema.to_json()) == json.dumps(wanted)
        assert schema_crc(schema) == zlib.crc32(json.dumps(wanted).encode())
        assert Schema.from_json(wanted) == schema


@pytest.mark.parametrize("time", [(), (5,), (5, 2)])
def test_a_schema_with_them_is_read_back(time: tuple[int, ...]) -> None:
    schema = Schema.of(grouped(2, *time))
    assert Schema.from_json(json.loads(json.dumps(schema.to_json()))) == schema
    assert schema.differences(Schema(schema.columns)) == []
    wanted = {key: size[1:] for key, size in sizes(grouped(2, *time)).items() if len(size) > 1}
    assert schema.batch_shapes == wanted


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda columns: columns[1].pop("batch_dims"), "has batch_dims that contradict those of"),
        (lambda columns: columns[1].update(batch_dims=[0, 9]), "batch_dims that contradict those"),
        (
            lambda columns: columns[1].update(batch_dims=[0]),
            r"agents/o: expected batch_dims .* got \[0\]",
        ),
        (
            lambda columns: columns[1].update(batch_dims="x y"),
            r"agents/o: expected batch_dims .* got 'x y'",
        ),
        (
            lambda columns: columns[1].update(batch_dims=1),
            r"agents/o: expected batch_dims .* got 1",
        ),
        (
            lambda columns: columns[1].update(batch_dims=[0, -1]),
            r"expected batch_dims .* got \[0, -1\]",
        ),
        (
            lambda columns: columns[1].update(batch_dims=[0, True]),
            r"expected batch_dims .* got \[0, True\]",
        ),
        (lambda columns: columns[0].update(batch_dims=[1]), "has batch_dims that contradict those"),
        (
            lambda columns: [c.update(batch_dims=[1, *c["batch_dims"][1:]]) for c in columns[:3]],
            "batch dimensions after the rows, which do not fit",
        ),
    ],
)
def test_a_damaged_schema_is_refused(spoil: Any, match: str, tmp_path: Path) -> None:
    rows = grouped(2).select("x", "agents")
    written = Schema.of(rows).to_json()
    written[0].setdefault("batch_dims", [0])
    assert Schema.from_json(written) == Schema.of(rows)
    spoil(written)
    with pytest.raises(InvalidSchema, match=match):
        Schema.from_json(written)
    with MemmapStorage(tmp_path / "s") as storage:
        storage.extend(rows)
        manifest = {**storage.manifest, "schema": written}
    (tmp_path / "s" / "manifest.json").write_text(json.dumps(sealed(manifest)))
    with pytest.raises(CorruptStorage, match=match):
        MemmapStorage(tmp_path / "s", mode="read")


@pytest.mark.parametrize(
    "dims", [{("agents",): 4}, {("x",): 1}, {(): 1}, {("agents", "deep"): 0}, {("flat",): 2}]
)
def test_dims_that_columns_do_not_have_are_refused(dims: Any) -> None:
    schema = Schema.of(grouped(2))
    assert Schema(schema.columns, schema.batch_dims) == schema
    wrong = {**dict(schema.batch_dims), **dims}
    with pytest.raises(InvalidSchema, match="batch dimensions after the rows, which do not fit"):
        Schema(schema.columns, tuple(wrong.items()))


@pytest.mark.parametrize("seed", range(30))
def test_counts_survive_every_form(seed: int) -> None:
    rng = np.random.default_rng(seed)

    def random_td(batch: list[int], depth: int) -> TensorDict:
        leaves: dict[str, Any] = {
            f"x{i}": torch.zeros(*batch, *rng.integers(1, 4, int(rng.integers(0, 3))).tolist())
            for i in range(int(rng.integers(1, 3)))
        }
        for i in range(int(rng.integers(0, 3)) if depth < 3 else 0):
            more = rng.integers(1, 4, int(rng.integers(0, 2))).tolist()
            leaves[f"g{i}"] = random_td([*batch, *more], depth + 1)
        return TensorDict(leaves, batch)

    td = random_td([2, *rng.integers(1, 4, int(rng.integers(0, 2))).tolist()], 0)
    dims = batch_dims_of(td)
    leaves = {k if isinstance(k, tuple) else (k,): v for k, v in td.items(True, True)}
    shapes = {key: tuple(leaf.shape[1:]) for key, leaf in leaves.items()}
    assert fitting(dims, shapes) == dims
    assert shapes_of(dims, shapes) == {k: s[1:] for k, s in sizes(td).items() if len(s) > 1}
    schema = Schema.of(td)
    assert dict(schema.batch_dims) == dims
    along = [(tuple(each["key"]), each.get("batch_dims")) for each in schema.to_json()]
    if any(counts is not None for _, counts in along):
        assert from_counts(along) == dims
    else:
        assert dims == {}


def test_of_what_specs_say_only_what_columns_have_is_given() -> None:
    shapes = {("a", "x"): (3, 4), ("a", "y"): (3, 2), ("b", "c", "z"): (5,)}
    assert fitting({("a",): 2, ("b",): 1, ("gone",): 1}, shapes) == {
        ("a",): 1,
        ("b",): 1,
        ("b", "c"): 1,
    }
    assert fitting({(): 1}, shapes) == {}


def test_a_single_row_is_what_it_was(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "s") as storage:
        buffer = ReplayBuffer(storage=storage, batch_size=2)
        for each in grouped(3).unbind(0):
            buffer.add(each)
        assert sizes(storage.get(1)) == sizes(grouped(3)[1])
        assert_same(storage.get(1), grouped(3)[1])


def test_collectors_without_groups_have_none() -> None:
    with SyncCollector("CartPole-v1", frames_per_batch=4, total_frames=8, num_envs=2) as collector:
        for batch in collector:
            assert set(sizes(batch).values()) == {(4,)}


@pytest.mark.parametrize("name", ["Groups", "Toy"])
def test_those_of_a_system_are_of_its_specs(name: str) -> None:
    env = SystemEnv(TOYS[name](3))
    with SyncCollector(env, frames_per_batch=6, total_frames=6) as collector:
        (batch,) = collector
    ours, theirs = (
        {level: len(size) for level, size in sizes(td).items()}
        for td in (batch, env.fake_tensordict())
    )
    assert len(theirs) == (6 if name == "Groups" else 2)
    assert ours.items() >= theirs.items()


def test_pandas_is_not_imported_for_them(server: WarmServer, tmp_path: Path) -> None:
    """Importing pandas would slow the start of each worker by 0.1 s."""
    assert importlib.util.find_spec("pandas")
    (tmp_path / "script.py").write_text(
        "import sys\nfrom tallyroll.collector import SyncCollector\n"
        "made = SyncCollector('CartPole-v1', frames_per_batch=4, total_frames=8, storage='rows')\n"
        "with made as collector:\n    print(sum(map(len, collector)), 'pandas' in sys.modules)\n"
    )
    assert server.run(tmp_path, "python", "script.py").out == "8 False\n"
