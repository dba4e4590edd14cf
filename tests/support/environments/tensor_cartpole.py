"""CartPole in operators of torch alone, for any number of lanes and any device."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.data import Binary, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

FLAGS = ("done", "terminated", "truncated")


class TensorCartPole(EnvBase):
    """CartPole that never waits for its device. It is truncated after ``limit`` steps."""

    def __init__(self, lanes: int = 64, device: str = "cpu", limit: int = 50) -> None:
        super().__init__(device=torch.device(device), batch_size=torch.Size([lanes]))
        one, on = (lanes, 1), {"device": self.device}
        self.limit = limit
        self.observation_spec = Composite(
            observation=Unbounded((lanes, 4), **on),
            age=Unbounded(one, dtype=torch.int64, **on),
            shape=(lanes,),
            **on,
        )
        self.action_spec = Categorical(2, shape=(lanes,), **on)
        self.reward_spec = Unbounded(one, **on)
        flag = Binary(1, shape=one, dtype=torch.bool, **on)
        self.done_spec = Composite(dict.fromkeys(FLAGS, flag), shape=(lanes,), **on)
        self._set_seed(0)

    def _set_seed(self, seed: int | None) -> None:
        # Draw on the host, because generators of devices give other numbers.
        rng = torch.Generator().manual_seed(seed or 0)
        drawn = torch.rand(64, *self.batch_size, 4, generator=rng) * 0.1 - 0.05
        self.starts, self.resets = drawn.to(self.device), 0

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        self.resets += 1
        lanes = self.batch_size[0]
        seen = self.starts[self.resets % len(self.starts)]
        age = torch.zeros(lanes, 1, dtype=torch.int64, device=self.device)
        if td is not None and "_reset" in td.keys():
            mask = td["_reset"].view(lanes, 1)
            last_seen, last_age = self.last
            seen, age = torch.where(mask, seen, last_seen), torch.where(mask, age, last_age)
        self.last = seen, age
        none = torch.zeros(lanes, 1, dtype=torch.bool, device=self.device)
        values = {"observation": seen, "age": age} | {name: none.clone() for name in FLAGS}
        return TensorDict(values, self.batch_size, device=self.device)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        x, speed, angle, turn = td["observation"].unbind(-1)
        force = td["action"].to(torch.float32) * 20 - 10
        push = (force + 0.05 * turn * turn * angle.sin()) / 1.1
        turning = (9.8 * angle.sin() - angle.cos() * push) / (
            0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1)
        )
        gain = push - 0.05 * turning * angle.cos() / 1.1
        seen = torch.stack(
            [x + 0.02 * speed, speed + 0.02 * gain, angle + 0.02 * turn, turn + 0.02 * turning], -1
        )
        age = td["age"] + 1
        self.last = seen, age
        terminated = ((seen[:, 0].abs() > 2.4) | (seen[:, 2].abs() > 0.2095)).unsqueeze(-1)
        truncated = (age >= self.limit) & ~terminated
        values = {
            "observation": seen,
            "age": age,
            "reward": torch.ones_like(seen[:, :1]),
            "terminated": terminated,
            "truncated": truncated,
            "done": terminated | truncated,
        }
        return TensorDict(values, self.batch_size, device=self.device)


class Leaning(TensorDictModuleBase):
    """Policy that pushes in the direction of the pole, with the same results on each device."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["action", "value"]
        self.weight = torch.nn.Parameter(torch.tensor([0.0, 0.0, 1.0, 1.0], device=device))

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write the action and its value."""
        value = (td["observation"] * self.weight).sum(-1)
        return td.set("action", (value > 0).long()).set("value", value)
