"""Lanes with several agents, of which every row can be checked, and a plain model of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from oracles import Lengths, how_it_ends, length_of

AGENTS, RED = 2, 3
GROUP = "agents"
DEEP = ("team", "red")


class AgentsEnv(EnvBase):
    """`lanes` lanes (None: batch size []) with a group of two agents and a nested group of three.

    Observations encode lane, episode, step and agent. Agent `a` gets the reward
    `1 + step + 10 * a + 100 * lane`. A lane ends as `oracles.how_it_ends` defines for `"mixed"`.
    If it terminates, all agents of `agents` are done and terminated from step `length - 1 - a` on.
    If it is truncated, only the root's flag is set. Agents of `("team", "red")` never set their own
    done flag.
    """

    def __init__(self, lanes: int | None, lengths: Lengths, *, first_lane: int = 0) -> None:
        shape = () if lanes is None else (lanes,)
        super().__init__(device="cpu", batch_size=torch.Size(shape))
        self.lengths, self.lanes = lengths, lanes or 1
        self.lane_ids = np.arange(first_lane, first_lane + self.lanes)
        self.episode = np.full(self.lanes, -1)
        self.at = np.zeros(self.lanes, np.int64)

        def flags(*inner: int) -> dict[str, Any]:
            flag = Categorical(2, shape=(*shape, *inner, 1), dtype=torch.bool)
            return {name: flag.clone() for name in ("done", "terminated", "truncated")}

        def group(agents: int, **leaves: Any) -> Composite:
            return Composite(leaves, shape=(*shape, agents))

        def nested(agents: Composite, red: Composite) -> dict[str, Any]:
            return {GROUP: agents, "team": Composite(red=red, shape=shape)}

        def observed(agents: int) -> Composite:
            return group(agents, observation=Unbounded((*shape, agents, 4)))

        def rewarded(agents: int) -> Composite:
            return group(agents, reward=Unbounded((*shape, agents, 1)))

        self.observation_spec = Composite(
            nested(observed(AGENTS), observed(RED)),
            time=Unbounded((*shape, 1), dtype=torch.int64),
            shape=shape,
        )
        action = Categorical(3, shape=(*shape, AGENTS))
        self.full_action_spec = Composite({GROUP: group(AGENTS, action=action)}, shape=shape)
        self.full_reward_spec = Composite(nested(rewarded(AGENTS), rewarded(RED)), shape=shape)
        self.full_done_spec = Composite(
            **flags(),
            **nested(group(AGENTS, **flags(AGENTS)), group(RED, **flags(RED))),
            shape=shape,
        )

    def _set_seed(self, seed: int | None) -> None:
        pass

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        mask = np.ones(self.lanes, np.bool_)
        if tensordict is not None and "_reset" in tensordict.keys():
            mask = tensordict["_reset"].reshape(-1).numpy()
        self.episode[mask] += 1
        self.at[mask] = 0
        return self._out(*model(self.lane_ids, self.episode, self.at, self.lengths, started=True))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        assert tensordict[GROUP, "action"].shape == (*self.batch_size, AGENTS)
        out = self._out(*model(self.lane_ids, self.episode, self.at, self.lengths))
        for key, agents in (((GROUP,), AGENTS), (DEEP, RED)):
            reward = reward_of(self.lane_ids, self.at, agents)
            out[(*key, "reward")] = self._shaped(reward)
        self.at += 1
        for key, agents in (((GROUP,), AGENTS), (DEEP, RED)):
            out[(*key, "observation")] = self._shaped(self._told(agents))
        out["time"] = self._shaped(self.at[:, None].copy())
        return out

    def _told(self, agents: int) -> np.ndarray:
        lane, episode, step = (
            np.broadcast_to(each[:, None], (self.lanes, agents))
            for each in (self.lane_ids, self.episode, self.at)
        )
        agent = np.broadcast_to(np.arange(agents), (self.lanes, agents))
        return np.stack([lane, episode, step, agent], -1).astype(np.float32)

    def _out(self, root: dict[str, np.ndarray], own: dict[str, np.ndarray]) -> TensorDict:
        batch = self.batch_size
        out = TensorDict({name: self._shaped(flag) for name, flag in root.items()}, batch)
        agents = {name: self._shaped(flag) for name, flag in own.items()}
        agents["observation"] = self._shaped(self._told(AGENTS))
        out[GROUP] = TensorDict(agents, [*batch, AGENTS])
        red: dict[str, torch.Tensor] = {
            name: torch.zeros((*batch, RED, 1), dtype=torch.bool) for name in own
        }
        red["observation"] = self._shaped(self._told(RED))
        out["team"] = TensorDict({"red": TensorDict(red, [*batch, RED])}, batch)
        out["time"] = self._shaped(self.at[:, None].copy())
        return out

    def _shaped(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.reshape(*self.batch_size, *array.shape[1:]).copy())


def reward_of(lane: np.ndarray, step: np.ndarray, agents: int) -> np.ndarray:
    """Return the rewards [rows, agents, 1] of the transitions that leave `step`."""
    reward = 1 + step[:, None] + 10 * np.arange(agents) + 100 * lane[:, None]
    return reward[..., None].astype(np.float32)


def model(
    lane: np.ndarray,
    episode: np.ndarray,
    step: np.ndarray,
    lengths: Lengths,
    *,
    started: bool = False,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return flags of transitions that leave `step`: root [rows, 1], agents [rows, agents, 1]."""
    pairs = list(zip(lane.tolist(), episode.tolist(), strict=True))
    length = np.array([length_of(lengths, *pair) for pair in pairs])
    ends = np.array([how_it_ends("mixed", *pair) for pair in pairs]).reshape(-1, 2)
    last = (step == length - 1) & (not started)
    root = {"terminated": last & ends[:, 0], "truncated": last & ends[:, 1], "done": last}
    dies = (length - 1)[:, None] - np.arange(AGENTS)
    dead = (step[:, None] >= dies) & ends[:, :1] & (not started)
    own = {"terminated": dead, "truncated": np.zeros_like(dead), "done": dead}
    return {k: v[:, None] for k, v in root.items()}, {k: v[..., None] for k, v in own.items()}


def check_agents(rows: TensorDictBase, lengths: Lengths, *, stored: bool) -> None:
    """Check that every row [n] is a transition of its lane.

    If `stored` is True, the rows have the environment's flags. In yielded rows, every done flag is
    True at the last row of each trajectory.
    """
    told = rows[GROUP, "observation"].numpy()
    lane, episode, step = (told[:, 0, i].astype(np.int64) for i in range(3))
    red = rows[(*DEEP, "observation")].numpy()
    for values, agents in ((told, AGENTS), (red, RED)):
        for i, wanted in enumerate((lane, episode, step)):
            assert np.array_equal(values[..., i], np.repeat(wanted[:, None], agents, 1))
        assert (values[..., 3] == np.arange(agents)).all()
    for key in ((GROUP,), DEEP):
        after = rows[("next", *key, "observation")].numpy() - rows[(*key, "observation")].numpy()
        assert (after == np.array([0, 0, 1, 0])).all()
        reward = rows[("next", *key, "reward")].numpy()
        assert np.array_equal(reward, reward_of(lane, step, reward.shape[1]))
    assert np.array_equal(rows["collector", "lane"], lane)
    assert np.array_equal(rows["collector", "step"], step)
    root, own = model(lane, episode, step, lengths)
    ids = rows["collector", "traj_ids"].numpy()
    marked = np.zeros(len(ids), np.bool_)
    if not stored:
        marked = np.append(ids[1:] != ids[:-1], True)
        cut = marked & ~root["done"][:, 0]
        assert np.array_equal(rows["collector", "cut"], cut)
    none = np.zeros((len(ids), RED, 1), np.bool_)
    for name in ("done", "terminated", "truncated"):
        more = marked if name == "done" else np.zeros_like(marked)
        for key, flags in (((), root[name]), ((GROUP,), own[name]), (DEEP, none)):
            wanted = flags | more.reshape(-1, *(1 for _ in flags.shape[1:]))
            assert np.array_equal(rows[("next", *key, name)], wanted), (key, name)
