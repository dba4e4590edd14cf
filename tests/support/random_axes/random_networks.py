"""Policies with a network in a `TensorDictModule`, and changes to such a policy during a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from random_spaces import Array, Key, acted, numbers_of


class Network(nn.Module):
    """A network whose actions depend on the bytes of each row, offset by ``shift``."""

    def __init__(self, space: gym.Space[Any], shift: int = 0) -> None:
        super().__init__()
        self.space, self.shift = space, shift

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        """Return an action for each row of ``seen``."""
        return self.chosen(seen, self.shift)

    def chosen(self, seen: torch.Tensor, shift: int) -> torch.Tensor:
        """Return the actions with an offset of ``shift``."""
        actions = actions_of(self.space, [np.asarray(seen.cpu())], shift)
        return torch.from_numpy(actions).to(seen.device)


def actions_of(space: gym.Space[Any], columns: list[Array], shift: int) -> Array:
    """Return actions for the rows of ``columns``. A change to the policy offsets them by one."""
    return acted(space, numbers_of(columns) + np.uint64(shift))


def network_policy(space: gym.Space[Any], keys: tuple[Key, ...]) -> TensorDictModule:
    """Return a policy that reads the first of ``keys``."""
    # Each policy gets its own class, because one of the changes replaces a method of the class.
    own = type("OwnNetwork", (Network,), {})
    return TensorDictModule(own(space), in_keys=[keys[0]], out_keys=["action"])


# --- changes --------------------------------------------------------------------------------------


def _further(network: Network, out: Any) -> torch.Tensor:
    seen = out[0] if isinstance(out, tuple) else out
    return network.chosen(seen, 1)


def _forward(policy: Any, keys: tuple[Key, ...]) -> None:
    network = policy.module
    network.forward = partial(network.chosen, shift=1)


def _class_forward(policy: Any, keys: tuple[Key, ...]) -> None:
    type(policy.module).forward = lambda network, seen: network.chosen(seen, 1)


def _hook(policy: Any, keys: tuple[Key, ...]) -> None:
    policy.module.register_forward_hook(lambda network, args, out: _further(network, args))


def _pre_hook(policy: Any, keys: tuple[Key, ...]) -> None:
    def count_up(network: Network, args: Any) -> None:
        network.shift = 1

    policy.module.register_forward_pre_hook(count_up)


def _outer_hook(policy: Any, keys: tuple[Key, ...]) -> None:
    def again(module: Any, args: tuple[TensorDictBase], out: TensorDictBase) -> TensorDictBase:
        return out.set("action", module.module.chosen(out.get(keys[0]), 1))

    policy.register_forward_hook(again)


def _outer_forward(policy: Any, keys: tuple[Key, ...]) -> None:
    def forward(td: TensorDictBase, *args: Any, **kwargs: Any) -> TensorDictBase:
        return td.set("action", policy.module.chosen(td.get(keys[0]), 1))

    policy.forward = forward


def _other_class(policy: Any, keys: tuple[Key, ...]) -> None:
    class Other(TensorDictModule):
        def forward(self, td: TensorDictBase, *args: Any, **kwargs: Any) -> TensorDictBase:
            return td.set("action", self.module.chosen(td.get(keys[0]), 1))

    policy.__class__ = Other


def _module(policy: Any, keys: tuple[Key, ...]) -> None:
    policy.module = Network(policy.module.space, 1)


def _attribute(policy: Any, keys: tuple[Key, ...]) -> None:
    policy.module.shift = 1


def _in_keys(policy: Any, keys: tuple[Key, ...]) -> None:
    policy.in_keys = [keys[-1]]


CHANGES: dict[str, Callable[[Any, tuple[Key, ...]], None]] = {
    "forward": _forward,
    "class": _class_forward,
    "hook": _hook,
    "pre hook": _pre_hook,
    "outer hook": _outer_hook,
    "outer forward": _outer_forward,
    "other class": _other_class,
    "module": _module,
    "attribute": _attribute,
    "in keys": _in_keys,
}


def wanted_after(
    change: str, space: gym.Space[Any], keys: tuple[Key, ...], rows: Any, *, changed: bool
) -> Array:
    """Return the actions for ``rows`` by the original policy, or by the changed one."""
    key = keys[-1] if change == "in keys" and changed else keys[0]
    shift = 1 if changed and change not in ("in keys",) else 0
    return actions_of(space, [rows[key]], shift)
