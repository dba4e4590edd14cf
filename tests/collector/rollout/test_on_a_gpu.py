"""Rows with policies, environments or batches on a GPU equal those of a run on the CPU.

Each test also runs on the CPU, which checks its own parts without a GPU. The gate runs it on a
simulated GPU as well (`test_on_the_fake_gpu.py`).
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torchrl.modules import GRUModule

from tallyroll.collector import (
    ArgumentError,
    Devices,
    OnePolicy,
    SyncCollector,
    compat,
    evaluate,
    load_checkpoint,
    replay,
    save_checkpoint,
)
from tallyroll.collector.cli import probe
from tallyroll.collector.envs.stepping.stepper import Stepper
from tallyroll.collector.policies.trial import generators_restored
from tallyroll.collector.rollout import slab_plan
from tallyroll.storage import content_hash, open_storage, verify

from devices_kit import ACCELERATOR, SIMULATED, here_and_there, on_gpu
from fork_server import warm_fork_server
from policies_kit import recurrent
from toy_systems import (
    First,
    Groups,
    InParts,
    Kept,
    Lost,
    SomeFinals,
    There,
    Toy,
    WithResetSlots,
)
from worker_kit import DISABLED, LANES, NEXT, SAME, factory, worker_collector

BUDGET: dict[str, Any] = {"frames_per_batch": 15, "total_frames": 101, "seed": 3}


class Whole(TensorDictModuleBase):
    """Policy whose weights are whole numbers, so that every device computes the same results."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["action", "value"]
        drawn = torch.randint(-3, 4, (3, 2), generator=torch.Generator().manual_seed(seed))
        self.weight = torch.nn.Parameter(drawn.float())

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write the action and its value on the device of the weights."""
        seen = td["observation"]
        assert seen.device.type == self.weight.device.type
        values = (seen.unsqueeze(-1) * self.weight).sum(-2)
        return td.set("action", values.argmax(-1)).set("value", values)


def on(device: str, policy: Any) -> Any:
    return policy.to(device)


def stored(path: Path, create: Any, policy: Any = None, **more: Any) -> str:
    """Return the hash of the rows of a run, after verifying them."""
    with SyncCollector(create, policy, storage=path, **{**BUDGET, **more}) as collector:
        for batch in collector:
            assert batch["observation"].device.type == more.get("storing_device", "cpu")
    assert not verify(path).findings
    return content_hash(path)


@here_and_there
@pytest.mark.parametrize("source", [DISABLED, NEXT, SAME, "native", "torch"])
def test_a_policy_acts_there(device: str, source: str, tmp_path: Path) -> None:
    """The weights change between batches, and a part of the actions are random."""

    def run(name: str, policy: Any, **more: Any) -> str:
        given = {**BUDGET, "storage": tmp_path / name, "init_random_frames": 22, **more}
        with SyncCollector(factory(source, 0, LANES, ends="mixed"), policy, **given) as collector:
            for batch in collector:
                assert batch.device is None or batch.device.type == "cpu"
                with torch.no_grad():
                    policy.weight.add_(1).remainder_(5)
                collector.update_policy_weights_()
        return content_hash(tmp_path / name)

    expected = run("here", Whole())
    assert run("there", on(device, Whole())) == expected
    assert run("moved", Whole(), policy_device=device) == expected
    assert run("asked", Whole(), devices=Devices(policy=device)) == expected


@here_and_there
@pytest.mark.parametrize("layout", ["rows", "lanes", "trajectories", "torchrl"])
def test_batches_lie_there(device: str, layout: str) -> None:
    def batches(**more: Any) -> list[TensorDictBase]:
        create = factory(DISABLED, 0, LANES, ends="mixed")
        given = {**BUDGET, "total_frames": 90, "layout": layout, **more}
        with SyncCollector(create, on(device, Whole()), **given) as collector:
            return [batch.clone() for batch in collector]

    for plain, there in zip(batches(), batches(storing_device=device), strict=True):
        assert {leaf.device.type for leaf in there.values(True, True)} == {device}
        assert (there.cpu() == plain).all()


@here_and_there
@pytest.mark.parametrize("toy", [Toy, WithResetSlots, First, SomeFinals, Lost, Groups])
def test_an_environment_lies_there(
    device: str, toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are copied. On the CPU, observations without a NumPy dtype take the same path."""
    found = []
    for name, system in (("here", toy(4)), ("there", There(toy(4), device))):
        if name == "there" and device == "cpu":
            monkeypatch.setattr(slab_plan, "fills_slabs", lambda env: False)
        with SyncCollector(system, None, storage=tmp_path / name, **BUDGET) as collector:
            for _ in collector:
                pass
        assert not verify(tmp_path / name).findings
        found.append((content_hash(tmp_path / name), collector.ledger.slots))
    assert found[0] == found[1]


@on_gpu
@pytest.mark.parametrize("option", ["env_device", "device"])
@pytest.mark.parametrize("toy", [Toy, WithResetSlots, First, SomeFinals, Groups])
def test_a_system_keeps_its_arrays_there(
    device: str, option: str, toy: Any, tmp_path: Path
) -> None:
    """Without such an option, it returns arrays of the CPU."""
    found = []
    for name, given in (("here", {}), ("there", {option: device})):
        system = Kept(toy(4), device)
        with SyncCollector(system, None, storage=tmp_path / name, **given, **BUDGET) as collector:
            assert collector.env.device.type == (device if given else "cpu")
            for _ in collector:
                pass
        found.append((content_hash(tmp_path / name), collector.ledger.slots))
    assert found[0] == found[1]


@on_gpu
def test_a_system_that_cannot_keep_its_arrays_there(device: str) -> None:
    with pytest.raises(ArgumentError, match=rf"to which Toy returns its arrays, got {device}"):
        SyncCollector(Toy(4), None, env_device=device, **BUDGET)
    with SyncCollector(Toy(4), None, device=device, **BUDGET) as collector:
        assert collector.env.device.type == "cpu"
        assert next(iter(collector)).device.type == device


@here_and_there
def test_a_part_of_its_lanes_cannot_be_stepped_there(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of a device are stepped together. Stepping them in part would lose transitions."""
    system = There(InParts(4), device)
    if device == "cpu":  # as for observations without a NumPy dtype
        monkeypatch.setattr(Stepper, "fills", False)
    with pytest.raises(
        ArgumentError, match=r"^surplus=\"never_step\" needs an environment that can"
    ):
        SyncCollector(system, None, surplus="never_step", **BUDGET)
    with SyncCollector(There(InParts(1), device), None, surplus="never_step", **BUDGET) as one:
        assert [len(batch) for batch in one] == [15] * 6 + [11]


@here_and_there
def test_one_of_two_policies_acts_there(device: str, tmp_path: Path) -> None:
    def run(name: str, where: str) -> str:
        with_device = OnePolicy(Whole(2), init_random_frames=10, policy_device=where)
        policies = [([0, 3, 4], Whole(1)), (range(1, 3), with_device)]
        return stored(tmp_path / name, factory(DISABLED, 0, LANES), policies)

    assert run("there", device) == run("here", "cpu")


@here_and_there
def test_states_of_a_recurrent_policy_stay_there(device: str, tmp_path: Path) -> None:
    """The results are close, not equal, because cuDNN is less exact.

    States follow the lane's steps.
    """
    if SIMULATED and device == ACCELERATOR:
        pytest.skip("torch calls a fused kernel, which the simulated GPU does not have")
    rows = {}
    for where in ("cpu", device):
        _, policy = recurrent(GRUModule)
        path = tmp_path / f"{where}{len(rows)}"
        with SyncCollector(
            factory(NEXT, 0, LANES, ends="mixed"), policy, policy_device=where, storage=path,
            **BUDGET,
        ) as collector:  # fmt: skip
            for _ in collector:
                pass
        with open_storage(path) as storage:
            rows[path.name] = storage.get(slice(None))
    (here, there) = rows.values()
    begun = there["collector", "step"] == 0
    assert (there["h"][begun] == 0).all()
    torch.testing.assert_close(there["h"], here["h"], rtol=1e-2, atol=2e-3)


class Drawing(TensorDictModuleBase):
    """Policy that draws actions from the generator of its device."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["action"]
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Draw on the device of the weights."""
        return td.set("action", torch.randint(0, 2, td.batch_size, device=self.weight.device))


@here_and_there
def test_a_checkpoint_goes_on_with_its_generator(device: str, tmp_path: Path) -> None:
    def run(name: str, first: int, *, load: bool = False) -> str:
        with SyncCollector(
            factory("torch", 0, LANES, ends="mixed"), on(device, Drawing()),
            storage=tmp_path / name, resume=load, max_frames_per_traj=5, **BUDGET,
        ) as collector:  # fmt: skip
            if load:
                load_checkpoint(tmp_path / "saved", collector=collector)
            else:
                collector.collect(first)
            # Environments are not saved, so lanes are also reset in the uninterrupted run.
            if not load:
                save_checkpoint(tmp_path / "saved", collector=collector)
            drawn = torch.randint(0, 1000, (9,), device=device).cpu().tolist()
        return str(drawn)

    before = run("rows", 50)
    torch.rand(7, device=device)
    assert run("rows", 0, load=True) == before


@here_and_there
@pytest.mark.parametrize("moved", [False, True], ids=["as it was", "map_location"])
def test_a_state_continues_with_its_generator(device: str, moved: bool, tmp_path: Path) -> None:
    """`torch.load` moves the states of generators, too, which torch requires on the CPU."""

    def make() -> SyncCollector:
        create = factory("torch", 0, LANES, ends="mixed")
        return SyncCollector(create, on(device, Drawing()), **BUDGET)

    with make() as collector:
        next(iter(collector))
        torch.save(collector.state_dict(), tmp_path / "state.pt")
        expected = torch.rand(9, device=device).tolist()
    torch.rand(7, device=device)
    where = device if moved else None
    with make() as collector:
        collector.load_state_dict(
            torch.load(tmp_path / "state.pt", map_location=where, weights_only=False)
        )
        assert torch.rand(9, device=device).tolist() == expected


def test_states_of_absent_devices_are_skipped() -> None:
    torch.manual_seed(1)
    state = compat.saved_generators() | {"another": [torch.zeros(16, dtype=torch.uint8)]}
    expected = torch.rand(9).tolist()
    compat.load_generators(state)
    assert torch.rand(9).tolist() == expected


@here_and_there
def test_a_trial_leaves_the_generator_of_a_device(device: str) -> None:
    torch.manual_seed(1)
    torch.rand(5, device=device)
    expected = torch.rand(9, device=device).tolist()
    torch.manual_seed(1)
    torch.rand(5, device=device)
    with generators_restored():
        torch.rand(7, device=device)
    assert torch.rand(9, device=device).tolist() == expected


@here_and_there
def test_evaluation_and_replay(device: str, tmp_path: Path) -> None:
    create = factory(DISABLED, 0, LANES, ends="mixed")
    here, there = (
        evaluate(on(where, Whole()), create, episodes=11, seed=1) for where in ("cpu", device)
    )
    assert here.returns.tolist() == there.returns.tolist()
    stored(tmp_path / "rows", "CartPole-v1", on(device, Cart()), env_kwargs={}, num_envs=3)
    assert replay(tmp_path / "rows").equal


class Cart(TensorDictModule):
    """Policy that pushes the cart in the direction of the pole."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Identity(), in_keys=["observation"], out_keys=["seen"])
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.out_keys = ["action"]

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write the action."""
        assert td["observation"].device.type == self.weight.device.type
        return td.set("action", (td["observation"][..., 2] > 0).long())


@here_and_there
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_workers_act_there(device: str, mode: str, tmp_path: Path) -> None:
    with worker_collector(
        NEXT, 2, Whole(), mode=mode, policy_device=device, storage=tmp_path / "rows", **BUDGET
    ) as collector:
        for _ in collector:
            pass
    assert collector.ledger.stored == 101
    assert not verify(tmp_path / "rows").findings
    if mode == "sync":
        assert content_hash(tmp_path / "rows") == stored(
            tmp_path / "one", factory(NEXT, 0, LANES), Whole()
        )


@on_gpu
def test_info_lists_it(device: str) -> None:
    found = probe._devices("")
    assert found[device], found
    assert {"cuda", "mps"} <= found.keys()  # the names that the JSON always has


def collect_on_the_host() -> None:
    policy = TensorDictModule(lambda x: (x[..., 2] > 0).long(), ["observation"], ["action"])
    with SyncCollector("CartPole-v1", policy, frames_per_batch=9, total_frames=9) as collector:
        assert len(next(iter(collector))) == 9
    assert not torch.get_device_module().is_initialized()


@on_gpu
def test_a_gpu_that_is_not_used_is_left_alone(device: str) -> None:
    """Starting CUDA in each worker would use GPU memory and take seconds."""
    if not hasattr(torch.get_device_module(device), "is_initialized"):
        pytest.skip("every process uses this device")
    warm_fork_server()
    process = multiprocessing.get_context("forkserver").Process(target=collect_on_the_host)
    process.start()
    process.join(120)
    assert process.exitcode == 0
