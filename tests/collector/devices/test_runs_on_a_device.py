"""Whole runs on a device have the rows of the same run on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ram_ring import RamRing
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.data import Bounded, LazyTensorStorage, ReplayBuffer
from torchrl.envs import Compose, DoubleToFloat, RewardSum, StepCounter, TransformedEnv
from torchrl.modules import GRUModule

from tallyroll.collector import MultiprocessCollector, SyncCollector, TransitionError, evaluate
from tallyroll.storage import (
    MemmapStorage,
    PrioritizedSampler,
    content_hash,
    open_storage,
    verify,
)

from devices_kit import SIMULATED, on_gpu
from tensor_cartpole import Leaning, TensorCartPole

if SIMULATED:
    import fakegpu

LAYOUTS = ["rows", "lanes", "trajectories", "torchrl"]
BUDGET: dict[str, Any] = {"frames_per_batch": 160, "total_frames": 401, "seed": 3}


class InPlace(Leaning):
    """Policy that returns the same tensors in each call, and overwrites its input."""

    def __init__(self, device: str, lanes: int) -> None:
        super().__init__(device)
        self.action = torch.zeros(lanes, dtype=torch.int64, device=device)
        self.value = torch.zeros(lanes, device=device)

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        torch.sum(td["observation"] * self.weight, -1, out=self.value)
        self.action.copy_(self.value > 0)
        td["observation"].fill_(-1)
        return td.set("action", self.action).set("value", self.value)


class Half(Leaning):
    """Policy with a column of bfloat16, which NumPy does not have."""

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        return super().forward(td).set("value", td["observation"].sum(-1).bfloat16())


def transformed(device: str) -> TransformedEnv:
    transforms = Compose(RewardSum(), StepCounter(20), DoubleToFloat())
    return TransformedEnv(TensorCartPole(16, device), transforms)


def recurrent() -> TensorDictSequential:
    torch.manual_seed(0)
    gru = GRUModule(input_size=4, hidden_size=3, in_key="observation", out_key="hidden")
    choose = TensorDictModule(lambda hidden: (hidden.sum(-1) > 0).long(), ["hidden"], ["action"])
    return TensorDictSequential(gru, choose)


def unchanged(batch: TensorDictBase) -> TensorDictBase:
    return batch


def several(device: str) -> list[tuple[range, Leaning]]:
    return [(range(5), Leaning()), (range(5, 16), Leaning(device))]


Made = tuple[Any, Any, dict[str, Any]]
CASES: dict[str, Callable[[str], Made]] = {
    "random actions": lambda d: (TensorCartPole(16, d), None, {}),
    "policy and environment": lambda d: (TensorCartPole(16, d), Leaning(d), {}),
    "environment": lambda d: (TensorCartPole(16, d), Leaning(), {"policy_device": "cpu"}),
    "environment, policy unspecified": lambda d: (TensorCartPole(16, d), Leaning(), {}),
    "policy": lambda d: (TensorCartPole(16), Leaning(d), {}),
    "device": lambda d: (TensorCartPole(16, d), Leaning(d), {"device": d}),
    "batches": lambda d: (TensorCartPole(16, d), Leaning(d), {"storing_device": d}),
    "batches alone": lambda d: (TensorCartPole(16), Leaning(), {"storing_device": d}),
    "batches on the host": lambda d: (TensorCartPole(16, d), None, {"storing_device": "cpu"}),
    "transforms": lambda d: (transformed(d), Leaning(d), {"init_random_frames": 100}),
    "recurrent policy on the host": lambda d: (TensorCartPole(16, d), recurrent(), {}),
    "several policies": lambda d: (TensorCartPole(16, d), several(d), {}),
    "postproc": lambda d: (TensorCartPole(16, d), None, {"postproc": unchanged}),
    "bfloat16": lambda d: (TensorCartPole(16, d), Half(d), {}),
    "in place": lambda d: (TensorCartPole(16, d), InPlace(d, 16), {}),
}


def stored(path: Path, made: Made) -> str:
    """Return the hash of the rows of a run, after verifying them."""
    env, policy, given = made
    with SyncCollector(env, policy, storage=path, **BUDGET, **given) as collector:
        assert [len(batch) for batch in collector] == [160, 160, 81]
        collector.ledger.check()
    assert not verify(path).findings
    return content_hash(path)


@on_gpu
@pytest.mark.parametrize("case", CASES)
def test_rows_are_those_of_the_cpu(case: str, device: str, tmp_path: Path) -> None:
    make = CASES[case]
    assert stored(tmp_path / "there", make(device)) == stored(tmp_path / "here", make("cpu"))


class BoundedCartPole(TensorCartPole):
    """CartPole with bounds of observations, and with others for some lanes if ``by_lane``."""

    def __init__(self, device: str, by_lane: bool, broken: tuple[int, int, float]) -> None:
        super().__init__(16, device)
        high = torch.tensor([1.0, 2.0, 3.0, torch.inf], device=device).expand(16, 4).clone()
        if by_lane:
            high[5:] = 20.0
        spec = Bounded(-high, high, (16, 4), dtype=torch.float32, device=self.device)
        self.observation_spec.set("observation", spec)
        self.broken = broken

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        out = super()._step(td)
        slot, entry, value = self.broken
        self.steps = getattr(self, "steps", -1) + 1
        if self.steps == slot:
            out["observation"][7, entry] = value
        return out


@on_gpu
@pytest.mark.parametrize("by_lane", [False, True], ids=["bounds of entries", "bounds of lanes"])
@pytest.mark.parametrize("value", [float("nan"), 30.0, -30.0, 0.5])
@pytest.mark.parametrize("entry", [1, 3])
def test_a_value_out_of_range_is_named_as_on_the_cpu(
    entry: int, value: float, by_lane: bool, device: str, tmp_path: Path
) -> None:
    """The device only finds that a value is bad. The host names it."""

    def run(where: str) -> tuple[str, str]:
        env, path = BoundedCartPole(where, by_lane, (23, entry, value)), tmp_path / where
        message = ""
        with SyncCollector(env, Leaning(where), storage=path, **BUDGET) as collector:
            try:
                for _ in collector:
                    pass
            except TransitionError as error:
                message = str(error)
        assert not verify(path).findings
        return message, content_hash(path)

    there = run(device)
    assert there == run("cpu")
    good = value == 0.5 or (entry == 3 and value == value and not by_lane)
    assert there[0] == "" if good else "lane 7" in there[0]


@on_gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_are_those_of_the_cpu(layout: str, device: str) -> None:
    def batches(where: str) -> list[TensorDictBase]:
        given = {**BUDGET, "total_frames": 480, "layout": layout, "storing_device": where}
        with SyncCollector(TensorCartPole(16, where), Leaning(where), **given) as collector:
            return [batch.clone() for batch in collector]

    for here, there in zip(batches("cpu"), batches(device), strict=True):
        assert {leaf.device.type for leaf in there.values(True, True)} == {device}
        assert (there.cpu() == here).all()


@on_gpu
@pytest.mark.parametrize(("case", "layout"), [*zip(CASES, cycle(LAYOUTS), strict=False)])
def test_all_columns_of_a_batch_are_on_one_device(case: str, layout: str, device: str) -> None:
    """Batches are on the device of the environment unless ``storing_device`` names another."""
    env, policy, given = CASES[case](device)
    expected = torch.device(given.get("storing_device", given.get("device", env.device))).type
    given = {**BUDGET, "total_frames": 480, "layout": layout, **given}
    with SyncCollector(env, policy, **given) as collector:
        for batch in collector:
            assert {leaf.device.type for leaf in batch.values(True, True)} == {expected}
            if expected == device:
                assert batch.device is not None
                assert batch.device.type == device


@on_gpu
def test_masks_of_a_batch_select_its_rows(device: str) -> None:
    """A mask of one column selects rows of all others, because no column is elsewhere."""
    found = []
    for where in ("cpu", device):
        with SyncCollector(TensorCartPole(16, where), None, **BUDGET) as collector:
            batch = next(iter(collector))
        done, first = batch["next", "done"].squeeze(-1), batch["collector", "step"] == 0
        speed = torch.stack([batch["observation"][:, 1], batch["collector", "step"].float()])
        found.append([batch[done], batch[first], batch[done | first], speed])
    here, there = found
    for one, other in zip(here, there, strict=True):
        assert len(one)
        assert (other.cpu() == one).all()


@on_gpu
def test_calls_of_collect_store_the_rows_of_the_cpu(device: str, tmp_path: Path) -> None:
    def run(where: str) -> str:
        env, policy = TensorCartPole(16, where), Leaning(where)
        with SyncCollector(env, policy, storage=tmp_path / where, **BUDGET) as collector:
            for frames in (1, 15, 16, 17, 210):
                collector.collect(frames)
            assert collector.ledger.stored == 259
        return content_hash(tmp_path / where)

    assert run(device) == run("cpu")


@on_gpu
def test_evaluation_has_the_returns_of_the_cpu(device: str) -> None:
    here, there = (
        evaluate(Leaning(where), TensorCartPole(8, where), episodes=11, seed=1).returns.tolist()
        for where in ("cpu", device)
    )
    assert here == there


@on_gpu
@pytest.mark.parametrize("options", [{}, {"transport": "thread"}], ids=["processes", "threads"])
def test_workers_store_the_rows_of_the_cpu(
    options: dict[str, Any], device: str, tmp_path: Path
) -> None:
    def run(where: str) -> str:
        makes, policy = [partial(TensorCartPole, 8, where)] * 2, Leaning(where)
        given = {**BUDGET, "storage": tmp_path / where, **options}
        with MultiprocessCollector(makes, policy, **given) as collector:
            for _ in collector:
                with torch.no_grad():
                    policy.weight.add_(1)
                collector.update_policy_weights_()
        assert not verify(tmp_path / where).findings
        return content_hash(tmp_path / where)

    assert run(device) == run("cpu")


@on_gpu
def test_a_central_policy_acts_there_for_workers_on_the_cpu(device: str, tmp_path: Path) -> None:
    with MultiprocessCollector(
        [partial(TensorCartPole, 8)] * 2, Leaning(device), policy_placement="central",
        policy_device=device, storage=tmp_path / "there", **BUDGET,
    ) as collector:  # fmt: skip
        assert [len(batch) for batch in collector] == [160, 160, 81]
    assert not verify(tmp_path / "there").findings


def filled(path: Path) -> MemmapStorage:
    """Return a storage with the rows of a run."""
    with SyncCollector(TensorCartPole(16), Leaning(), storage=path, **BUDGET) as collector:
        for _ in collector:
            pass
    return open_storage(path)


@on_gpu
def test_the_loader_gives_the_rows_of_the_cpu(device: str, tmp_path: Path) -> None:
    with filled(tmp_path / "rows") as storage:
        given = {"seed": 0, "batches": 20}
        with storage.loader(64, device=device, **given) as loader:
            there = [*loader]
        with storage.loader(64, **given) as loader:
            for here, other in zip(loader, there, strict=True):
                assert other.device.type == device
                assert (other.cpu() == here).all()


@on_gpu
def test_torchrls_storage_there_holds_the_rows(device: str, tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(500, device=device), batch_size=64)
    env, policy = TensorCartPole(16, device), Leaning(device)
    with SyncCollector(env, policy, replay_buffer=buffer, **BUDGET) as collector:
        for _ in collector:
            pass
    with filled(tmp_path / "rows") as storage:
        rows, found = storage.get(slice(None)), buffer[:]
    assert found["observation"].device.type == device
    for key in ("observation", "action", ("next", "observation"), ("next", "terminated")):
        assert torch.equal(found[key].cpu(), rows[key])


@on_gpu
def test_a_ring_there_holds_the_newest_rows(device: str, tmp_path: Path) -> None:
    ring = RamRing(200, device)
    env, policy = TensorCartPole(16, device), Leaning(device)
    with SyncCollector(env, policy, storage=ring, **BUDGET) as collector:
        for _ in collector:
            pass
        collector.ledger.check()
    assert ring.reader.span == range(201, 401)
    numbers = np.arange(201, 401)
    with filled(tmp_path / "rows") as storage:
        for key, column in ring.reader.columns.items():
            assert column.device.type == device
            found = ring.reader.column(key).take(numbers)
            np.testing.assert_array_equal(found, storage.reader.column(key).take(numbers))


@on_gpu
def test_rows_there_can_be_appended(device: str, tmp_path: Path) -> None:
    rows = TensorDict({"a": torch.arange(10.0), "b": torch.arange(10)}, [10])
    with MemmapStorage(tmp_path / "rows", max_size=100) as storage:
        storage.extend(rows.to(device))
        ReplayBuffer(storage=storage, batch_size=4).extend(rows.to(device))
        assert len(storage) == 20
        assert (storage.get(slice(0, 10)) == rows).all()
        assert (storage.get(slice(10, 20)) == rows).all()


@on_gpu
def test_priorities_and_indices_there_are_accepted(device: str, tmp_path: Path) -> None:
    with filled(tmp_path / "rows") as storage:
        sampler = PrioritizedSampler(storage, alpha=1.0, beta=0.4)
        index, zeros = torch.arange(0, 401), torch.zeros(401)
        zeros[7] = 1.0
        sampler.update_priority(index.to(device), zeros.to(device))
        buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=64)
        _, info = buffer.sample(return_info=True)
        drawn = torch.as_tensor(info["index"]).reshape(-1)
        assert (drawn == 7).float().mean() > 0.9


@on_gpu
def test_a_state_from_there_loads_on_the_cpu(device: str, tmp_path: Path) -> None:
    with SyncCollector(TensorCartPole(16, device), Leaning(device), **BUDGET) as collector:
        next(iter(collector))
        torch.save(collector.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", map_location="cpu", weights_only=False)
    with SyncCollector(TensorCartPole(16), Leaning(), **BUDGET) as collector:
        collector.load_state_dict(state)
        assert len(next(iter(collector))) == 160
        assert collector.ledger.stored == 320


# --- faults ---------------------------------------------------------------------------------------


class Losing(TensorCartPole):
    """CartPole whose device is lost before the step call ``at``."""

    def __init__(self, device: str, at: int) -> None:
        super().__init__(16, device)
        self.left = at

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        if not self.left:
            fakegpu.lose(True)
        self.left -= 1
        return super()._step(td)


@on_gpu
@pytest.mark.skipif(not SIMULATED, reason="only the simulated GPU can be lost")
@pytest.mark.parametrize("yields", [True, False], ids=["batches", "collect"])
def test_rows_on_disk_are_kept_if_the_device_is_lost(
    yields: bool, device: str, tmp_path: Path
) -> None:
    env, policy, given = Losing(device, 23), Leaning(device), {"storage": tmp_path / "there"}
    collector = SyncCollector(env, policy, **BUDGET, **given)

    def collect() -> None:
        with collector:
            for _ in collector if yields else range(3):
                if not yields:
                    collector.collect(160)

    try:
        with pytest.raises(RuntimeError, match="fakegpu error: the device is lost"):
            collect()
    finally:
        fakegpu.lose(False)
    collector.ledger.check()
    assert collector.ledger.stored == 320
    assert not verify(tmp_path / "there").findings
    given = {**BUDGET, "total_frames": 320, "storage": tmp_path / "here"}
    with SyncCollector(TensorCartPole(16), Leaning(), **given) as collector:
        for _ in collector:
            pass
    assert content_hash(tmp_path / "there") == content_hash(tmp_path / "here")


class Scattered(Leaning):
    """Policy that has weights on two devices, and uses both."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.bias = torch.nn.Parameter(torch.zeros(4))

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        super().forward(td)
        return td.set("value", (td["observation"] + self.bias).sum(-1))


@on_gpu
def test_a_policy_on_two_devices_raises_an_error_that_names_both(
    device: str, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match=f"same device.*{device}.*cpu"):
        SyncCollector(TensorCartPole(16, device), Scattered(device), storage=tmp_path, **BUDGET)
    assert not list(tmp_path.iterdir())


class Astray(TensorCartPole):
    """CartPole whose step returns an observation on the host."""

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        out = super()._step(td)
        return TensorDict({**out, "observation": out["observation"].cpu()}, out.batch_size)


@on_gpu
def test_a_column_on_another_device_than_its_environment_is_moved(
    device: str, tmp_path: Path
) -> None:
    def run(env: TensorCartPole, path: Path) -> str:
        with SyncCollector(env, None, storage=path, **BUDGET) as collector:
            for batch in collector:
                assert {leaf.device.type for leaf in batch.values(True, True)} == {env.device.type}
        return content_hash(path)

    assert run(Astray(16, device), tmp_path / "there") == run(TensorCartPole(16), tmp_path / "here")
