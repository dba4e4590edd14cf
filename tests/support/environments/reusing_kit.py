"""Environments that return the same memory from each call."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase, ParallelEnv

from collect_kit import LENGTHS
from oracles import Kind, OracleTorchEnv

FLAGS = ("done", "terminated", "truncated")


HABITS = {
    "all": lambda key: True,
    "observations": lambda key: key not in (*FLAGS, "reward"),
    "one key": lambda key: key in ("observation", ("inner", "code")),
    "flags": lambda key: key in FLAGS,
    "reward": lambda key: key == "reward",
}
"""Habits, and the keys whose values are in the same memory at each call."""


class Reusing(OracleTorchEnv):
    """An oracle that reuses memory for its values according to `habit` (None: copies)."""

    def __init__(self, *args: Any, habit: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, ends="mixed", **kwargs)
        self.habit, self.calls = habit, 0
        self.memory: dict[Any, torch.Tensor] = {}

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        asked = None if tensordict is None else tensordict.get("_reset", None)
        return self._placed(super()._reset(tensordict), reset=True, asked=asked)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._placed(super()._step(tensordict), reset=False, asked=None)

    def _placed(self, out: Any, *, reset: bool, asked: torch.Tensor | None) -> TensorDictBase:
        self.calls += 1
        habit = self.habit
        if habit is None or (habit == "resets" and not reset):
            return out
        reused = HABITS.get(habit, HABITS["observations"])
        for key in [key for key in out.keys(True, True) if reused(key)]:
            value = out.get(key)
            place = self._place(key, value)
            if habit == "nonsense" and asked is not None:
                place.fill_(7)
                place[asked.reshape(self.batch_size)] = value[asked.reshape(self.batch_size)]
            else:
                place.copy_(value)
            out.set(key, place.clone() if habit == "after resets" and not reset else place)
        return out

    def _place(self, key: Any, value: torch.Tensor) -> torch.Tensor:
        name = (key, self.calls % 2 if self.habit == "in turn" else 0)
        if name not in self.memory:
            views = torch.zeros((*value.shape, 3), dtype=value.dtype)
            self.memory[name] = views[..., 1] if self.habit == "views" else views[..., 1].clone()
        return self.memory[name]


def plain(habit: str | None, kind: Kind = "float") -> EnvBase:
    return Reusing(3, LENGTHS, kind=kind, habit=habit)


def one(habit: str | None, kind: Kind = "float", lane: int = 0) -> EnvBase:
    return Reusing(None, LENGTHS, kind=kind, habit=habit, first_lane=lane)


def parallel(habit: str | None, kind: Kind = "float") -> EnvBase:
    lanes = [partial(one, habit, kind, lane) for lane in range(2)]
    return ParallelEnv(2, lanes, mp_start_method="fork")


class OneCall(Reusing):
    """A reusing environment that defines its own step_and_maybe_reset."""

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> Any:
        """Step, and reset the lanes that are done."""
        return super().step_and_maybe_reset(tensordict)
