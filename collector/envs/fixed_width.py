"""TorchRL transform that stores strings and tensors of variable length in fixed columns."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import NonTensor, TensorSpec, Unbounded
from torchrl.envs.transforms import Transform

from tallyroll.collector.errors import ArgumentError, TransitionError
from tallyroll.storage.rows.keys import Key, as_key, format_key


class FixedWidth(Transform):
    """Pads observations of variable size with zeros to columns of a fixed size.

    A string becomes its UTF-8 bytes, uint8 ``[..., width]``. A tensor keeps its dtype. If lanes
    differ in size, apply the transform to each single environment of a `SerialEnv` or
    `ParallelEnv`.

    Args:
        sizes: key of an observation -> the maximum number of bytes of a string, or the maximum
            shape of a tensor, without the environment's batch dimensions. Example:
            ``{"said": 64, "units": (12, 3)}``.

    Raises:
        ArgumentError: a size is not a positive number or a shape.
        TransitionError: a value is too large. Raised while collecting.
    """

    def __init__(self, sizes: Mapping[Any, int | Sequence[int]]) -> None:
        self.sizes: dict[Key, tuple[int, ...]] = {}
        for key, size in sizes.items():
            shape = (size,) if isinstance(size, int) else tuple(size)
            if not shape or not all(isinstance(each, int) and each > 0 for each in shape):
                raise ArgumentError(
                    f"sizes: expected a number of bytes or a shape for {key!r}, got {size!r}"
                )
            self.sizes[as_key(key)] = shape
        super().__init__(in_keys=list(sizes), out_keys=list(sizes))

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        batch = tuple(next_tensordict.batch_size)
        for key, size in self.sizes.items():
            value = next_tensordict.get(key)
            if not isinstance(value, torch.Tensor):
                value = self._bytes(key, value if isinstance(value, str) else value.tolist())
            shape = (*batch, *size)
            if len(value.shape) != len(shape) or any(
                have > want for have, want in zip(value.shape, shape, strict=True)
            ):
                raise TransitionError(
                    f"{format_key(key)}: expected at most {list(size)}, got "
                    f"{list(value.shape[len(batch) :])}; give FixedWidth a larger size"
                )
            fixed = value.new_zeros(shape)
            fixed[tuple(map(slice, value.shape))] = value
            next_tensordict.set(key, fixed)
        return next_tensordict

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        return self._call(tensordict_reset)

    def _bytes(self, key: Key, text: Any) -> torch.Tensor:
        if isinstance(text, list):
            (size,) = self.sizes[key]
            rows = [self._bytes(key, each) for each in text]
            longest = max(size, *(row.shape[-1] for row in rows))
            return torch.stack(
                [torch.nn.functional.pad(row, (0, longest - row.shape[-1])) for row in rows]
            )
        if not isinstance(text, str):
            raise TransitionError(
                f"{format_key(key)}: expected a string or a tensor, got {type(text).__name__}. "
                f'Leave the key out with ExcludeTransform("{format_key(key)}").'
            )
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    def transform_observation_spec(self, observation_spec: TensorSpec) -> TensorSpec:
        """Return ``observation_spec`` with fixed shapes."""
        for key, size in self.sizes.items():
            old = observation_spec[key]
            dtype = torch.uint8 if isinstance(old, NonTensor) else old.dtype
            shape = (*observation_spec.shape, *size)
            observation_spec[key] = Unbounded(shape, dtype=dtype, device=old.device)
        return observation_spec
