"""Transform that scales a column to mean 0 and standard deviation 1, by a storage's statistics."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.envs.transforms import ObservationNorm

from tallyroll.storage.replay.disk_storage import DiskStorage
from tallyroll.storage.rows.keys import Key, as_key, format_key


class Normaliser(ObservationNorm):
    """Subtract a mean, divide by a standard deviation, and clip outliers.

    A `Normaliser` is a module that maps a tensor to a tensor. It is also a TorchRL transform: in a
    replay buffer or an environment it changes the column ``key``, and in batches also
    ``("next", *key)``. ``state_dict`` contains its entire state.

    Args:
        key: the column.
        mean: the mean of each number, or one mean for all numbers.
        std: the standard deviation of each number, or one for all numbers.
        eps: the lower bound of the divisor, for columns that are constant or nearly so.
        clip: the maximum absolute value of a result; None: no limit.

    Raises:
        ValueError: ``eps`` or ``clip`` is not a number above 0.
    """

    def __init__(
        self,
        key: str | Key,
        mean: torch.Tensor,
        std: torch.Tensor,
        *,
        eps: float = 1e-6,
        clip: float | None = 10.0,
    ) -> None:
        for name, value in (("eps", eps), ("clip", math.inf if clip is None else clip)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"{name}: expected a number above 0, got {value!r}.")
        self.key = as_key(key)
        super().__init__(
            loc=mean,
            scale=std.clamp_min(eps),
            in_keys=[self.key if len(self.key) > 1 else self.key[0]],
            standard_normal=True,
        )
        limit = torch.tensor(math.inf if clip is None else float(clip), dtype=mean.dtype)
        self.register_buffer("limit", limit)

    def _apply_transform(self, obs: torch.Tensor) -> torch.Tensor:
        # TorchRL's implementation branches on a tensor, which fails under torch.vmap. TorchRL's
        # losses use torch.vmap to call all copies of a network at once.
        values = obs.to(self.loc.dtype) if obs.dtype is torch.bool else obs  # bool has no minus
        found: torch.Tensor = (values - self.loc) / self.scale
        return found.clamp(-self.limit, self.limit)

    def forward(self, tensordict: Any) -> Any:
        """Transform a tensor, or the columns of a TensorDict."""
        if not isinstance(tensordict, TensorDictBase):
            return self._apply_transform(tensordict)
        found = super().forward(tensordict)
        if (following := found.get(("next", *self.key), None)) is not None:
            found.set(("next", *self.key), self._apply_transform(following))
        return found


def normaliser_of(
    storage: DiskStorage, key: str | Key, *, eps: float, clip: float | None, keep: bool
) -> Normaliser:
    """Return the transform of one column; see `DiskStorage.normaliser`."""
    found = storage.statistics([as_key(key)], keep=keep)[as_key(key)]
    mean, std = (torch.as_tensor(each).float() for each in (found.mean, found.std))
    if not (mean.isfinite().all() and std.isfinite().all()):
        raise ValueError(
            f"normaliser: expected finite numbers in {format_key(key)} of {storage.reader.path}, "
            "got none or infinite ones. See storage.statistics()."
        )
    return Normaliser(key, mean, std, eps=eps, clip=clip)
