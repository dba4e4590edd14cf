"""Open artifacts of an earlier commit, compare them with recorded facts, and append to them.

``tests/data/made_before`` holds the artifacts and the script that made them. They are never
regenerated.
"""

from __future__ import annotations

import csv
import hashlib
import json
import pickle
import random
import tarfile
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule
from torchrl.data import TensorDictReplayBuffer

from tallyroll.collector import RunLog, SyncCollector, load_checkpoint
from tallyroll.collector.cli import main
from tallyroll.storage import (
    DiskStorage,
    MemmapStorage,
    PrioritizedSampler,
    content_hash,
    diff,
    import_dataset,
    open_storage,
    verify,
    verify_dataset,
)

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", r"tallyroll.* is tallyroll.* now", DeprecationWarning)
    my_system = import_module("my_system")

pytestmark = pytest.mark.filterwarnings("ignore:tallyroll.* is tallyroll.* now:DeprecationWarning")
MADE = Path(__file__).parents[1] / "data" / "made_before"
FACTS: dict[str, Any] = json.loads((MADE / "facts.json").read_text())
WRITABLE = ("memmap", "ring", "hdf5.h5", "zarr.zarr", "beside", "logged/rows", "checkpoint/rows")
LANES = {"memmap": 4, "ring": 4, "hdf5.h5": 4, "zarr.zarr": 4}
"""Lanes of the last run; all other artifacts have 3."""
LIBRARIES = {
    "parquet": "pyarrow",
    "hf": "pyarrow",
    "lerobot": "pyarrow",
    "d4rl": "h5py",
    "rlds": "google.protobuf",
    "minari": "minari",
    "packed": "zstandard",
}


def archive_of(name: str) -> str:
    """Return the name of the archive that contains an artifact."""
    return name.partition("/")[0].partition(".")[0]


@pytest.fixture
def unpack(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that unpacks a copy of an artifact and returns its path."""

    def call(name: str) -> Path:
        with tarfile.open(MADE / f"{archive_of(name)}.tar.gz") as archive:
            archive.extractall(tmp_path, filter="data")
        return tmp_path / name

    return call


def need(kind: str) -> None:
    """Skip the test without the library of a format, which not every environment has."""
    if kind in LIBRARIES:
        pytest.importorskip(LIBRARIES[kind])


def digests(storage: DiskStorage, span: range) -> dict[str, str]:
    """Return the SHA-256 of the bytes of each column."""
    columns = storage.reader.copies(np.arange(span.start, span.stop))
    return {
        "/".join(key): hashlib.sha256(values.tobytes()).hexdigest()
        for key, values in zip(storage.schema.keys, columns, strict=True)
    }


def check_corridor(rows: Any) -> None:
    """Compare each row with the rules of its environment."""
    lane, episode, step, _ = rows["observation"].T
    over = step + 1 >= my_system.length_of(lane, episode)
    after = rows["observation"] + torch.tensor([0.0, 0, 1, 0])
    assert torch.equal(rows["next", "observation"], after)
    assert torch.equal(rows["next", "reward"][:, 0], step + rows["action"] / 4)
    assert torch.equal(rows["next", "terminated"][:, 0], over & (episode % 2 == 0))
    assert torch.equal(rows["next", "truncated"][:, 0], over & (episode % 2 == 1))
    pixels = (lane + episode + step).to(torch.uint8)
    assert torch.equal(rows["camera"], pixels[:, None, None, None].expand(-1, 8, 8, 1))
    assert torch.equal(rows["collector", "lane"].float(), lane)
    assert torch.equal(rows["collector", "step"].float(), step)


def policy_of() -> Any:
    """Return a policy with the architecture that `make.py` used."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 3)

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return (self.net(observation) / 100).softmax(-1).argmax(-1)

    return TensorDictModule(Model(), ["observation"], ["action"])


def test_every_artifact_is_there() -> None:
    archives = {archive_of(name) for name in FACTS["storages"]}
    made = {each.name.removesuffix(".tar.gz") for each in MADE.glob("*.tar.gz")}
    assert made == archives | {"dump", "exports", "objects", "state"}
    assert sum(each.stat().st_size for each in MADE.iterdir() if each.is_file()) < 2**20


# --- storages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FACTS["storages"])
def test_a_storage_has_what_it_had(name: str, unpack: Callable[[str], Path]) -> None:
    need(name.removesuffix(".h5"))
    path, facts = unpack(name), FACTS["storages"][name]
    report = verify(path)
    assert (report.findings, report.notes, report.rows) == ((), (), facts["rows"])
    with open_storage(path) as storage:
        span = range(*facts["span"])
        assert (storage.reader.span, len(storage)) == (span, facts["rows"])
        assert storage.reader.id == facts["id"]
        assert storage.schema.to_json() == facts["schema"]
        assert digests(storage, span) == facts["columns"]
        assert [run["first_row"] for run in storage.runs] == facts["first_rows"]
        assert [run.get("seed") for run in storage.runs] == facts["seeds"]
        ends = Counter(map(str, storage.trajectories.ends))
        assert (len(storage.trajectories), ends) == (facts["trajectories"], facts["ends"])
        record = storage.record and [storage.record[0], storage.record[1].decode()]
        assert record == facts["record"]
        rows = storage.get(slice(None))
        assert rows["next", "reward"].double().sum() == facts["reward"]
        if name != "cartpole":
            check_corridor(rows)
        slices = storage.trajectories.sample_slices(4, 2)
        assert torch.equal(slices["collector", "step"].diff(dim=1), torch.ones(4, 1).long())
    assert content_hash(path) == facts["hash"]


@pytest.mark.parametrize("name", WRITABLE)
def test_a_run_goes_on_in_a_storage(name: str, unpack: Callable[[str], Path]) -> None:
    path, facts = unpack(name), FACTS["storages"][name]
    make = partial(my_system.corridor, LANES.get(name, 3))
    stored, head = json.loads(facts["record"][1])["ledger"]["stored"], facts["span"][1]
    options: dict[str, Any] = {"frames_per_batch": 20, "total_frames": stored + 37}
    with SyncCollector(make, storage=path, resume=True, **options) as collector:
        assert collector.ledger.stored == stored
        assert [len(batch) for batch in collector] == [20, 17]
        assert collector.ledger.stored == stored + 37
    report = verify(path)
    assert report.sound, report
    with open_storage(path) as storage:
        assert storage.reader.head == head + 37
        if name != "ring":
            assert digests(storage, range(*facts["span"])) == facts["columns"]
        rows = storage.get(slice(None))
        check_corridor(rows)
        # A lane that restarts repeats its episode numbers but gets new ids.
        ids, steps = (rows["collector", key].tolist() for key in ("traj_ids", "step"))
        runs = np.searchsorted(
            facts["first_rows"], np.arange(storage.reader.span.start, head + 37), "right"
        )
        assert len({*zip(ids, steps, runs.tolist(), strict=True)}) == len(rows)
    with open_storage(path, "append") as storage:
        storage.extend(rows[-5:], ids="fresh")
        assert storage.reader.head == head + 42


def test_a_run_of_gymnasium_goes_on(unpack: Callable[[str], Path]) -> None:
    path = unpack("cartpole")
    options: dict[str, Any] = {"frames_per_batch": 20, "total_frames": 150, "num_envs": 2}
    with SyncCollector("CartPole-v1", storage=path, resume=True, **options) as collector:
        assert collector.collect(1000) == 50
    assert verify(path).sound


def test_shards_are_one_run(unpack: Callable[[str], Path], tmp_path: Path) -> None:
    folder = unpack("shards")
    with open_storage([folder / "part-*"]) as run:
        assert (len(run), run.reader.shards.problems) == (101, [])
        run.copy_to(tmp_path / "united")
    assert verify(tmp_path / "united").sound
    with SyncCollector(
        my_system.corridor,
        num_envs=5,
        shard="1/2",
        storage=folder / "part-1",
        resume=True,
        seed=11,
        frames_per_batch=30,
        total_frames=151,
    ) as collector:
        before = FACTS["storages"]["shards/part-1"]["rows"]
        assert before + collector.collect(1000) == collector.ledger.stored
    assert verify(folder / "part-1").sound


@pytest.mark.parametrize("name", ["packed", "packed.h5"])
def test_packed_rows_are_those_of_their_source(
    name: str, unpack: Callable[[str], Path], tmp_path: Path
) -> None:
    need("packed")
    path, source = unpack(name), unpack("memmap")
    assert content_hash(path) == content_hash(source)
    with open_storage(path) as packed, open_storage(source) as storage:
        old = packed.old_rows(np.arange(len(packed)))
        assert (packed.get(slice(None)) == storage.get(old)).all()
        packed.copy_to(tmp_path / "unpacked")
    assert diff(tmp_path / "unpacked", source).equal == FACTS["storages"]["memmap"]["rows"]


def test_a_dump_of_a_buffer_is_loaded(unpack: Callable[[str], Path], tmp_path: Path) -> None:
    dump = unpack("dump")
    with MemmapStorage(tmp_path / "restored") as storage:
        TensorDictReplayBuffer(storage=storage, batch_size=4).loads(dump)
        facts = FACTS["storages"]["memmap"]
        assert digests(storage, range(len(storage))) == facts["columns"]
        assert storage.reader.id == facts["id"]


def test_commands_read_them(
    unpack: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("memmap", "sharded"):
        path, facts = unpack(name), FACTS["storages"][name]
        assert main(["inspect", "--json", str(path)]) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["rows"] == facts["rows"]
        assert main(["verify", str(path)]) == 0
        assert f"sound; {facts['rows']} rows" in capsys.readouterr().out


# --- overlays, priorities -------------------------------------------------------------------------


def test_overlays_are_read_and_written(unpack: Callable[[str], Path]) -> None:
    path = unpack("beside")
    with open_storage(path) as storage:
        assert storage.overlays == [("next", "seen"), "value"]
        found = storage.get(slice(None), keys=["value", ("next", "seen")])
        assert torch.equal(found["value"][::3], torch.arange(60.0).reshape(30, 2))
        assert found["value"][1::3].isnan().all()
        assert found["next", "seen"].dtype is torch.int16
        assert found["next", "seen"].tolist() == [0] * 10 + [*range(-5, 5)] + [0] * 70
        values = storage.overlay("value", torch.float32, [2], fill=float("nan"), writable=True)
        values[1] = torch.tensor([0.5, 1.5])
    with open_storage(path) as storage:
        assert storage.get([1], keys=["value"])["value"].tolist() == [[0.5, 1.5]]
    assert verify(path).sound


def test_priorities_are_those_that_were_saved(unpack: Callable[[str], Path]) -> None:
    path = unpack("beside")
    with open_storage(path, "append") as storage:
        sampler = PrioritizedSampler(storage, alpha=1.0, beta=1.0, eps=1e-8)
        rows, weights = sampler.draw(300)
        assert np.unique(rows).tolist() == FACTS["beside"]["drawn"]
        assert len({*weights.tolist()}) == 1
        sampler.update_rows(np.arange(90), np.where(np.arange(90) == 12, 1e4, 1e-6))
    with open_storage(path, "append") as storage:
        sampler = PrioritizedSampler(storage, alpha=1.0, beta=1.0, eps=1e-8)
        assert np.unique(sampler.draw(300)[0]).tolist() == [12]


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ["rewind", "keep"])
def test_a_checkpoint_is_loaded(rows: Any, unpack: Callable[[str], Path]) -> None:
    folder, facts = unpack("checkpoint"), FACTS["checkpoint"]
    stored = FACTS["storages"]["checkpoint/rows"]["rows"]
    policy = policy_of()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.5)
    generator, python = np.random.default_rng(0), random.Random(0)
    with SyncCollector(
        partial(my_system.corridor, 3),
        policy,
        storage=folder / "rows",
        resume=True,
        frames_per_batch=30,
        total_frames=200,
    ) as collector:
        loaded = load_checkpoint(
            folder / "saved",
            collector=collector,
            rows=rows,
            policy=policy,
            optimizer=optimizer,
            generator=generator,
            python=python,
        )
        assert loaded.values["settings"] == {"lr": 0.01, "names": ("a", "b"), "seen": {1, 2}}
        assert loaded.values["counter"] == Counter("aab")
        table = loaded.values["table"]
        assert (table.dtype, table.tolist()) == (np.int16, [[0, 1, 2], [3, 4, 5]])
        assert policy.module.net.weight.tolist() == facts["weight"]
        assert next(iter(optimizer.state.values()))["exp_avg"].tolist() == facts["moment"]
        assert optimizer.param_groups[0]["lr"] == 0.01
        assert int(generator.integers(1000)) == facts["next_number"]
        assert python.random() == facts["next_random"]
        there = facts["stored"] if rows == "rewind" else stored
        assert collector.ledger.stored == there < 200
        assert collector.collect(1000) == 200 - there
    report = verify(folder / "rows")
    assert report.sound, report
    with open_storage(folder / "rows") as storage:
        assert len(storage) == 200
        check_corridor(storage.get(slice(None)))


def test_the_state_of_a_collector_is_loaded(unpack: Callable[[str], Path]) -> None:
    state = torch.load(unpack("state.pt"), weights_only=False)
    with SyncCollector(
        partial(my_system.corridor, 3), policy_of(), frames_per_batch=30, total_frames=200
    ) as collector:
        collector.load_state_dict(state)
        assert collector.ledger.stored == FACTS["state"]["stored"]
        assert sum(len(batch) for batch in collector) == 200 - FACTS["state"]["stored"]


# --- exports, logs, pickles -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", FACTS["exports"])
def test_an_export_comes_back(kind: str, unpack: Callable[[str], Path], tmp_path: Path) -> None:
    need(kind)
    name, lost = FACTS["exports"][kind]
    place, source = unpack("exports") / name, unpack("memmap")
    assert lost == {}
    report = import_dataset(place, tmp_path / "back", kind)
    assert (report.rows, report.lost) == (FACTS["storages"]["memmap"]["rows"], {})
    assert verify(tmp_path / "back").sound
    found = diff(source, tmp_path / "back")
    assert (found.equal, found.schema, found.only) == (report.rows, (), (0, 0))
    sound = verify_dataset(place, kind)
    assert sound.sound, sound.findings
    with open_storage(source) as storage, open_storage(tmp_path / "back") as back:
        assert back.runs[0]["copied_from"]["id"] == storage.reader.id
        again = storage.export(tmp_path / f"again{place.suffix}", kind)
    assert (again.rows, again.lost) == (report.rows, lost)


def test_a_log_goes_on(unpack: Callable[[str], Path]) -> None:
    folder = unpack("logged")
    before = (folder / "run.csv").read_text()
    with (
        SyncCollector(
            partial(my_system.corridor, 3),
            storage=folder / "rows",
            resume=True,
            frames_per_batch=30,
            total_frames=180,
        ) as collector,
        RunLog(collector, folder / "run.csv", every=60) as log,
    ):
        for _ in collector:
            log.update(loss=7)
    text = (folder / "run.csv").read_text()
    assert text.startswith(before)
    rows = [*csv.DictReader(text.splitlines())]
    assert [row["frames"] for row in rows] == ["60", "120", "180"]
    assert [row["loss"] for row in rows] == ["0.25", "0.75", "7"]
    with open(folder / "episodes.csv", newline="") as file:
        episodes = [*csv.DictReader(file)]
    assert {int(row["length"]) for row in episodes} <= {*range(1, 8)}


def test_pickles_name_modules_that_are_found(unpack: Callable[[str], Path]) -> None:
    folder = unpack("objects")
    found = {each.stem: pickle.loads(each.read_bytes()) for each in folder.glob("*.pkl")}
    with open_storage(unpack("memmap")) as storage:
        assert found["schema"] == storage.schema
        statistics, normaliser = storage.statistics(), storage.normaliser("observation")
        values = storage.get(slice(0, 9))["observation"]
        for each in (found["normaliser"], torch.load(folder / "normaliser.pt", weights_only=False)):
            assert type(each) is type(normaliser)
            assert torch.equal(each(values), normaliser(values))
        assert type(found["statistics"]) is type(statistics)
        assert repr(found["statistics"]) == repr(statistics)
    assert found["verified"].sound
    assert len(found["evaluation"].returns) == 2
    lerobot, stack, follow, s3, shard, resets, chosen, drawn = found["options"]
    assert (lerobot.fps, stack.key, follow.every, s3.region) == (20, "camera", 3, "here")
    assert (shard.of, resets.seeds, type(chosen).__name__) == (2, True, "Choice")
    assert (drawn.low, drawn.high) == (0, 1)
