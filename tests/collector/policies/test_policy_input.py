"""A policy's changes of its input do not reach rows, other calls or the environment."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.data import Binary, Categorical, Composite, Unbounded
from torchrl.envs import (
    CatFrames,
    Compose,
    EnvBase,
    InitTracker,
    SerialEnv,
    StepCounter,
    TensorDictPrimer,
    TransformedEnv,
)

from tallyroll.collector import GymnasiumVectorEnv
from tallyroll.collector.policies.tensor_copies import own_tensors, own_tensors_on

from collect_kit import ByObservation, act, assert_same, collect, joined
from oracles import OracleTorchEnv, OracleVectorEnv, check_rows, make_oracle_vec
from pairs import in_gate
from worker_kit import (
    DISABLED,
    LANES,
    LENGTHS,
    NEXT,
    SAME,
    collect_all,
    in_threads,
    worker_collector,
)

PLAIN = [[3, 1, 4], [1, 1, 2]]
"""Lengths of the episodes of two lanes."""


# --- policies -----------------------------------------------------------------------------------


class Habit(TensorDictModuleBase):
    """Policy that acts by its last three observations; `careful` copies them first.

    Subclasses define what else it does to its input. After four calls, its action differs if its
    observations were changed, or if its own changes persisted.
    """

    def __init__(self, careful: bool = False, kind: Any = "float") -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["action", "told"]
        self.kind, self.careful = kind, careful
        self.kept: deque[Any] = deque(maxlen=3)
        self.called = 0

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write the action and a column."""
        self.called += 1
        if self.careful:
            td = td.clone()
        self.kept.append(self.keep(td))
        values = [torch.as_tensor(each).to(torch.float64).sum(-1) for each in self.kept]
        total = sum(values[1:], values[0])
        td.set("action", (total % 2).long()).set("told", total)
        return self.leave(td)

    def keep(self, td: TensorDictBase) -> Any:
        """Return the part of the observation to keep."""
        return td.get("observation")

    def leave(self, td: TensorDictBase) -> TensorDictBase:
        """Return the output."""
        return td


class KeepsTensorDict(Habit):
    """Policy that keeps its input and reads it later."""

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write the action by the present values of the kept inputs."""
        self.called += 1
        self.kept.append(td.clone() if self.careful else td)
        total = sum(each["observation"].double().sum(-1) for each in self.kept)
        assert isinstance(total, torch.Tensor)
        return td.set("action", (total % 2).long()).set("told", total)


class KeepsView(Habit):
    """Policy that keeps a view of two numbers."""

    def keep(self, td: TensorDictBase) -> Any:
        """Return a view."""
        return td.get("observation")[..., 1:]


class KeepsArray(Habit):
    """Policy that keeps a NumPy view."""

    def keep(self, td: TensorDictBase) -> Any:
        """Return an array over the tensor's memory."""
        return td.get("observation").numpy()[..., 1:]


class KeepsCapsule(Habit):
    """Policy that keeps an array of another library."""

    def keep(self, td: TensorDictBase) -> Any:
        """Return an array made by DLPack."""
        return np.from_dlpack(td.get("observation"))


class Clamps(Habit):
    """Policy that clamps in place, which has no effect before the fourth step of an episode."""

    def keep(self, td: TensorDictBase) -> Any:
        """Return the clamped observation."""
        return td.get("observation").clamp_(max=3)


class WritesThroughArray(Habit):
    """Policy that changes its input from the sixth call on, undetected by torch."""

    def keep(self, td: TensorDictBase) -> Any:
        """Return a copy of the original values."""
        kept = td.get("observation").clone()
        if self.called > 5:
            td.get("observation").numpy()[:] = -7
            for each in td.values(True, True):
                each.data.zero_()
        return kept


class SpoilsTheLast(Habit):
    """Policy that overwrites the input and the output of its previous call."""

    last: TensorDictBase | None = None

    def leave(self, td: TensorDictBase) -> TensorDictBase:
        """Overwrite the previous output and keep this one."""
        if self.last is not None:
            self.last.apply_(lambda leaf: leaf.fill_(1))
        self.last = td
        return td

    def keep(self, td: TensorDictBase) -> Any:
        """Return a copy."""
        return td.get("observation").clone()


class Deletes(Habit):
    """Policy that deletes its input."""

    def leave(self, td: TensorDictBase) -> TensorDictBase:
        """Return the output without the observation."""
        return td.exclude("observation", inplace=True)


class Replaces(Habit):
    """Policy that replaces the observation in its input."""

    def leave(self, td: TensorDictBase) -> TensorDictBase:
        """Return the output with a different observation."""
        return td.set("observation", torch.full_like(td.get("observation"), -1))


class ReturnsAnother(Habit):
    """Policy that returns its own TensorDict, whose tensors it reuses."""

    def leave(self, td: TensorDictBase) -> TensorDictBase:
        """Return the same tensors each time."""
        if not hasattr(self, "mine"):
            self.mine = td.select("action", "told").clone()
        self.mine["action"].copy_(td["action"])
        self.mine["told"].copy_(td["told"])
        return self.mine


HABITS = [
    Habit,
    KeepsTensorDict,
    KeepsView,
    KeepsArray,
    KeepsCapsule,
    Clamps,
    WritesThroughArray,
    SpoilsTheLast,
    Deletes,
    Replaces,
    ReturnsAnother,
]


# --- environments -------------------------------------------------------------------------------


def vec(mode: AutoresetMode) -> GymnasiumVectorEnv:
    return GymnasiumVectorEnv(make_oracle_vec(2, PLAIN, mode=mode, ends="mixed"))


def transformed() -> EnvBase:
    base = OracleTorchEnv(2, PLAIN, ends="mixed")
    frames = CatFrames(N=2, dim=-1, in_keys=["observation"], out_keys=["two"])
    return TransformedEnv(base, Compose(InitTracker(), StepCounter(), frames))


DRIVERS: dict[str, Callable[[], Any]] = {
    **{mode.value: partial(vec, mode) for mode in AutoresetMode},
    "native": lambda: OracleVectorEnv(2, PLAIN, ends="mixed"),
    "torch": lambda: OracleTorchEnv(2, PLAIN, ends="mixed"),
    "one-lane": lambda: OracleTorchEnv(None, PLAIN, ends="mixed"),
    "serial": lambda: SerialEnv(
        2, [partial(OracleTorchEnv, None, PLAIN, first_lane=lane, ends="mixed") for lane in (0, 1)]
    ),
    "transformed": transformed,
}


@pytest.mark.parametrize(
    ("habit", "driver"),
    in_gate(HABITS, [name for name in DRIVERS if name not in ("serial", SAME)]),
    ids=lambda each: getattr(each, "__name__", each),
)
def test_its_changes_to_its_input_change_no_row(habit: Any, driver: str) -> None:
    budget: dict[str, Any] = {"frames_per_batch": 2, "total_frames": 32, "seed": 0}
    rows = joined(collect(DRIVERS[driver](), habit(), **budget)[0])
    check_rows(rows, PLAIN, ends="mixed", from_start=True)
    careful = joined(collect(DRIVERS[driver](), habit(careful=True), **budget)[0])
    assert_same(rows, careful)


@pytest.mark.parametrize(("driver", "slots"), [*((name, 1) for name in DRIVERS), (DISABLED, 7)])
def test_two_hundred_kept_observations_are_those_of_the_rows(driver: str, slots: int) -> None:
    kept: list[torch.Tensor] = []

    def keeping(td: TensorDictBase) -> TensorDictBase:
        kept.append(td["observation"])
        return ByObservation()(td)

    lanes = 1 if driver == "one-lane" else 2
    collected, collector = collect(
        DRIVERS[driver](), keeping, frames_per_batch=slots * lanes, total_frames=200 * lanes
    )
    rows = joined(collected)
    assert len(kept) > 200  # includes the trial and reset slots
    seen = torch.cat([each.reshape(lanes, 3) for each in kept[1:]]).tolist()
    assert len(seen) == collector.ledger.slots
    # A reset slot shows the final observation. Without those, compare slot by slot.
    order = [tuple(row) for row in seen]
    of_rows = [tuple(row) for row in rows["observation"].tolist()]
    assert sorted(of_rows) == sorted(set(order) & set(of_rows))
    if collector.ledger.reset_slots == 0:
        assert sorted(order)[: len(of_rows)] == sorted(of_rows)


@pytest.mark.parametrize("workers_mode", ["sync", "async"])
def test_through_workers(workers_mode: str) -> None:
    budget: dict[str, Any] = {"frames_per_batch": LANES, "total_frames": 100, "seed": 0}
    for source, habit in ((DISABLED, SpoilsTheLast), (NEXT, Clamps), ("torch", KeepsArray)):
        with in_threads():
            found = [
                joined(
                    collect_all(
                        worker_collector(source, 1, habit(each), mode=workers_mode, **budget)
                    ).batches
                )
                for each in (False, True)
            ]
        check_rows(found[0], LENGTHS, ends="mixed")
        assert_same(*found)


# --- between policy and environment -------------------------------------------------------------


class Echo(EnvBase):
    """Environment that observes the last action and keeps all actions.

    If `scribbles` is True, it overwrites an action after reading it.
    """

    def __init__(self, scribbles: bool = False) -> None:
        super().__init__(device="cpu", batch_size=torch.Size([2]))
        self.scribbles = scribbles
        self.observation_spec = Composite(echo=Unbounded((2, 3)), shape=(2,))
        self.action_spec = Unbounded((2, 3))
        self.reward_spec = Unbounded((2, 1))
        flag = Categorical(2, shape=(2, 1), dtype=torch.bool)
        self.full_done_spec = Composite(done=flag, terminated=flag.clone(), shape=(2,))
        self.executed: list[list[list[float]]] = []

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        return TensorDict({"echo": torch.zeros(2, 3)}, [2])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = tensordict["action"]
        self.executed.append(action.tolist())
        reward = action.sum(-1, keepdim=True)
        echo = action.clone() if self.scribbles else action
        if self.scribbles:
            action.fill_(-9)
        still = torch.zeros(2, 1, dtype=torch.bool)
        return TensorDict(
            {"echo": echo, "reward": reward, "done": still, "terminated": still.clone()}, [2]
        )

    def _set_seed(self, seed: int | None) -> None:
        pass


class Counts(TensorDictModuleBase):
    """Policy whose action is the number of the call, in one reused tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["echo"], ["action"]
        self.mine, self.called = torch.zeros(2, 3), 0

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write the number of the call."""
        self.called += 1
        return td.set("action", self.mine.fill_(self.called))


@pytest.mark.parametrize("frames", [2, 20])
@pytest.mark.parametrize("scribbles", [False, True])
@pytest.mark.parametrize("random", [False, True])
def test_actions_are_those_that_were_chosen(frames: int, scribbles: bool, random: bool) -> None:
    env = Echo(scribbles)
    batches, _ = collect(
        env, None if random else Counts(), frames_per_batch=frames, total_frames=40, layout="lanes"
    )
    action = torch.cat([batch["action"] for batch in batches], 1)
    assert action.transpose(0, 1).tolist() == env.executed[-20:]
    if not random:
        assert torch.equal(action[0, :, 0], torch.arange(1.0, 21))
    assert torch.equal(torch.cat([b["next", "echo"] for b in batches], 1), action)
    assert torch.equal(torch.cat([b["echo"] for b in batches], 1)[:, 1:], action[:, :-1])


def test_an_environment_gets_states_as_the_policy_first_wrote_them() -> None:
    primer = TensorDictPrimer({"memory": Unbounded((1,))}, expand_specs=True)
    env = TransformedEnv(OracleTorchEnv(2, PLAIN, ends="mixed"), Compose(InitTracker(), primer))
    mine: list[torch.Tensor] = []

    def counting(td: TensorDictBase) -> TensorDictBase:
        for old in mine:
            old.fill_(99)
        mine[:] = [td["memory"] + 1]
        return ByObservation()(td).set(("next", "memory"), mine[0])

    rows = joined(collect(env, counting, frames_per_batch=2, total_frames=60)[0])
    assert torch.equal(rows["memory"].view(-1), rows["collector", "step"].float())
    assert torch.equal(rows["next", "memory"], rows["memory"] + 1)


class Masked(OracleTorchEnv):
    """Oracle in which only action lane % 2 is legal."""

    def __init__(self) -> None:
        super().__init__(2, PLAIN, kind="dict", ends="mixed")
        self.observation_spec["action_mask"] = Binary(2, (2, 2), dtype=torch.bool)

    def _out(self, *args: Any) -> Any:
        return super()._out(*args).set("action_mask", torch.eye(2, dtype=torch.bool))


def test_nested_observations_and_masks_are_its_own_too() -> None:
    def spoiling(td: TensorDictBase) -> TensorDictBase:
        leaves = [td["pos"], td["img"], td["inner", "code"]]
        action = act(leaves, "discrete", td.batch_size)
        legal = td["action_mask"].to(torch.int64).argmax(-1)
        for leaf in td.values(True, True):
            leaf.zero_()
        td["inner"].clear()
        return td.set("action", legal + 0 * action)

    rows = joined(
        collect(Masked(), spoiling, frames_per_batch=2, total_frames=60, init_random_frames=11)[0]
    )
    check_rows(rows, PLAIN, kind="dict", ends="mixed", from_start=True)
    assert torch.equal(rows["action"], rows["collector", "lane"].long())
    assert rows["action_mask"].any(-1).all()


def test_random_actions_leave_no_key_in_what_a_policy_is_given() -> None:
    given: set[str] = set()

    def looking(td: TensorDictBase) -> TensorDictBase:
        given.update(td.keys())
        return td.set("action", td["action_mask"].to(torch.int64).argmax(-1))

    collect(MaskedVector(), looking, frames_per_batch=2, total_frames=20, init_random_frames=7)
    assert given >= {"pos", "action_mask"}
    assert "action" not in given


class MaskedVector(OracleVectorEnv):
    """Vector whose observations contain a mask that allows every action."""

    def __init__(self) -> None:
        from gymnasium import spaces
        from gymnasium.vector.utils import batch_space

        super().__init__(2, PLAIN, ends="mixed")
        self.single_observation_space = spaces.Dict(
            {"pos": self.single_observation_space, "action_mask": spaces.MultiBinary(2)}
        )
        self.observation_space = batch_space(self.single_observation_space, 2)

    def _gather(self, observations: list[Any]) -> Any:
        pos = np.stack(observations)
        return {"pos": pos, "action_mask": np.ones((2, 2), np.int8)}


# --- copies -------------------------------------------------------------------------------------


def memory(td: TensorDictBase) -> dict[int, torch.Tensor]:
    """Return the leaves by the address of their memory, and thus keep them alive."""
    return {leaf.untyped_storage().data_ptr(): leaf for leaf in td.values(True, True)}


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_a_copy_shares_no_memory_and_is_alike(lazy: bool, device: Any) -> None:
    inner = TensorDict({"x": torch.arange(12).view(2, 3, 2).transpose(0, 1).float()}, [3, 2])
    td: TensorDictBase = TensorDict(
        {"a": torch.zeros(1, 5).expand(3, 5), "in": inner, "empty": TensorDict({}, [3])},
        [3],
        device=device,
    )
    if lazy:
        td = LazyStackedTensorDict(*td.unbind(0), stack_dim=0)
    td.set_non_tensor("name", "x")
    td.names = ["lane"]
    copies = [own_tensors(td), own_tensors_on(td, torch.device("cpu"))]
    for copy in copies:
        assert not memory(copy).keys() & memory(td).keys()
        assert type(copy) is type(td)
        assert copy["name"] == td["name"]
        assert copy.batch_size == td.batch_size
        assert copy["in"].batch_size == (3, 2)
        assert copy.names == td.names
        assert_same(copy, td)
        copy["in"].set("new", torch.zeros(3, 2))
        copy.set("new", torch.zeros(3))
    assert "new" not in td.keys()
    assert "new" not in td["in"].keys()
    assert copies[0].device == td.device
    assert copies[1].device == torch.device("cpu")
