"""Environments and policies of `gpu_check.py`, whose rows can be checked on any device.

Observations encode lane, episode, step and sum of actions, and `check_rows` derives each row from
its observation. All values are whole numbers, so every device has the same results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.data import Binary, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from tallyroll.collector.envs import Declares, Step, System

if TYPE_CHECKING:
    from collections.abc import Sequence

ACTIONS = 3
FLAGS = ("done", "terminated", "truncated")


def length_of(lane: Any, episode: Any) -> Any:
    """Return the length of an episode, from 1 to 9 steps."""
    return 1 + (7 * lane + 5 * episode) % 9


class Lanes:
    """The state [lane, 4] of all lanes: lane, episode, step and sum of actions."""

    def __init__(self, lanes: int, device: str, first: int) -> None:
        self.state = torch.zeros(lanes, 4, dtype=torch.int64)
        self.state[:, 0] = torch.arange(first, first + lanes)
        self.state = self.state.to(device)
        self.over = torch.zeros_like(self.state[:, 0], dtype=torch.bool)

    def begin(self, lanes: torch.Tensor | None = None) -> None:
        """Begin the next episode of all lanes or of a mask, if the present one has steps."""
        lane, episode, step, _ = self.state.unbind(-1)
        stepped = step > 0 if lanes is None else (step > 0) & lanes
        following = torch.stack([lane, episode + 1, step * 0, step * 0], -1)
        self.state = torch.where(stepped.unsqueeze(-1), following, self.state)
        self.over = self.over & ~stepped

    def to(self, device: torch.device) -> None:
        """Move the state to ``device``."""
        self.state, self.over = self.state.to(device), self.over.to(device)

    def advance(self, action: torch.Tensor, lanes: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Step some lanes. Return reward, terminated and truncated, [lane]."""
        lane, episode, step, total = self.state.unbind(-1)
        action = action.reshape(-1).to(torch.int64)
        following = torch.stack([lane, episode, step + 1, total + action], -1)
        self.state = torch.where(lanes.unsqueeze(-1), following, self.state)
        ends = lanes & (step + 1 >= length_of(lane, episode))
        self.over = self.over | ends
        reward = torch.where(lanes, step + 1 + action / 4, 0.0)
        return reward, ends & (episode % 2 == 0), ends & (episode % 2 == 1)

    def observed(self) -> list[torch.Tensor]:
        """Return the observations: the state as float32, and a code uint8 [lane, 2, 2]."""
        code = self.state.sum(-1).remainder(256).to(torch.uint8)
        return [self.state.to(torch.float32), code[:, None, None].expand(-1, 2, 2).contiguous()]


KEYS = ("observation", ("nested", "code"))


class TensorEnv(EnvBase):
    """TorchRL environment whose lanes are reset by a mask."""

    def __init__(self, lanes: int, device: str = "cpu", first: int = 0) -> None:
        super().__init__(device=torch.device(device), batch_size=torch.Size([lanes]))
        on: dict[str, Any] = {"device": self.device}
        code = Composite(
            code=Unbounded((lanes, 2, 2), dtype=torch.uint8, **on), shape=(lanes,), **on
        )
        self.observation_spec = Composite(
            observation=Unbounded((lanes, 4), **on), nested=code, shape=(lanes,), **on
        )
        self.action_spec = Categorical(ACTIONS, shape=(lanes,), **on)
        self.reward_spec = Unbounded((lanes, 1), **on)
        flag = Binary(1, shape=(lanes, 1), dtype=torch.bool, **on)
        self.done_spec = Composite(dict.fromkeys(FLAGS, flag), shape=(lanes,), **on)
        self.lanes = Lanes(lanes, device, first)

    def _set_seed(self, seed: int | None) -> None:
        """Ignore the seed, because nothing is random."""

    def _observed(self) -> TensorDict:
        found = TensorDict({}, self.batch_size, device=self.device)
        for key, value in zip(KEYS, self.lanes.observed(), strict=True):
            found[key] = value
        return found

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        self.lanes.to(self.device)  # the environment may have been moved
        some = td is not None and "_reset" in td.keys()
        self.lanes.begin(td["_reset"].view(-1) if some else None)
        found, over = self._observed(), torch.zeros_like(self.lanes.over).unsqueeze(-1)
        return found.update({name: over.clone() for name in FLAGS})

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        every = torch.ones_like(self.lanes.over)
        reward, *ends = self.lanes.advance(td["action"], every)
        terminated, truncated = (each.unsqueeze(-1) for each in ends)
        flags = dict(zip(FLAGS, (terminated | truncated, terminated, truncated), strict=True))
        return self._observed().update({"reward": reward.unsqueeze(-1), **flags})


class TensorSystem(System):
    """Environment system that takes and returns tensors on a device."""

    rest: ClassVar[dict[str, Any]] = {"at_end": "final"}

    def __init__(self, lanes: int, device: str = "cpu") -> None:
        self.lanes = Lanes(lanes, device, 0)
        code = Unbounded((2, 2), dtype=torch.uint8)
        self.declares = Declares(
            lanes=lanes,
            observation={("observation",): Unbounded((4,)), ("nested", "code"): code},
            action={("action",): Categorical(ACTIONS, shape=(), dtype=torch.int64)},
            device=device,
            **self.rest,
        )

    def reset(self, lanes: Any, seeds: Sequence[int] | None, **options: Any) -> list[Any]:
        """Begin the next episode of the lanes."""
        where = self.lanes.state.device
        self.lanes.begin(None if lanes is None else torch.as_tensor(lanes).to(where))
        return self.lanes.observed()

    def step(self, action: Sequence[Any], lanes: Any = None) -> Step:
        """Step all lanes that have not ended."""
        moved = torch.as_tensor(action[0]).to(self.lanes.state.device)
        return self.ended(*self.lanes.advance(moved, ~self.lanes.over))

    def ended(self, reward: Any, terminated: Any, truncated: Any) -> Step:
        """Return the result of a step in which some lanes ended."""
        return Step(self.lanes.observed(), [reward], terminated, truncated)


class ResetSlotSystem(TensorSystem):
    """System in which the step after an end only resets the lane, as in EnvPool."""

    rest: ClassVar[dict[str, Any]] = {"at_end": "reset_slot", "resets": "all"}

    def step(self, action: Sequence[Any], lanes: Any = None) -> Step:
        """Step the lanes whose episodes go on, and reset the others."""
        over = self.lanes.over
        step = super().step(action)
        self.lanes.begin(over)
        return step._replace(obs=self.lanes.observed(), skipped=over)


class SameStepSystem(TensorSystem):
    """System that resets lanes within the step, and returns final observations separately."""

    rest: ClassVar[dict[str, Any]] = {"at_end": "first", "finals": "extra", "resets": "none"}

    def ended(self, reward: Any, terminated: Any, truncated: Any) -> Step:
        """Return the first observations of the next episodes."""
        final = self.lanes.observed()
        self.lanes.begin(self.lanes.over)
        obs = self.lanes.observed()
        return Step(obs, [reward], terminated, truncated, final=final)


class LostFinalsSystem(SameStepSystem):
    """System that resets lanes within the step and loses final observations, as in Isaac Lab."""

    rest: ClassVar[dict[str, Any]] = {"at_end": "first", "finals": "lost", "resets": "none"}

    def ended(self, reward: Any, terminated: Any, truncated: Any) -> Step:
        """Return the first observations of the next episodes, without the final ones."""
        return super().ended(reward, terminated, truncated)._replace(final=None)


class GymLane(gym.Env[Any, Any]):
    """Gymnasium environment with one lane, on the CPU."""

    def __init__(self, lane: int) -> None:
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = gym.spaces.Discrete(ACTIONS)
        self.lane, self.episode = lane, -1

    def _observed(self) -> Any:
        return np.array([self.lane, self.episode, self.count, self.total], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin the next episode."""
        super().reset(seed=seed)
        self.episode, self.count, self.total = self.episode + 1, 0, 0
        return self._observed(), {}

    def step(self, action: Any) -> Any:
        """Execute an action."""
        self.count, self.total = self.count + 1, self.total + int(action)
        over, odd = self.count >= length_of(self.lane, self.episode), self.episode % 2 == 1
        reward = self.count + int(action) / 4
        return self._observed(), reward, over and not odd, over and odd, {}


def gym_vector(lanes: int, mode: str) -> SyncVectorEnv:
    """Return a Gymnasium vector of `GymLane`, with an autoreset mode such as "NEXT_STEP"."""
    makes = [lambda lane=lane: GymLane(lane) for lane in range(lanes)]
    return SyncVectorEnv(makes, autoreset_mode=AutoresetMode[mode])


# --- policies -------------------------------------------------------------------------------------


class ExactPolicy(TensorDictModuleBase):
    """Policy whose weights are whole numbers, so that every device computes the same values."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["action", "value"]
        weight = torch.tensor([1.0, 3.0, -2.0, 5.0], device=device)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write the action and its value."""
        value = (td["observation"] * self.weight).sum(-1)
        return td.set("action", value.remainder(ACTIONS).long()).set("value", value)


class InPlacePolicy(ExactPolicy):
    """Policy that returns the same tensors in each call, and overwrites its input.

    Captured CUDA graphs do so.
    """

    def __init__(self, device: str, lanes: int) -> None:
        super().__init__(device)
        self.action = torch.zeros(lanes, dtype=torch.int64, device=device)
        self.value = torch.zeros(lanes, device=device)

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write the action and its value."""
        self.value.copy_((td["observation"] * self.weight).sum(-1))
        self.action.copy_(self.value.remainder(ACTIONS))
        td["observation"].fill_(-1)
        return td.set("action", self.action).set("value", self.value)


class Bfloat16Policy(ExactPolicy):
    """Policy with a column of bfloat16, which NumPy does not have."""

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write the action and its value."""
        super().forward(td)
        return td.set("value", td["value"].bfloat16())


class RandomPolicy(ExactPolicy):
    """Policy that draws its actions from the generator of its device."""

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write the action and its value."""
        drawn = torch.randint(ACTIONS, td.batch_size, device=self.weight.device)
        return td.set("action", drawn).set("value", drawn.float())


# --- checks ---------------------------------------------------------------------------------------


def require_equal(name: Any, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise AssertionError unless two tensors are equal. The message names the first bad row."""
    found, expected = found.detach().cpu(), expected.detach().cpu()
    about = [(each.dtype, tuple(each.shape)) for each in (found, expected)]
    if about[0] != about[1]:
        raise AssertionError(f"{name}: expected {about[1]}, got {about[0]}")
    wrong = (found != expected).reshape(len(found), -1).any(-1).nonzero().flatten().tolist()
    if wrong:
        one, other = found[wrong[0]].tolist(), expected[wrong[0]].tolist()
        raise AssertionError(
            f"{name}: {len(wrong)} of {len(found)} rows differ. Row {wrong[0]}: expected {other}, "
            f"got {one}"
        )


def require_same(found: TensorDictBase, expected: TensorDictBase) -> None:
    """Raise AssertionError unless two TensorDicts have the same columns and values."""
    keys = [sorted(map(str, each.keys(True, True))) for each in (found, expected)]
    if keys[0] != keys[1]:
        raise AssertionError(f"columns: expected {keys[1]}, got {keys[0]}")
    for key in expected.keys(True, True):
        require_equal(key, found[key], expected[key])


def check_rows(rows: TensorDictBase, *, gaps: bool = False) -> None:
    """Raise AssertionError unless every row is the transition that its observation encodes.

    Args:
        rows: rows in the order in which they were stored.
        gaps: True if lanes may lack rows, because their surplus was discarded.
    """
    rows = rows.cpu()
    lane, episode, step, total = rows["observation"].long().unbind(-1)
    action = rows["action"].long().reshape(-1)
    over, odd = step + 1 >= length_of(lane, episode), episode % 2 == 1
    require_equal(("collector", "lane"), rows["collector", "lane"].long(), lane)
    if not gaps:  # after a gap, a trajectory begins in the middle of an episode
        require_equal(("collector", "step"), rows["collector", "step"], step)
        check_order(lane, episode, step, over)
    reward = (step + 1 + action / 4).unsqueeze(-1)
    require_equal(("next", "reward"), rows["next", "reward"].float(), reward.float())
    for name, expected in (("terminated", over & ~odd), ("truncated", over & odd)):
        require_equal(("next", name), rows["next", name].squeeze(-1), expected)
    following = torch.stack([lane, episode, step + 1, total + action], -1)
    valid = torch.ones_like(over)
    if ("collector", "next_valid") in rows.keys(True):
        valid = rows["collector", "next_valid"].reshape(-1)
        require_equal(("collector", "next_valid"), valid, ~over)
    found = rows["next", "observation"].long()
    require_equal(("next", "observation"), found[valid], following[valid])
    if "nested" in rows.keys():
        code = rows["observation"].sum(-1).long().remainder(256).to(torch.uint8)
        require_equal(("nested", "code"), rows["nested", "code"][:, 0, 0], code)


def check_order(
    lane: torch.Tensor, episode: torch.Tensor, step: torch.Tensor, over: torch.Tensor
) -> None:
    """Raise AssertionError unless each lane's rows follow each other without a gap."""
    for each in lane.unique().tolist():
        own = lane == each
        episodes, steps, ends = episode[own], step[own], over[own].long()
        name = f"lane {each}"
        require_equal(f"{name}, episodes", episodes[1:], episodes[:-1] + ends[:-1])
        require_equal(f"{name}, steps", steps[1:], (steps[:-1] + 1) * (1 - ends[:-1]))
