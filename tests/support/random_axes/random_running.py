"""A transform whose statistics change with each observation, and a journal of its results."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data import Unbounded
from torchrl.envs.transforms import ObservationTransform

from random_spaces import Array, digest

Told = dict[int, list[Array]]
"""Results of the transform, by a digest of the observation."""


class Running(ObservationTransform):
    """A transform that writes the distance of an observation from the mean of all so far.

    Args:
        told: the journal.
    """

    def __init__(self, told: Told) -> None:
        super().__init__(in_keys=["observation"], out_keys=["relative"])
        self.told = told
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))

    def _apply_transform(self, obs: torch.Tensor) -> torch.Tensor:
        """Return the distance."""
        self.count += obs.shape[:-1].numel()
        self.total += obs.double().mean(-1).sum()
        relative = (obs.double() - self.total / self.count).float()
        rows = zip(_rows(obs), _rows(relative), strict=True)
        for seen, became in rows:
            self.told.setdefault(digest([seen]), []).append(became.copy())
        return relative

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> Any:
        return self._call(tensordict_reset)

    def transform_observation_spec(self, observation_spec: Any) -> Any:
        """Add the column that the transform writes."""
        shape = observation_spec["observation"].shape
        observation_spec["relative"] = Unbounded(
            shape, dtype=torch.float32, device=observation_spec.device
        )
        return observation_spec


def _rows(values: torch.Tensor) -> Array:
    return np.asarray(values.detach().cpu()).reshape(-1, values.shape[-1])


def was_told(told: Told, seen: Array, relative: Array) -> Array:
    """Return which rows of ``relative`` are results of the transform for the rows ``seen``."""
    pairs = zip(*(each.reshape(-1, each.shape[-1]) for each in (seen, relative)), strict=True)
    right = [
        any(each.tobytes() == became.tobytes() for each in told.get(digest([one]), []))
        for one, became in pairs
    ]
    return np.array(right, np.bool_).reshape(len(seen), -1).all(-1)
