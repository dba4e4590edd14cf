"""The probe finds environments that return the same memory from each call, and leaves no trace."""

from __future__ import annotations

import random
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from tensordict import LazyStackedTensorDict, TensorDict
from torchrl.envs import StepCounter, TransformedEnv

from tallyroll.collector import GymnasiumVectorEnv
from tallyroll.collector.envs.probes.probe import Call, Child, overwrites, refuse_reused
from tallyroll.collector.envs.probes.reuse import contents, share_memory, sharing
from tallyroll.collector.envs.probes.trial_env import distinct, throwaway
from tallyroll.collector.envs.setup.step_then_reset import SplitStep, splits, way_of

from collect_kit import LENGTHS
from oracles import OracleEnv
from reusing_kit import OneCall, one, parallel, plain

SAME = AutoresetMode.SAME_STEP


# --- the probe ------------------------------------------------------------------------------------


class Drawing(OracleEnv):
    """Oracle that advances every global generator and counts its open instances."""

    open: ClassVar[int] = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        type(self).open += 1

    def step(self, action: Any) -> Any:
        """Draw random numbers and step."""
        random.random(), np.random.rand(), torch.rand(())
        return super().step(action)

    def close(self) -> None:
        """Count one open instance fewer."""
        type(self).open -= 1


def test_a_probe_leaves_no_trace() -> None:
    vector = SyncVectorEnv([partial(Drawing, 0, LENGTHS)] * 2, autoreset_mode=SAME)
    before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    env = GymnasiumVectorEnv(vector)  # TorchRL closes an environment without references
    refuse_reused(env)
    assert random.getstate() == before[0]
    assert (np.random.get_state()[1] == before[1]).all()
    assert torch.equal(torch.get_rng_state(), before[2])
    assert Drawing.open == 2
    assert [lane.resets_done for lane in vector.envs] == [0, 0]
    env.close()


class Failing(OracleEnv):
    """Oracle that cannot be stepped by the probe."""

    def step(self, action: Any) -> Any:
        """Fail."""
        raise KeyError("no such port")


def test_a_probe_that_fails_says_so_where_nothing_else_looks() -> None:
    lanes = [partial(Failing, 0, LENGTHS)]
    refuse_reused(GymnasiumVectorEnv(SyncVectorEnv(lanes, autoreset_mode=SAME)))
    vector = GymnasiumVectorEnv(AsyncVectorEnv(lanes, autoreset_mode=SAME, context="fork"))
    with pytest.warns(UserWarning, match="no such port.*final observations are lost"):
        refuse_reused(vector)
    vector.close()


def child(steps: list[Any], resets: list[Any], *, ends: int = 10**9) -> Child:
    """Return a child that returns these arrays in turn.

    It fills each array with a number that it never used before.
    """
    calls = {"step": 0, "reset": 0, "all": 0}

    def call(kind: str, arrays: list[Any]) -> Call:
        array = arrays[calls[kind] % len(arrays)]
        calls[kind] += 1
        calls["all"] += 1
        array = np.zeros(3) if array is None else array
        array[:] = calls["all"]
        return Call(array, array, ended=kind == "step" and calls["step"] % ends == 0)

    return Child(partial(call, "reset", resets), partial(call, "step", steps))


def test_only_a_reset_does_harm() -> None:
    a, b = np.zeros(3), np.zeros(3)
    for ends in (1, 2, 5, 10**9):
        assert overwrites(child([a], [a], ends=ends))
        assert overwrites(child([a, b], [b], ends=ends))
        assert not overwrites(child([a], [None], ends=ends))
        assert not overwrites(child([None], [a], ends=ends))
        assert not overwrites(child([a], [b], ends=ends))
        assert not overwrites(child([None], [None], ends=ends))


def test_one_factory_of_each_kind_is_tried() -> None:
    made = [lambda lane=lane: lane for lane in range(3)]
    ones = [
        partial(one, *args)
        for args in ((None, "float", 1), ("all", "float", 2), ("all", "float", 3))
    ]
    assert distinct([*made, *ones]) == [0, 3, 4]
    assert distinct([one] * 3, [{"reuse": None}, {"reuse": "all"}, {"reuse": None}]) == [0, 1]


def test_a_throwaway_is_closed_whatever_happens() -> None:
    env = plain(None)
    with pytest.raises(KeyError), throwaway(lambda: env):
        raise KeyError
    assert env.is_closed


# --- memory ---------------------------------------------------------------------------------------


def test_values_that_share_memory() -> None:
    array, tensor = np.zeros((4, 6)), torch.zeros(4, 6, dtype=torch.bfloat16)
    for whole in (array, tensor, torch.zeros(4, 6, dtype=torch.float8_e5m2)):
        assert share_memory(whole, whole[2:])
        assert not share_memory(whole[:2], whole[2:])
        assert not share_memory(whole[:, :3], whole[:, 3:])
        assert share_memory(whole[:, :4], whole[:, 3:])
        assert not share_memory(whole[:0], whole)
        assert share_memory({"a": [whole]}, (whole[0], 3))
    assert share_memory(torch.from_numpy(array), array)
    assert not share_memory(tensor, tensor.clone())
    assert not share_memory(np.float64(1), np.float64(1))
    assert not share_memory(1, None)


def test_containers_are_memory_too() -> None:
    held: Any
    for held in ({}, [], TensorDict({}, [])):
        assert share_memory(held, held)
    assert not share_memory((), ())
    td = TensorDict({"a": {"b": torch.zeros(2)}}, [])
    assert share_memory(td, td["a", "b"])
    assert share_memory(td["a"], td)
    stacked = LazyStackedTensorDict.lazy_stack([td, td.clone()])
    assert share_memory(stacked, td["a", "b"])
    assert not share_memory(stacked, td["a", "b"].clone())


def test_which_of_many_share_memory() -> None:
    big = np.zeros((8, 4))
    assert sharing([*big]) is None
    assert sharing([*big.T]) is None
    assert sharing([{"a": row} for row in (*big, big[5, 1:3])]) == (5, 8)
    assert sharing([3, 3, None]) is None


def test_contents_are_copies() -> None:
    value = {"a": np.arange(3), "b": (torch.ones(2, dtype=torch.bfloat16), 3)}
    before = contents(value)
    assert contents(value) == before
    value["b"][0][0] = 2  # type: ignore[index]
    assert contents(value) != before


# --- ways to take a step --------------------------------------------------------------------------


def test_which_environments_split() -> None:
    env = plain(None)
    assert splits(env)
    assert splits(TransformedEnv(env))
    assert not splits(OneCall(3, LENGTHS))
    assert not splits(parallel(None))
    env.__dict__["_compiled_step_and_maybe_reset"] = env.step_and_maybe_reset
    assert not splits(env)


def test_copies_are_made_only_where_they_are_needed() -> None:
    """Once copies prove unnecessary, the environment gets back the values that it returned."""
    for habit, needed in ((None, False), ("all", True)):
        env = TransformedEnv(plain(habit), StepCounter())
        way = way_of(env)
        assert isinstance(way, SplitStep)
        td = way.begin(env.reset())
        for _ in range(20):
            stepped, td = way(env.rand_action(td), lambda td: None)
        ended = bool(stepped["next", "done"].any())
        after = stepped["next", "observation"]
        assert ended or share_memory(after, td["observation"]) != needed
