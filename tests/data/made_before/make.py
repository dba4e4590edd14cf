"""Make the artifacts of this folder: ``python tests/data/made_before/make.py OUT``.

They were made once, by the commit that added this file, and are test data from then on: do not make
them again because a later commit cannot read them. Each ``NAME.tar.gz`` holds files as users have
them, and ``facts.json`` says what they contain. The rows are those of ``third_party/my_system.py``,
whose every number can be recomputed.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import sys
import tarfile
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torchrl.data import TensorDictReplayBuffer

sys.path.append(str(Path(__file__).resolve().parents[1] / "third_party"))

from tallyroll.collector import (
    MultiprocessCollector,
    Resets,
    RunLog,
    Shard,
    SyncCollector,
    choice,
    evaluate,
    save_checkpoint,
    uniform,
)
from tallyroll.storage import (
    DiskStorage,
    Follow,
    FrameStack,
    H5Storage,
    LeRobotOptions,
    MemmapStorage,
    PrioritizedSampler,
    S3Options,
    ZarrStorage,
    content_hash,
    open_storage,
    verify,
)

from my_system import corridor

EXPORTS = {
    "npz": "rows.npz",
    "parquet": "rows.parquet",
    "hf": "hf",
    "lerobot": "lerobot",
    "torchrl": "torchrl",
    "d4rl": "rows.hdf5",
    "rlds": "rlds",
    "minari": "minari",
}
RUN: dict[str, Any] = {"frames_per_batch": 30, "seed": 11}
STORAGES: dict[str, tuple[type[DiskStorage], dict[str, int]]] = {
    "memmap": (MemmapStorage, {}),
    "ring": (MemmapStorage, {"max_size": 64}),
    "hdf5.h5": (H5Storage, {"capacity": 400}),
    "zarr.zarr": (ZarrStorage, {}),
}


class Model(torch.nn.Module):
    """A policy of one layer, and what a user trains it with."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 3)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return (self.net(observation) / 100).softmax(-1).argmax(-1)


def policy_of(seed: int) -> Any:
    """Return a policy whose weights the seed decides."""
    torch.manual_seed(seed)
    return TensorDictModule(Model(), ["observation"], ["action"])


def facts_of(path: Path) -> dict[str, Any]:
    """Return what a storage contains; digests are of the plain bytes of columns."""
    with open_storage(path) as storage:
        ends = Counter(storage.trajectories.ends)
        rows = np.arange(storage.reader.span.start, storage.reader.span.stop)
        columns = storage.reader.copies(rows)
        record = storage.record
        return {
            "rows": len(storage),
            "span": [storage.reader.span.start, storage.reader.span.stop],
            "id": storage.reader.id,
            "hash": content_hash(path),
            "columns": {
                "/".join(key): hashlib.sha256(values.tobytes()).hexdigest()
                for key, values in zip(storage.schema.keys, columns, strict=True)
            },
            "schema": storage.schema.to_json(),
            "first_rows": [run["first_row"] for run in storage.runs],
            "seeds": [run.get("seed") for run in storage.runs],
            "trajectories": len(storage.trajectories),
            "ends": {str(end): count for end, count in sorted(ends.items())},
            "reward": float(storage.get(slice(None))["next", "reward"].double().sum()),
            "record": None if record is None else [record[0], record[1].decode()],
        }


def make_storage(path: Path, kind: type[DiskStorage], options: dict[str, int]) -> None:
    """Write a run, resume it, and append a second run with workers."""
    make = partial(corridor, 3)
    with (
        kind(path, **options) as storage,
        SyncCollector(make, storage=storage, total_frames=120, **RUN) as one,
    ):
        one.collect(70)
        for _ in one:
            pass
    with SyncCollector(
        make, policy_of(0), storage=path, resume=True, frames_per_batch=25, total_frames=160
    ) as one:
        for _ in one:
            one.update_policy_weights_()
    with (
        open_storage(path, "append") as storage,
        MultiprocessCollector(
            corridor,
            num_envs=4,
            num_workers=2,
            transport="thread",
            storage=storage,
            frames_per_batch=20,
            total_frames=60,
            seed=5,
        ) as many,
    ):
        for _ in many:
            pass
    with open_storage(path, "append") as storage:
        storage.statistics()


def make_sharded(path: Path) -> None:
    """Write shards of one run, each by its own worker."""
    with MultiprocessCollector(
        corridor,
        num_envs=4,
        num_workers=2,
        mode="async",
        sharded=True,
        transport="thread",
        storage=path,
        total_frames=110,
        **RUN,
    ) as many:
        many.collect(110)


def make_shards(folder: Path) -> None:
    """Write the parts of a run that two jobs make."""
    for index in range(2):
        with SyncCollector(
            corridor,
            num_envs=5,
            shard=f"{index}/2",
            storage=folder / f"part-{index}",
            total_frames=101,
            **RUN,
        ) as one:
            for _ in one:
                pass


def make_overlaid(path: Path) -> dict[str, Any]:
    """Write overlays of two dtypes and a file of priorities."""
    with MemmapStorage(path) as storage:
        with SyncCollector(partial(corridor, 3), storage=storage, total_frames=90, **RUN) as one:
            one.collect(90)
        values = storage.overlay("value", torch.float32, [2], fill=float("nan"))
        values.set(rows=np.arange(0, 90, 3), values=torch.arange(60.0).reshape(30, 2))
        seen = storage.overlay(("next", "seen"), torch.int16)
        seen[10:20] = torch.arange(-5, 5, dtype=torch.int16)
        sampler = PrioritizedSampler(storage, alpha=1.0, beta=1.0, eps=1e-8)
        sampler.update_rows(np.arange(90), np.where(np.arange(90) % 30 == 7, 1e4, 1e-6))
        sampler.save()
    return {"drawn": [7, 37, 67]}


def make_checkpoint(folder: Path) -> dict[str, Any]:
    """Save a model, its optimiser and values of a user in the midst of a run."""
    policy = policy_of(3)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    with SyncCollector(
        partial(corridor, 3), policy, storage=folder / "rows", total_frames=200, **RUN
    ) as one:
        for number, batch in enumerate(one):
            loss = policy.module.net(batch["observation"]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            one.update_policy_weights_()
            if number == 2:
                values: dict[str, Any] = {
                    "settings": {"lr": 0.01, "names": ("a", "b"), "seen": {1, 2}},
                    "counter": Counter("aab"),
                    "table": np.arange(6, dtype=np.int16).reshape(2, 3),
                    "generator": np.random.default_rng(4),
                    "python": random.Random(5),
                }
                save_checkpoint(
                    folder / "saved", collector=one, policy=policy, optimizer=optimizer, **values
                )
                facts = {
                    "stored": one.ledger.stored,
                    "weight": policy.module.net.weight.tolist(),
                    "moment": next(iter(optimizer.state.values()))["exp_avg"].tolist(),
                    "next_number": int(np.random.default_rng(4).integers(1000)),
                    "next_random": random.Random(5).random(),
                }
            if number == 4:
                break
    return facts


def make_state(path: Path) -> dict[str, Any]:
    """Save the state of a collector without a storage."""
    with SyncCollector(partial(corridor, 3), policy_of(3), total_frames=200, **RUN) as one:
        batch = next(iter(one))
        torch.save(one.state_dict(), path)
        return {"stored": one.ledger.stored, "rows": len(batch)}


def make_log(folder: Path) -> None:
    """Write a log and a table of episodes."""
    with (
        SyncCollector(
            partial(corridor, 3), storage=folder / "rows", total_frames=120, **RUN
        ) as one,
        RunLog(one, folder / "run.csv", every=60) as log,
    ):
        for number, _ in enumerate(one):
            log.update(loss=number / 4)
        one.episodes.to_csv(folder / "episodes.csv")


def make_objects(folder: Path, path: Path) -> None:
    """Pickle what a user may have pickled; a pickle names classes by their modules."""
    with open_storage(path) as storage:
        statistics = storage.statistics()
        objects: dict[str, Any] = {
            "schema": storage.schema,
            "statistics": statistics,
            "normaliser": storage.normaliser("observation"),
            "verified": verify(path),
            "evaluation": evaluate(policy_of(3), partial(corridor, 2), episodes=2, seed=0),
            "options": [
                LeRobotOptions(fps=20),
                FrameStack("camera", 1, axis=-1),
                Follow(every=3),
                S3Options(region="here"),
                Shard(index=0, of=2),
                Resets(sampler={"gravity": uniform(-15.0, -5.0)}, seeds=True),
                choice([1, 2]),
                uniform(0.0, 1.0),
            ],
        }
        for name, each in objects.items():
            (folder / f"{name}.pkl").write_bytes(pickle.dumps(each))
        torch.save(objects["normaliser"], folder / "normaliser.pt")


def make(folder: Path) -> dict[str, Any]:
    """Make all artifacts; each folder or file of the first level becomes an archive."""
    facts: dict[str, Any] = {}
    for name, (kind, options) in STORAGES.items():
        make_storage(folder / name, kind, options)
    make_sharded(folder / "sharded")
    (folder / "shards").mkdir()
    make_shards(folder / "shards")
    with open_storage(folder / "memmap") as storage:
        storage.pack(folder / "packed")
        storage.pack(folder / "packed.h5")
        (folder / "exports").mkdir()
        lost = {
            kind: storage.export(folder / "exports" / name, kind).lost
            for kind, name in EXPORTS.items()
        }
        TensorDictReplayBuffer(storage=storage, batch_size=4).dumps(folder / "dump")
    facts["exports"] = {kind: [EXPORTS[kind], lost[kind]] for kind in EXPORTS}
    facts["beside"] = make_overlaid(folder / "beside")
    for name in ("checkpoint", "logged", "objects"):
        (folder / name).mkdir()
    facts["checkpoint"] = make_checkpoint(folder / "checkpoint")
    facts["state"] = make_state(folder / "state.pt")
    make_log(folder / "logged")
    with SyncCollector(
        "CartPole-v1", num_envs=2, storage=folder / "cartpole", total_frames=100, **RUN
    ) as one:
        one.collect(100)
    storages = [*STORAGES, "sharded", "packed", "packed.h5", "beside", "cartpole"]
    storages += ["shards/part-0", "shards/part-1", "checkpoint/rows", "logged/rows"]
    facts["storages"] = {name: facts_of(folder / name) for name in storages}
    make_objects(folder / "objects", folder / "memmap")
    return facts


def main(out: Path) -> None:
    """Make all, and archive it."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        facts = make(Path(scratch))
        parts: dict[str, list[Path]] = {}
        for each in sorted(
            Path(scratch).iterdir()
        ):  # a storage of one file has others with its name
            parts.setdefault(each.name.partition(".")[0], []).append(each)
        for name, places in parts.items():
            with tarfile.open(out / f"{name}.tar.gz", "w:gz") as archive:
                for each in places:
                    archive.add(each, each.name)
    (out / "facts.json").write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
