"""A policy's weights in shared memory, which one process publishes and others load."""

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
    """Name, shape and dtype of a module's tensor."""

    name: str
    shape: torch.Size
    dtype: torch.dtype


class SharedWeights:
    """Shared memory for two copies of a module's parameters and buffers, and their version.

    New weights are written to the spare copy. The current copy stays valid until they are complete,
    even if the writer is interrupted or killed. Readers and writers exclude each other.

    Args:
        module: the module whose tensors need memory; nothing is copied yet. Buffers are included,
            even non-persistent ones. A tensor with several names is allocated once. A policy that
            is not a module has no tensors.
        area: the memory to allocate from. A ``ArenaSizer`` only computes the size.
        lock_seconds: maximum time to wait for others.

    Raises:
        ArgumentError: a tensor of the module has no values yet, or is not dense.
    """

    def __init__(self, module: object, area: Area, lock_seconds: float = LOCK_SECONDS) -> None:
        self._specs = [_spec(name, tensor) for name, tensor in _named(module)]
        # 0 before the first version. Then twice the version, plus 2, plus the index of its copy,
        # so that one store changes both.
        self._word = area.array((1,), np.int64).data.cast("B").cast("q")
        self._copies = [
            [area.tensor(spec.shape, spec.dtype) for spec in self._specs] for _ in range(2)
        ]
        if isinstance(area, Arena):  # an ArenaSizer has nothing to lock
            self._lock = FileLock(area.fd, "the shared weights", lock_seconds)

    @property
    def version(self) -> int:
        """Version of the last published weights; -1 before the first. Read without a lock."""
        return (self._word[0] >> 1) - 1

    def publish(self, module: object, version: int) -> None:
        """Make the tensors of ``module``, on any device, the current weights.

        Raises:
            ArgumentError: the tensors differ from those at construction, or ``version`` is below 0.
            SharedMemoryBusy: a reader did not finish in time.
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
        """The last published weights; no other process may publish while they are used."""
        return self._copies[self._word[0] & 1]

    def load_into(self, module: object) -> int:
        """Copy the current weights into the tensors of ``module``, in place.

        Returns:
            The version of the weights.

        Raises:
            ArgumentError: the tensors differ from those at construction.
            StateError: nothing was published yet.
            SharedMemoryBusy: a writer did not finish in time.
        """
        targets = self._tensors(module)
        with self._lock.reading():
            word = self._word[0]
            if not word:
                raise StateError("expected shared weights, got none. Publish weights first.")
            _copy(targets, self._copies[word & 1])
        return (word >> 1) - 1

    def _tensors(self, module: object) -> list[torch.Tensor]:
        """Return the tensors of ``module`` if they match those at construction."""
        named = _named(module)
        got = [_spec(name, tensor) for name, tensor in named]
        if got != self._specs:
            raise ArgumentError(
                f"expected a module with the weights {_difference(self._specs, got)}. Pass a "
                "module with the same structure as at the start."
            )
        return [tensor for _, tensor in named]


def _named(module: object) -> list[tuple[str, torch.Tensor]]:
    if not isinstance(module, nn.Module):
        return []
    return [*module.named_parameters(), *module.named_buffers()]


def _spec(name: str, tensor: torch.Tensor) -> Spec:
    if nn.parameter.is_lazy(tensor):
        raise ArgumentError(
            f"{name}: expected weights, got a parameter without a shape. Call the module once "
            "before you pass it."
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ArgumentError(
            f"{name}: expected a dense tensor, got one with the layout {tensor.layout}, dtype "
            f"{tensor.dtype}. Only dense weights can be shared with other processes."
        )
    return Spec(name, tensor.shape, tensor.dtype)


def _difference(wanted: list[Spec], got: list[Spec]) -> str:
    """Describe the first tensor that differs."""
    pairs = zip([*wanted, None], [*got, None], strict=False)
    want, have = next((want, have) for want, have in pairs if want != have)
    return f"{_described(want)}, got {_described(have)}"


def _described(spec: Spec | None) -> str:
    return f"{spec.name} {list(spec.shape)} of {spec.dtype}" if spec else "nothing more"


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy in one call, which Ctrl-C does not interrupt."""
    if not targets:
        return
    inference = any(target.is_inference() for target in targets)
    with torch.inference_mode() if inference else torch.no_grad():
        pairs = [_with_memory(*pair) for pair in zip(targets, sources, strict=True)]
        copy_all([target for target, _ in pairs], [source for _, source in pairs])


def _with_memory(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both tensors without the repetitions of an expanded ``target``."""
    strides = target.stride()
    if 0 not in strides:
        return target, source
    for axis, (stride, size) in enumerate(zip(strides, target.shape, strict=True)):
        if stride == 0 and size > 1:
            target, source = target.narrow(axis, 0, 1), source.narrow(axis, 0, 1)
    return target, source
