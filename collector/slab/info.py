"""Declarations of ``info`` entries that become columns; `InfoColumns` writes their values."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.slab.lossless import cast
from tallyroll.collector.slab.names import split
from tallyroll.storage.rows.dtypes import NUMPY, TORCH
from tallyroll.storage.rows.keys import Key

GIVEN = "_given"
"""Suffix of the column that marks the rows in which an info with ``fill`` was given."""

# Torch supports few operations on wider unsigned integers.
_DTYPES = {each: TORCH[each] for each in TORCH if each.kind != "u" or each.itemsize == 1}
_SPELLING = re.compile(
    r"(?P<name>[^:=\[\]]+)(?::(?P<dtype>\w+))?(?:\[(?P<shape>\d+(?:x\d+)*)\])?(?:=(?P<fill>.+))?"
)


@dataclass(frozen=True)
class Info:
    """An entry of an environment's infos that becomes a column.

    A value must have this shape, and fit into this dtype without loss. Any other value raises
    :class:`~tallyroll.collector.errors.TransitionError`.

    Args:
        name: name of the entry; a tuple of names, or ``"episode/r"``, if it is nested.
        dtype: a NumPy or torch dtype, or its name. None uses the dtype of ``fill``, or the dtype of
            the first infos: int64 for Python's integers, float64 for Python's floats.
        shape: shape of one lane's value; requires a dtype.
        fill: the number to use if a step or a reset does not give a value. An additional bool
            column ``<name>_given`` is True where the value was given. If None, every step and every
            reset must give the value.

    Raises:
        ArgumentError: an argument is not valid.
    """

    name: str | tuple[str, ...]
    dtype: Any = None
    shape: tuple[int, ...] = ()
    fill: float | complex | None = None

    def __post_init__(self) -> None:
        if not self.key or not all(isinstance(part, str) and part for part in self.key):
            raise ArgumentError(
                f"Info: expected a name, or a tuple of names for a nested entry, got {self.name!r}"
            )
        object.__setattr__(self, "shape", self._checked_shape())
        if self.fill is not None:
            self._check_fill()
        elif self.dtype is not None:
            object.__setattr__(self, "dtype", _checked_dtype(self.dtype, self.key))
        if self.dtype is None and self.shape:
            raise ArgumentError(
                f"Info {self.name!r}: expected a dtype with the shape {list(self.shape)}, got none"
            )

    def _checked_shape(self) -> tuple[int, ...]:
        sizes = (self.shape,) if isinstance(self.shape, int) else self.shape
        try:
            shape = tuple(int(size.__index__()) for size in sizes)
        except (TypeError, AttributeError):
            shape = (0,)
        if min(shape, default=1) < 1:
            raise ArgumentError(
                f"Info {self.name!r}: expected a shape of integers above 0, got {self.shape!r}"
            )
        return shape

    def _check_fill(self) -> None:
        found = np.asarray(self.fill)
        if found.shape or found.dtype.kind not in "biufc":
            raise ArgumentError(f"Info {self.name!r}: expected a number as fill, got {self.fill!r}")
        dtype = _checked_dtype(found.dtype if self.dtype is None else self.dtype, self.key)
        if cast(found, dtype)[1] is not None:
            raise ArgumentError(
                f"Info {self.name!r}: expected a fill that {dtype} holds without loss, got "
                f"{self.fill!r}"
            )
        if not np.isfinite(found):
            raise ArgumentError(
                f"Info {self.name!r}: expected a finite fill, got {self.fill!r}. The column "
                f"{self.key[-1]}{GIVEN} marks the steps that have a value."
            )
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "fill", found.item())

    @cached_property
    def key(self) -> Key:
        """Names from the root of ``info`` to the entry."""
        return split(self.name)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of the column; requires a declared dtype."""
        return _DTYPES[self.dtype]

    def __str__(self) -> str:
        """Return the text form, which :func:`parsed` parses."""
        dtype = "" if self.dtype is None else f":{self.dtype}"
        shape = f"[{'x'.join(map(str, self.shape))}]" if self.shape else ""
        fill = "" if self.fill is None else f"={self.fill!r}"
        return f"{'/'.join(self.key)}{dtype}{shape}{fill}"


def _checked_dtype(dtype: Any, key: Key) -> np.dtype[Any]:
    try:
        found = NUMPY.get(dtype) if isinstance(dtype, torch.dtype) else np.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found not in _DTYPES:
        raise ArgumentError(
            f"Info {'/'.join(key)!r}: expected a dtype among "
            f"{', '.join(str(each) for each in _DTYPES)}, got {dtype!r}"
        )
    return found


def infos_of(info_keys: Any) -> tuple[Info, ...]:
    """Return ``info_keys`` as declarations.

    Raises:
        ArgumentError: an element is neither a name nor an :class:`Info`, or occurs twice.
    """
    if isinstance(info_keys, (str, Info)) or not isinstance(info_keys, Iterable):
        raise ArgumentError(f"info_keys: expected a sequence of names, got {info_keys!r}")
    found: dict[Key, Info] = {}
    for each in info_keys:
        info = each if isinstance(each, Info) else Info(each)
        if info.key in found:
            raise ArgumentError(
                f"info_keys: expected each name once, got {'/'.join(info.key)!r} twice"
            )
        found[info.key] = info
    return tuple(found.values())


def parsed(text: str) -> Info:
    """Parse the text form of an :class:`Info`.

    Examples are ``lives``, ``pos:float32[3]`` and ``is_success:bool=False``.

    Raises:
        ArgumentError: the text is not valid.
    """
    match = _SPELLING.fullmatch(text)
    if match is None:
        raise ArgumentError(
            f"expected NAME, NAME:DTYPE, NAME:DTYPE[2x3] or NAME:DTYPE=FILL, got {text!r}"
        )
    shape = tuple(int(size) for size in (match["shape"] or "").split("x") if size)
    return Info(match["name"], match["dtype"], shape, _number(match["fill"], text))


def _number(text: str | None, whole: str) -> Any:
    if text is None:
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float, complex):
        try:
            return kind(text)
        except ValueError:
            continue
    raise ArgumentError(f"expected a number, True or False after =, got {text!r} in {whole!r}")
