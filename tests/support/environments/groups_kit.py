"""Lanes with two groups of acting agents, and masks that mark the living agents."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Binary, Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from oracles import length_of

GROUPS = {"red": 3, "blue": 1}


def alive(lane: int, episode: int, step: int) -> list[bool]:
    """Return which agents of ``red`` are alive. At least one is."""
    return [agent == 0 or (lane + episode * 2 + step + agent) % 3 > 0 for agent in range(3)]


class GroupsEnv(EnvBase):
    """Lanes with two groups of agents, `red` and `blue`.

    `red` has three agents with indices as actions, and a mask. `blue` has one agent, whose actions
    are in a box. Observations encode lane, episode, step and agent. The reward of an agent is the
    sum of its action.
    """

    def __init__(self, lanes: int, lengths: Any, *, first_lane: int = 0) -> None:
        super().__init__(device="cpu", batch_size=torch.Size([lanes]))
        self.lengths, self.lanes, self.first = lengths, lanes, first_lane
        self.episode, self.at = np.full(lanes, -1), np.zeros(lanes, np.int64)

        def groups(**leaves: Any) -> Composite:
            found = {
                name: Composite(leaves["leaf"](name, agents), shape=(lanes, agents))
                for name, agents in GROUPS.items()
            }
            return Composite(found, shape=(lanes,))

        def observed(name: str, agents: int) -> dict[str, Any]:
            mask = {"mask": Binary(agents, (lanes, agents), dtype=torch.bool)}
            return {"observation": Unbounded((lanes, agents, 4))} | (mask if name == "red" else {})

        def acted(name: str, agents: int) -> dict[str, Any]:
            if name == "red":
                return {"action": Categorical(3, shape=(lanes, agents))}
            return {"action": Bounded(-1.0, 1.0, shape=(lanes, agents, 2))}

        def flags(*inner: int) -> dict[str, Any]:
            flag = Categorical(2, shape=(lanes, *inner, 1), dtype=torch.bool)
            return {name: flag.clone() for name in ("done", "terminated", "truncated")}

        self.observation_spec = groups(leaf=observed)
        self.full_action_spec = groups(leaf=acted)
        self.full_reward_spec = groups(
            leaf=lambda _, agents: {"reward": Unbounded((lanes, agents, 1))}
        )
        ends = groups(leaf=lambda _, agents: flags(agents))
        self.full_done_spec = Composite({**flags(), **dict(ends.items())}, shape=(lanes,))

    def _set_seed(self, seed: int | None) -> None:
        pass

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        mask = np.ones(self.lanes, np.bool_)
        if tensordict is not None and "_reset" in tensordict.keys():
            mask = tensordict["_reset"].reshape(-1).numpy()
        self.episode[mask] += 1
        self.at[mask] = 0
        return self._out(np.zeros(self.lanes, np.bool_))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.at += 1
        lanes = range(self.lanes)
        lengths = [
            length_of(self.lengths, self.first + lane, int(self.episode[lane])) for lane in lanes
        ]
        out = self._out(self.at >= np.array(lengths))
        for name, agents in GROUPS.items():
            action = tensordict[name, "action"].float().reshape(self.lanes, agents, -1)
            out[name, "reward"] = action.sum(-1, keepdim=True)
        return out

    def _out(self, ended: np.ndarray) -> TensorDict:
        done = torch.from_numpy(ended.reshape(-1, 1).copy())
        zeros = torch.zeros_like(done)
        out = TensorDict({"done": done, "terminated": done.clone(), "truncated": zeros}, self.lanes)
        for name, agents in GROUPS.items():
            told = [
                [[self.first + lane, self.episode[lane], self.at[lane], at] for at in range(agents)]
                for lane in range(self.lanes)
            ]
            flags = {
                key: value.unsqueeze(-1).expand(-1, agents, 1).clone()
                for key, value in out.items()
                if isinstance(value, torch.Tensor)
            }
            group = TensorDict(flags, [self.lanes, agents])
            group["observation"] = torch.tensor(told, dtype=torch.float32)
            if name == "red":
                living = [alive(*map(int, agents_of[0][:3])) for agents_of in told]
                group["mask"] = torch.tensor(living)
            out[name] = group
        return out


class Told(nn.Module):
    """A policy whose action encodes the step of its observation, so that rows can be checked."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.group, self.weight = group, nn.Parameter(torch.zeros(()))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an action of each agent, and an extra column."""
        step = observation[..., 2]
        action = (
            (step % 3).long() if self.group == "red" else (step[..., None] / 9).expand(-1, 1, 2)
        )
        return action, observation.sum(-1) + 1


def told(group: str) -> TensorDictModule:
    return TensorDictModule(Told(group), in_keys=["observation"], out_keys=["action", "told"])


def version(rows: TensorDictBase, group: str) -> torch.Tensor:
    return rows["collector", "policy_versions", group]


def drawn_of(rows: TensorDictBase) -> dict[str, int]:
    return {group: int((version(rows, group) == -1).sum()) for group in GROUPS}


def check_groups(rows: TensorDictBase) -> None:
    """Check that each non-random action, and its extra column, is that of its policy."""
    lanes = rows["collector", "lane"]
    for group in GROUPS:
        acted, agents = version(rows, group) >= 0, rows[group]
        action, beside = Told(group)(agents["observation"])
        assert torch.equal(agents["action"][acted], action[acted]), group
        if "told" in agents.keys():  # otherwise all actions are random
            assert torch.equal(agents["told"], torch.where(acted[:, None], beside, 0)), group
        for lane in lanes.unique().tolist():
            own = acted[lanes == lane].int()
            assert not (own.diff() < 0).any(), f"lane {lane}: at random after its policy acted"
    wholly = (version(rows, "red") == -1) & (version(rows, "blue") == -1)
    assert torch.equal(rows["collector", "policy_version"] == -1, wholly)


def in_slot_order(rows: TensorDictBase) -> list[int]:
    """Return row indices in the order of slots and lanes, for lanes that advance together."""
    lane = rows["collector", "lane"].numpy()
    slot = np.zeros(len(lane), np.int64)
    for each in np.unique(lane):
        slot[lane == each] = np.arange(int((lane == each).sum()))
    return np.lexsort((lane, slot)).tolist()
