"""Sections of `gpu_check.py` that compare rows from a device with rows from the CPU."""

from __future__ import annotations

import tempfile
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpu_envs import (
    Bfloat16Policy,
    ExactPolicy,
    InPlacePolicy,
    LostFinalsSystem,
    RandomPolicy,
    ResetSlotSystem,
    SameStepSystem,
    TensorEnv,
    TensorSystem,
    check_rows,
    gym_vector,
    require_equal,
    require_same,
)
from torchrl.data import LazyTensorStorage, ReplayBuffer

from tallyroll.collector import (
    MultiprocessCollector,
    SyncCollector,
    evaluate,
    load_checkpoint,
    save_checkpoint,
)
from tallyroll.storage import MemmapStorage, content_hash, open_storage, verify

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensordict import TensorDictBase

    Setup = tuple[Any, Any, dict[str, Any]]
    """Environment, policy and options of a collector."""

LANES = 7
BUDGET: dict[str, Any] = {"frames_per_batch": 160, "total_frames": 481, "seed": 3}
"""Options of collectors. Batches end within a step of 7 lanes, so that there is a surplus."""


def setups() -> dict[str, Callable[[str], Setup]]:
    """Return functions that make a set-up for a device, by name."""
    env, system = partial(TensorEnv, LANES), partial(TensorSystem, LANES)
    found: dict[str, Callable[[str], Setup]] = {
        "environment, random actions": lambda d: (env(d), None, {}),
        "environment, policy on the CPU": lambda d: (env(d), ExactPolicy(), {}),
        "environment, policy_device=cpu": lambda d: (
            env(d), ExactPolicy(), {"policy_device": "cpu"},
        ),
        "policy": lambda d: (env("cpu"), ExactPolicy(d), {}),
        "policy_device": lambda d: (env("cpu"), ExactPolicy(), {"policy_device": d}),
        "environment and policy": lambda d: (env(d), ExactPolicy(d), {}),
        "device": lambda d: (env(d), ExactPolicy(), {"device": d}),
        "device, environment moved": lambda d: (env("cpu"), ExactPolicy(), {"device": d}),
        "batches": lambda d: (env("cpu"), ExactPolicy(), {"storing_device": d}),
        "batches of environment and policy": lambda d: (
            env(d), ExactPolicy(d), {"storing_device": d},
        ),
        "batches on the host": lambda d: (env(d), ExactPolicy(d), {"storing_device": "cpu"}),
        "policy that writes in place": lambda d: (env(d), InPlacePolicy(d, LANES), {}),
        "column of bfloat16": lambda d: (env(d), Bfloat16Policy(d), {}),
        "random frames first": lambda d: (env(d), ExactPolicy(d), {"init_random_frames": 100}),
        "two policies": lambda d: (
            env(d), [(range(3), ExactPolicy()), (range(3, 7), ExactPolicy(d))], {},
        ),
        "whole episodes": lambda d: (
            env(d), ExactPolicy(d), {"total_frames": None, "total_episodes": 41},
        ),
    }  # fmt: skip
    short = {"frames_per_batch": 30, "total_frames": 91}
    found["1 lane"] = lambda d: (TensorEnv(1, d), ExactPolicy(d), short)
    found["64 lanes"] = lambda d: (TensorEnv(64, d), ExactPolicy(d), {})
    for layout in ("lanes", "trajectories", "torchrl"):
        found[f"layout {layout}"] = lambda d, layout=layout: (
            env(d),
            ExactPolicy(d),
            {"layout": layout, "storing_device": d, "total_frames": 560, "frames_per_batch": 140},
        )  # fmt: skip
    found["surplus discard"] = lambda d: (env(d), ExactPolicy(d), {"surplus": "discard"})
    found["surplus never_step"] = lambda d: (
        gym_vector(LANES, "DISABLED"), ExactPolicy(d), {"surplus": "never_step"},
    )  # fmt: skip
    for kind in (TensorSystem, ResetSlotSystem, SameStepSystem, LostFinalsSystem):
        found[f"system {kind.__name__}"] = lambda d, kind=kind: (kind(LANES, d), ExactPolicy(d), {})
    found["system, policy on the CPU"] = lambda d: (system(d), ExactPolicy(), {})
    found["system ResetSlotSystem, batches on the host"] = lambda d: (
        ResetSlotSystem(LANES, d), ExactPolicy(d), {"storing_device": "cpu"},
    )  # fmt: skip
    found["system ResetSlotSystem, surplus discard"] = lambda d: (
        ResetSlotSystem(LANES, d), ExactPolicy(d), {"surplus": "discard"},
    )  # fmt: skip
    for mode in ("NEXT_STEP", "SAME_STEP", "DISABLED"):
        found[f"Gymnasium {mode}, policy"] = lambda d, mode=mode: (
            gym_vector(LANES, mode), ExactPolicy(d), {"storing_device": d},
        )  # fmt: skip
    return found


def device_of(setup: Setup) -> str:
    """Return the type of the device on which a set-up should yield its batches."""
    env, _, options = setup
    own = getattr(env, "device", None) or getattr(getattr(env, "declares", None), "device", "cpu")
    where = options.get("storing_device", options.get("device", own))
    return torch.device(where).type


def collected(setup: Setup, path: Path) -> tuple[list[TensorDictBase], dict[str, Any]]:
    """Collect to a storage. Return the batches on the CPU, and the counts and the content hash."""
    env, policy, options = setup
    expected, batches = device_of(setup), []
    with SyncCollector(env, policy, **{**BUDGET, "storage": path, **options}) as collector:
        for batch in collector:
            found = {leaf.device.type for leaf in batch.values(True, True)}
            if found != {expected}:
                raise AssertionError(f"batches: expected device {expected}, got {sorted(found)}")
            batches.append(batch.cpu().clone())
        ledger = collector.ledger
        ledger.check()
    if findings := verify(path).findings:
        raise AssertionError(f"verify: {findings[:3]}")
    counts = {name: getattr(ledger, name) for name in ("slots", "executed", "stored", "discarded")}
    return batches, {**counts, "hash": content_hash(path)}


def rows_of(path: Path) -> TensorDictBase:
    """Return all rows of a storage."""
    with open_storage(path) as storage:
        return storage.get(slice(None)).clone()


def compare(make: Callable[[str], Setup], device: str) -> str:
    """Run a set-up on the CPU and on a device, and compare batches, rows, counts and hashes."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("here", "there")]
        (here, counts), (there, found) = (
            collected(make(where), path) for where, path in zip(("cpu", device), paths, strict=True)
        )
        rows = rows_of(paths[0])
        check_rows(rows, gaps=make("cpu")[2].get("surplus") == "discard")
        if found != counts:
            require_same(rows_of(paths[1]), rows)
            raise AssertionError(f"counts: expected {counts}, got {found}")
    if len(here) != len(there):
        raise AssertionError(f"batches: expected {len(here)}, got {len(there)}")
    for one, other in zip(there, here, strict=True):
        require_same(one, other)
    return f"{counts['stored']} rows equal"


# --- other uses -----------------------------------------------------------------------------------


def filled(path: Path, device: str = "cpu", **options: Any) -> Path:
    """Store the rows of a run at ``path``, and return it."""
    setup = TensorEnv(LANES, device), ExactPolicy(device), options
    collected(setup, path)
    return path


def single_calls(device: str, folder: Path) -> None:
    """Check that calls of `collect` store the same rows as on the CPU."""
    hashes = []
    for number, where in enumerate(("cpu", device)):
        path = folder / f"calls{number}"
        env, policy = TensorEnv(LANES, where), ExactPolicy(where)
        with SyncCollector(env, policy, storage=path, **BUDGET) as collector:
            for frames in (1, LANES - 1, LANES, LANES + 1, 210):
                collector.collect(frames)
            collector.ledger.check()
            if collector.ledger.stored != 3 * LANES + 211:
                raise AssertionError(f"stored: got {collector.ledger.stored}")
        check_rows(rows_of(path))
        hashes.append(content_hash(path))
    if hashes[0] != hashes[1]:
        require_same(rows_of(folder / "calls1"), rows_of(folder / "calls0"))
        raise AssertionError("the hashes differ")


def new_weights(device: str, folder: Path) -> None:
    """Check that the policy on the device gets weights that change on the CPU between batches."""
    paths = []
    for number, where in enumerate(("cpu", device)):
        policy, path = ExactPolicy(), folder / f"weights{number}"
        paths.append(path)
        env = TensorEnv(LANES, where)
        with SyncCollector(env, policy, policy_device=where, storage=path, **BUDGET) as collector:
            for _ in collector:
                policy.weight.data.add_(1)
                collector.update_policy_weights_()
    check_rows(rows_of(paths[0]))
    require_same(rows_of(paths[1]), rows_of(paths[0]))


def disk_ring(device: str, folder: Path) -> None:
    """Check that a ring on disk keeps the newest rows of an environment on the device."""
    found = []
    for number, where in enumerate(("cpu", device)):
        with (
            MemmapStorage(folder / f"ring{number}", max_size=200) as ring,
            SyncCollector(
                TensorEnv(LANES, where), ExactPolicy(where), storage=ring, **BUDGET
            ) as collector,
        ):
            for _ in collector:
                pass
            if len(ring) != 200:
                raise AssertionError(f"rows: expected 200, got {len(ring)}")
            rows, oldest = ring.get(slice(None)).clone(), BUDGET["total_frames"] % 200
            found.append(torch.cat([rows[oldest:], rows[:oldest]]))
    check_rows(found[0])
    require_same(found[1], found[0])


def buffer_there(device: str, folder: Path) -> None:
    """Check TorchRL's storage on the device, with the environment on the device and on the CPU."""
    rows = rows_of(filled(folder / "rows"))
    for where in ("cpu", device):
        buffer = ReplayBuffer(storage=LazyTensorStorage(500, device=device), batch_size=64)
        env, policy = TensorEnv(LANES, where), ExactPolicy(where)
        with SyncCollector(env, policy, replay_buffer=buffer, **BUDGET) as collector:
            for _ in collector:
                pass
        held = buffer[:]
        found = {leaf.device.type for leaf in held.values(True, True)}
        if found != {torch.device(device).type}:
            raise AssertionError(f"buffer: expected device {device}, got {sorted(found)}")
        for key in ("observation", "action", ("next", "observation"), ("next", "terminated")):
            require_equal(key, held[key], rows[key])


def loader_there(device: str, folder: Path) -> None:
    """Check that batches of a loader on the device are equal to those on the CPU."""
    with open_storage(filled(folder / "rows")) as storage:
        options: dict[str, Any] = {"seed": 0, "batches": 30}
        with storage.loader(64, device=device, **options) as loader:
            there = [*loader]  # all copies are in flight before the first is read
        with storage.loader(64, **options) as loader:
            for one, other in zip(there, loader, strict=True):
                if one.device is None or one.device.type != torch.device(device).type:
                    raise AssertionError(f"loader: expected device {device}, got {one.device}")
                require_same(one, other)


def rows_from_there(device: str, folder: Path) -> None:
    """Check that rows on the device can be appended, and indices on the device select rows."""
    rows = rows_of(filled(folder / "rows"))
    with MemmapStorage(folder / "appended", max_size=1000) as storage:
        storage.extend(rows.to(device))
        require_same(storage.get(slice(None)), rows)
        index = torch.arange(0, len(rows), 3)
        require_same(storage.get(index.to(device)).cpu(), rows[index])
        buffer = ReplayBuffer(storage=storage, batch_size=64, transform=lambda td: td.to(device))
        if buffer.sample()["observation"].device.type != torch.device(device).type:
            raise AssertionError("a transform of the buffer does not move the rows")


def generators(device: str, folder: Path) -> None:
    """Check that a checkpoint and a state restore the generator of the device."""

    def make(resume: bool = False, **options: Any) -> SyncCollector:
        env, policy = TensorEnv(LANES, device), RandomPolicy(device)
        return SyncCollector(env, policy, resume=resume, **BUDGET, **options)

    def drawn() -> torch.Tensor:
        return torch.rand(9, device=device)

    with make(storage=folder / "rows") as collector:
        collector.collect(160)
        save_checkpoint(folder / "saved", collector=collector)
        expected = drawn()
    drawn()
    with make(storage=folder / "rows", resume=True) as collector:
        load_checkpoint(folder / "saved", collector=collector)
        require_equal("draws after a checkpoint", drawn(), expected)
        collector.collect(80)
        if collector.ledger.stored != 240:
            raise AssertionError(f"stored: expected 240, got {collector.ledger.stored}")
    with make() as collector:
        next(iter(collector))
        torch.save(collector.state_dict(), folder / "state.pt")
        expected = drawn()
    drawn()
    with make() as collector:
        collector.load_state_dict(torch.load(folder / "state.pt", weights_only=False))
        require_equal("draws after a state", drawn(), expected)
        next(iter(collector))


def evaluation(device: str, folder: Path) -> None:
    """Check that an evaluation has the same returns as on the CPU."""
    here, there = (
        torch.as_tensor(
            evaluate(ExactPolicy(where), TensorEnv(LANES, where), episodes=23, seed=1).returns
        )
        for where in ("cpu", device)
    )
    require_equal("returns", there, here)


def masks(device: str, folder: Path) -> None:
    """Check that a mask from one column of a batch selects rows of all columns."""
    setup = TensorEnv(LANES, device), ExactPolicy(device), {}
    with SyncCollector(setup[0], setup[1], **BUDGET) as collector:
        batch = next(iter(collector))
        ended = batch[batch["next", "done"].squeeze(-1)]
        first = batch[batch["collector", "step"] == 0]
        if not len(ended) or not len(first):
            raise AssertionError("a mask selected no rows")
        check_rows(batch.clone())


USES = {
    "calls of collect(n)": single_calls,
    "new weights": new_weights,
    "ring on disk": disk_ring,
    "LazyTensorStorage": buffer_there,
    "loader": loader_there,
    "rows and indices on the device": rows_from_there,
    "generators of checkpoints and states": generators,
    "evaluation": evaluation,
    "masks": masks,
}


def in_folder(use: Callable[[str, Path], None], device: str) -> str:
    """Call a function of `USES` with a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        use(device, Path(folder))
    return "equal"


def correctness(device: str, seconds: float) -> dict[str, Callable[[], Any]]:
    """Return the cases of the section."""
    cases: dict[str, Callable[[], Any]] = {
        name: partial(compare, make, device) for name, make in setups().items()
    }
    return cases | {name: partial(in_folder, use, device) for name, use in USES.items()}


# --- workers --------------------------------------------------------------------------------------


def worker_rows(where: str, policy_where: str, path: Path, **options: Any) -> str:
    """Collect with two workers while weights change. Return the content hash."""
    policy = ExactPolicy(policy_where)
    makes = [partial(TensorEnv, LANES, where, first) for first in (0, LANES)]
    with MultiprocessCollector(makes, policy, storage=path, **BUDGET, **options) as collector:
        for _ in collector:
            policy.weight.data.add_(1)
            collector.update_policy_weights_()
        collector.ledger.check()
    if findings := verify(path).findings:
        raise AssertionError(f"verify: {findings[:3]}")
    check_rows(rows_of(path))
    return content_hash(path)


@cache
def worker_rows_of_cpu(options: tuple[tuple[str, Any], ...]) -> tuple[str, TensorDictBase]:
    """Return the content hash and the rows of workers on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        return worker_rows("cpu", "cpu", path, **dict(options)), rows_of(path)


def with_workers(places: tuple[bool, bool], options: dict[str, Any], device: str) -> str:
    """Compare workers whose environment or policy is on the device with workers on the CPU."""
    there = [device if place else "cpu" for place in places]
    given = {name: device if each == "device" else each for name, each in options.items()}
    here = {name: "cpu" if each == "device" else each for name, each in options.items()}
    expected, rows = worker_rows_of_cpu(tuple(here.items()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        if worker_rows(there[0], there[1], path, **given) != expected:
            require_same(rows_of(path), rows)
            raise AssertionError("the hashes differ")
    return f"{BUDGET['total_frames']} rows equal"


def workers(device: str, seconds: float) -> dict[str, Callable[[], Any]]:
    """Return the cases of the section."""
    central = {"policy_placement": "central", "policy_device": "device"}
    threads = {"transport": "thread"}
    return {
        "threads, all on the device": partial(with_workers, (True, True), threads, device),
        "policies on the device": partial(
            with_workers, (False, False), {"policy_device": "device"}, device
        ),
        "all on the device": partial(
            with_workers, (True, True), {"policy_device": "device"}, device
        ),
        "central policy on the device": partial(with_workers, (False, True), central, device),
    }
