"""Tensors whose values are read on first use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Self

import torch

from tallyroll.storage.compat import wrapper_tensor

_METADATA: Final = frozenset(
    {
        *(
            getattr(torch.Tensor, name).__get__
            for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_meta")
        ),
        *(
            getattr(torch.Tensor, name).__get__
            for name in ("is_cuda", "is_nested", "is_quantized", "is_sparse")
        ),
        *(
            getattr(torch.Tensor, name)
            for name in ("size", "dim", "numel", "__len__", "__hash__", "is_floating_point")
        ),
    }
)
"""Functions whose results are known before the values are read."""


class DeferredTensor(torch.Tensor):
    """Tensor on the CPU whose values are read on first use.

    The first torch function that needs values reads them into a plain tensor. All later functions
    get the same plain tensor, so in-place changes are kept.

    Args:
        make: function that reads the values.
        shape: the shape of the tensor.
        dtype: the dtype of the tensor.
    """

    _make: Callable[[], torch.Tensor]
    _made: torch.Tensor | None
    _turn: threading.Lock

    def __new__(
        cls, make: Callable[[], torch.Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> Self:
        """Make a tensor without memory."""
        made: Self = wrapper_tensor(cls, tuple(shape), dtype=dtype)
        return made

    def __init__(
        self, make: Callable[[], torch.Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> None:
        self._make, self._made, self._turn = make, None, threading.Lock()

    @property
    def is_read(self) -> bool:
        """True if the values have been read."""
        return self._made is not None

    def plain(self) -> torch.Tensor:
        """Return the plain tensor, and read its values if this was not done yet."""
        with self._turn:
            if self._made is None:
                self._made = self._make()
                del self._make
            return self._made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if func is torch.Tensor.is_shared and not args[0].is_read:
            return False
        return func(*_plain(args), **_plain(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*_plain(args), **_plain(kwargs or {}))


def _plain(value: Any) -> Any:
    """Replace the deferred tensors in nested lists, tuples and dicts."""
    if isinstance(value, DeferredTensor):
        return value.plain()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value
