"""The dtypes of columns, with their names in torch, NumPy and manifests."""

from __future__ import annotations

import cmath
from typing import Any, Final

import numpy as np
import torch

# NumPy has no bfloat16. Files and arrays hold the 16 bits of such columns as uint16.
NUMPY: Final[dict[torch.dtype, np.dtype[Any]]] = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint64),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(np.uint16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
}
TORCH: Final = {numpy: dtype for dtype, numpy in NUMPY.items() if dtype is not torch.bfloat16}
SIGNED: Final = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}
"""Signed dtypes by the unsigned dtype of the same width. Torch has few operations on the latter."""
NAMES: Final = {str(dtype).removeprefix("torch."): dtype for dtype in NUMPY}
"""The dtypes by their names in manifests, such as ``float32``."""


def exact_tensor(values: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return Python numbers, or nested sequences of them, as a tensor of ``dtype``.

    Floats and complex numbers may be rounded to the precision of the dtype, and small ones to 0.
    Nothing else changes: no number overflows or loses a fraction, and no integer is rounded.

    Raises:
        ValueError: ``dtype`` cannot represent one of the numbers.
        TypeError, RuntimeError, OverflowError: raised by `torch.tensor`.
    """
    made = torch.tensor(values, dtype=dtype)
    rounds = dtype.is_floating_point or dtype.is_complex
    numbers = np.asarray(values, dtype=object).reshape(-1).tolist()
    for number, kept in zip(numbers, made.reshape(-1).tolist(), strict=True):
        given = number.item() if isinstance(number, torch.Tensor | np.generic) else number
        if given == kept:
            continue
        rounded = rounds and isinstance(given, float | complex)
        if not rounded or (cmath.isfinite(given) and not cmath.isfinite(kept)):
            name = str(dtype).removeprefix("torch.")
            raise ValueError(f"{name} cannot represent {given!r:.80}: it would become {kept!r}")
    return made


def in_float64(values: np.ndarray) -> np.ndarray:
    """Return numbers as float64, without NumPy's warnings about signalling NaNs."""
    with np.errstate(invalid="ignore"):
        return values.astype(np.float64)
