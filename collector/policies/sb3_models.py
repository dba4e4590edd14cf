"""Adapter for trained Stable-Baselines3 models, which choose actions with ``predict``."""

import inspect
import sys
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.envs.utils import ExplorationType, exploration_type

from tallyroll.collector.errors import PolicyError
from tallyroll.collector.policies.random_actions import MASK_NAME

_BASES = {"base_class": "BaseAlgorithm", "policies": "BasePolicy"}
_DETERMINISTIC = {ExplorationType.MODE, ExplorationType.MEAN, ExplorationType.DETERMINISTIC}


def as_policy(policy: Any) -> Any:
    """Return ``policy``, or an adapter if it is a model of Stable-Baselines3.

    Raises:
        PolicyError: the model is recurrent.
    """
    for name, base in _BASES.items():
        # If the package was not imported, the policy cannot be one of its models.
        module = sys.modules.get(f"stable_baselines3.common.{name}")
        if module is not None and isinstance(policy, getattr(module, base)):
            return Sb3Policy(policy)
    return policy


class Sb3Policy(TensorDictModuleBase):
    """Policy that acts with a model of Stable-Baselines3 and shares its weights.

    It reads ``"observation"``, or the keys of a Dict space, and writes ``"action"``. It is
    deterministic under the exploration types MODE, MEAN and DETERMINISTIC. The random actions of a
    DQN are drawn lane by lane from torch's generator, so that a seed repeats them.

    Args:
        model: a ``BaseAlgorithm`` or a ``BasePolicy``.

    Raises:
        PolicyError: the model is recurrent.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.policy = getattr(model, "policy", model)
        self.epsilon = float(getattr(model, "exploration_rate", 0.0))
        if hasattr(self.policy, "lstm_actor"):
            raise PolicyError(
                f"policy: {type(model).__name__} is recurrent, and Tallyroll cannot carry its "
                "states through predict. Use a recurrent TensorDictModule."
            )
        space = self.policy.observation_space
        self._composite = isinstance(space, spaces.Dict)
        self._masked = "action_masks" in inspect.signature(self.policy.predict).parameters
        self.in_keys = [*space] if self._composite else ["observation"]
        self.out_keys = ["action"]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the chosen action to ``"action"``."""
        seen = {name: tensordict.get(name).cpu().numpy() for name in self.in_keys}
        more = {"action_masks": tensordict.get(MASK_NAME).cpu().numpy()} if self._masked else {}
        observation = seen if self._composite else seen["observation"]
        deterministic = exploration_type() in _DETERMINISTIC
        action, _ = self.policy.predict(observation, deterministic=deterministic, **more)
        chosen = torch.from_numpy(np.array(action)).reshape(
            *tensordict.batch_size, *self.policy.action_space.shape
        )
        if self.epsilon and not deterministic:
            space = self.policy.action_space
            explores = torch.rand(tensordict.batch_size) < self.epsilon
            drawn = torch.randint(int(space.n), tensordict.batch_size) + int(space.start)
            chosen = torch.where(explores, drawn, chosen)
        return tensordict.set("action", chosen)
