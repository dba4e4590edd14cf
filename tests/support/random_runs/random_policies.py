"""Policies with every habit. All choose actions by the bytes of observations, lane by lane."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from tensordict.nn import TensorDictSequential as Sequential
from torch import nn
from torchrl.modules import GRUModule, LSTMModule

from random_lanes import LaneKind, injected
from random_networks import network_policy
from random_spaces import Key, acted, numbers_of

Habit = Literal[
    "", "new", "select", "writes", "fills", "replaces", "deletes", "keeps", "keeps td", "raises"
]


@dataclass(frozen=True)
class PolicyKind:
    """Behaviour of a policy. None in its place draws random actions."""

    habit: Habit = ""
    since: int = 1
    """The first call at which the policy shows its habit."""
    memory: int = 3
    """Number of calls between an observation and the action for it."""
    copies: bool = False
    """Whether it keeps copies, and does everything else to copies."""
    extra: tuple[str, ...] = ()
    """Additional columns that the policy writes."""
    module: bool = True
    recurrent: bool = False
    lstm: bool = False
    """Whether the recurrent policy is an LSTM."""
    network: bool = False
    """Whether it is a `TensorDictModule` around a network of tensors."""
    stops: bool = False
    """True if the exception is `StopIteration`."""
    change: str = ""
    """The change to it in the phase "change" (`random_networks.CHANGES`)."""

    def clean(self) -> PolicyKind:
        """Return the same policy without side effects on its inputs."""
        if self.habit in ("keeps", "keeps td"):
            return PolicyKind("keeps", self.since, self.memory, True, self.extra)
        kept = {"recurrent": self.recurrent, "lstm": self.lstm, "network": self.network}
        return PolicyKind(extra=self.extra, **kept)


class ActsByBytes(TensorDictModuleBase):
    """The policy of a :class:`PolicyKind`."""

    def __init__(self, kind: PolicyKind, lane: LaneKind, keys: tuple[Key, ...]) -> None:
        super().__init__()
        self.kind, self.space, self.keys = kind, lane.action_space(), keys
        self.masked = lane.masked
        self.action_key: Key = ("agents", "action") if lane.agents else ("action",)
        self.in_keys = list(keys)
        self.out_keys = [self.action_key, *map(_extra_key, kind.extra)]
        self.calls = 0
        self.kept: deque[Any] = deque(maxlen=kind.memory)

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write the action, and act according to the habit."""
        self.calls += 1
        kind, lanes = self.kind, td.batch_size
        has_habit = self.calls >= kind.since
        if kind.habit == "raises" and has_habit:
            raise injected(f"call {self.calls} of the policy", kind.stops)
        seen = self._seen(td)
        numbers = numbers_of([np.asarray(each.cpu()) for each in seen], len(lanes))
        masks = np.array(td.get("action_mask").cpu()) if self.masked else None
        if masks is not None and not lanes:
            masks = masks[None]
        action = torch.from_numpy(acted(self.space, numbers, masks))
        out = TensorDict({}, lanes) if kind.habit == "new" else td
        if kind.copies and kind.habit != "new":
            out = td.copy()
        if has_habit:
            out = self._habit(td, out)
        device = seen[0].device
        out.set(self.action_key, action.reshape((*lanes, *action.shape[1:])).to(device))
        for name in kind.extra:
            out.set(_extra_key(name), extra_of(numbers, name).reshape((*lanes, 2)).to(device))
        return out

    def _seen(self, td: TensorDictBase) -> list[torch.Tensor]:
        now = [td.get(key) for key in self.keys]
        if self.kind.habit == "keeps":
            self.kept.append([each.clone() for each in now] if self.kind.copies else now)
            return list(self.kept[0])
        if self.kind.habit == "keeps td":
            self.kept.append(td)
            return [self.kept[0].get(key) for key in self.keys]
        return now

    def _habit(self, td: TensorDictBase, out: TensorDictBase) -> TensorDictBase:
        habit = self.kind.habit
        if habit == "select":
            return td.select(*self.keys[:1])
        for key in self.keys:
            value = td.get(key)
            if habit == "writes":
                if value.dtype is torch.bool:
                    value.logical_not_()
                else:
                    value.clamp_(0 if value.dtype is torch.uint8 else -1, 1)
            elif habit == "fills":
                value.numpy()[...] = 1
            elif habit == "replaces":
                out.set(key, torch.ones_like(value))
        if habit == "deletes":
            out.del_(self.keys[0])
        return out


def extra_of(numbers: Any, name: str) -> torch.Tensor:
    """Return an additional column ``[row, 2]``."""
    dtype = torch.float64 if name == "deep" else torch.int32
    each = np.stack([numbers % 1000, numbers % 77], -1).astype(np.int64)
    return torch.from_numpy(each).to(dtype)


def _extra_key(name: str) -> Key:
    return ("deep", "down", "told") if name == "deep" else (name,)


class _Argmax(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[..., : self.count].argmax(-1)


def recurrent_module(size: int, *, lstm: bool) -> Any:
    """Return the recurrent part of a policy, always with the same weights."""
    torch.manual_seed(1)
    states = ["state", "cell"] if lstm else ["state"]
    return (LSTMModule if lstm else GRUModule)(
        input_size=size,
        hidden_size=4,
        in_keys=["observation", *states],
        out_keys=["hid", *(("next", name) for name in states)],
    )


def _recurrent(space: gym.Space[Any], size: int, *, lstm: bool) -> Sequential:
    assert isinstance(space, gym.spaces.Discrete)
    choose = TensorDictModule(_Argmax(int(space.n)), in_keys=["hid"], out_keys=["action"])
    return Sequential(recurrent_module(size, lstm=lstm), choose)


def make_policy(kind: PolicyKind | None, lane: LaneKind, keys: tuple[Key, ...]) -> Any:
    """Return the policy, a module or a plain function."""
    if kind is None:
        return None
    if kind.recurrent:
        size = int(np.prod(lane.observation_space().shape))
        return _recurrent(lane.action_space(), size, lstm=kind.lstm)
    if kind.network:
        return network_policy(lane.action_space(), keys)
    policy = ActsByBytes(kind, lane, keys)
    return policy if kind.module else policy.forward
