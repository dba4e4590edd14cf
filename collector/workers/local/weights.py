"""A policy's weights in shared memory: one process publishes them, others take them over."""

from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from tallyroll.collector.compat import copy_all
from tallyroll.collector.errors import ArgumentError, StateError
from tallyroll.collector.workers.local.memory import Area, Arena
from tallyroll.collector.workers.local.rwlock import FileLock

LOCK_SECONDS = 30.0


class Spec(NamedTuple):
    """The name that a module has for a tensor, and its kind."""

    name: str
    shape: torch.Size
    dtype: torch.dtype


class SharedWeights:
    """Room for all parameters and buffers of a module, twice, and the version of the weights.

    New weights are written beside the current ones, which stay whole until the new ones are,
    whatever interrupts or kills the writer. Readers and writers take turns.

    Args:
        module: whose tensors are to have room; nothing is copied yet. Its buffers are among
            them, also those that are not persistent; a tensor with several names has room once.
            What is no module, a policy that is a function, has none.
        area: what the room is carved from. From a ``Measure`` it is only measured.
        lock_seconds: how long to wait for others, at most.

    Raises:
        ArgumentError: the module has a tensor that has no values yet, or is not dense.
    """

    def __init__(self, module: object, area: Area, lock_seconds: float = LOCK_SECONDS) -> None:
        self._specs = [_spec(name, tensor) for name, tensor in _named(module)]
        # 0 before the first version, then twice the version, plus 2, plus which copy it is in:
        # one store changes all of it.
        self._word = area.array((1,), np.int64).data.cast("B").cast("q")
        self._copies = [
            [area.tensor(spec.shape, spec.dtype) for spec in self._specs] for _ in range(2)
        ]
        if isinstance(area, Arena):  # else there is nothing to lock
            self._lock = FileLock(area.fd, "the shared weights", lock_seconds)

    @property
    def version(self) -> int:
        """Version of the weights that were published last; -1 before. Read without a lock."""
        return (self._word[0] >> 1) - 1

    def publish(self, module: object, version: int) -> None:
        """Make the tensors of ``module`` the current weights. On any device.

        Raises:
            ArgumentError: they are not those that there is room for, or ``version`` is below 0.
            SharedMemoryBusy: a reader did not come to an end in time.
        """
        if version < 0:
            raise ArgumentError(f"version: expected an integer of at least 0, got {version}")
        self.publish_tensors(self._tensors(module), version)

    def publish_tensors(self, sources: list[torch.Tensor], version: int) -> None:
        """Make tensors, in the order of :attr:`current`, the current weights."""
        with self._lock.writing():
            spare = 1 - (self._word[0] & 1)
            _copy(self._copies[spare], sources)
            self._word[0] = 2 * (version + 1) + spare

    @property
    def current(self) -> list[torch.Tensor]:
        """The weights that were published last; this process alone may publish meanwhile."""
        return self._copies[self._word[0] & 1]

    def load_into(self, module: object) -> int:
        """Copy the current weights into the tensors of ``module``, in place.

        Returns:
            Their version.

        Raises:
            ArgumentError: the tensors are not those that there is room for.
            StateError: nothing was published yet.
            SharedMemoryBusy: a writer did not come to an end in time.
        """
        targets = self._tensors(module)
        with self._lock.reading():
            word = self._word[0]
            if not word:
                raise StateError("expected shared weights, got none: publish them first")
            _copy(targets, self._copies[word & 1])
        return (word >> 1) - 1

    def _tensors(self, module: object) -> list[torch.Tensor]:
        """The tensors of ``module``, as long as they are those that there is room for."""
        named = _named(module)
        got = [_spec(name, tensor) for name, tensor in named]
        if got != self._specs:
            raise ArgumentError(
                f"expected a module with the weights {_difference(self._specs, got)}; give one of "
                "the same structure as at the start"
            )
        return [tensor for _, tensor in named]


def _named(module: object) -> list[tuple[str, torch.Tensor]]:
    if not isinstance(module, nn.Module):
        return []
    return [*module.named_parameters(), *module.named_buffers()]


def _spec(name: str, tensor: torch.Tensor) -> Spec:
    if nn.parameter.is_lazy(tensor):
        raise ArgumentError(
            f"{name}: expected weights, got a parameter without a shape; call the module once "
            "before"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ArgumentError(
            f"{name}: expected a dense tensor, got one with the layout {tensor.layout}, dtype "
            f"{tensor.dtype}; other processes can only be given dense weights"
        )
    return Spec(name, tensor.shape, tensor.dtype)


def _difference(wanted: list[Spec], got: list[Spec]) -> str:
    """The first tensor that differs."""
    pairs = zip([*wanted, None], [*got, None], strict=False)
    want, have = next((want, have) for want, have in pairs if want != have)
    return f"{_described(want)}, got {_described(have)}"


def _described(spec: Spec | None) -> str:
    return f"{spec.name} {list(spec.shape)} of {spec.dtype}" if spec else "nothing more"


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy in one call: a Ctrl-C comes before or after it."""
    if not targets:
        return
    inference = any(target.is_inference() for target in targets)
    with torch.inference_mode() if inference else torch.no_grad():
        pairs = [_with_memory(*pair) for pair in zip(targets, sources, strict=True)]
        copy_all([target for target, _ in pairs], [source for _, source in pairs])


def _with_memory(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both without what is only a repetition in ``target``, an expanded tensor."""
    strides = target.stride()
    if 0 not in strides:
        return target, source
    for axis, (stride, size) in enumerate(zip(strides, target.shape, strict=True)):
        if stride == 0 and size > 1:
            target, source = target.narrow(axis, 0, 1), source.narrow(axis, 0, 1)
    return target, source
