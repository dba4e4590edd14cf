"""Exact conversion of a lane's results to column values, or an error that explains the failure."""

import warnings
from collections.abc import Callable, Sequence
from math import isnan
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tallyroll.collector.errors import ValueRefused
from tallyroll.collector.slab.lossless import cast
from tallyroll.storage.rows.keys import NEXT, TERMINATED, TRUNCATED, Key, format_key

Array = NDArray[Any]

REWARD: Key = (NEXT, "reward")
_NUMBERS = "biuf"
_HELD = 2**24
"""Largest number up to which float32, the default dtype of rewards, represents every integer."""


class RoundedWarning(UserWarning):
    """An environment returns floats with more digits than its column can store.

    For rewards, the warning is only issued if a reward becomes 0 or another integer in float32.
    """


def rounding_of(key: Key, lane: int, step: int | None, reward: float) -> str:
    """Return the text of the warning for a reward that float32 rounds to another number."""
    where = f"lane {lane}" if step is None else f"lane {lane}, step {step} of its trajectory"
    return (
        f"{format_key(key)} at {where}: the environment returned {reward!r}, which float32 stores "
        f"as {float(np.float32(reward))!r}. Pass reward_dtype=torch.float64 to store all bits, or "
        "scale rewards in a wrapper. Later rewards are rounded without a warning."
    )


def reward_of(value: Any) -> float:
    """Convert ``value`` to a reward that is stored as float32.

    A float may be rounded to the nearest float32. An integer must be exactly representable.

    Raises:
        ValueRefused: ``value`` is not one number, or float32 cannot hold it.
    """
    # The extension reads rewards as this function does; see `as_double` in `_kernel.c`.
    if (isinstance(value, float) and abs(value) <= _LARGEST) or (
        type(value) is int and abs(value) <= _HELD
    ):
        return float(value)
    found = exact_reward_of(value)
    if isnan(found):
        return found
    integer = isinstance(value, (int, np.integer)) or _kind(value) in "iu"
    if integer and abs(found) > _HELD and float(np.float32(found)) != int(value):
        raise ValueRefused(
            REWARD,
            "an integer that float32 holds",
            str(value),
            f"return a float, which is rounded, or {_KEEP_BITS}",
        )
    if abs(found) > _LARGEST and found - found == 0:
        raise ValueRefused(REWARD, "a number that float32 holds", repr(value), _KEEP_BITS)
    return found


def reward_reader(dtype: torch.dtype | None) -> Callable[[Any], float]:
    """Return the function that reads rewards stored as ``dtype``. None means float32."""
    return exact_reward_of if dtype is torch.float64 else reward_of


def exact_reward_of(value: Any) -> float:
    """Convert ``value`` to a reward that is stored as float64.

    Raises:
        ValueRefused: ``value`` is not one number, or no float64 is equal to it.
    """
    return _number(value, REWARD, "one number", "return float(reward)")


_KEEP_BITS = "pass reward_dtype=torch.float64, or scale rewards in a wrapper"

_LARGEST = float(np.finfo(np.float32).max)


def terminated_of(value: Any) -> bool:
    """Convert ``value`` to the flag of a termination."""
    return _flag(value, TERMINATED)


def truncated_of(value: Any) -> bool:
    """Convert ``value`` to the flag of a truncation."""
    return _flag(value, TRUNCATED)


def _flag(value: Any, key: Key) -> bool:
    if type(value) is bool or type(value) is np.bool_:
        return bool(value)
    wanted, advice = "one bool, or 0 or 1", f"return bool({key[-1]})"
    found = _number(value, key, wanted, advice)
    if found not in (0, 1):
        raise ValueRefused(key, wanted, described(value), advice)
    return bool(found)


def _number(value: Any, key: Key, wanted: str, advice: str) -> float:
    """Convert ``value``, one real number, to an equal float.

    Raises:
        ValueRefused: ``value`` is not one real number, or no float is equal to it.
    """
    plain = _plain(value)
    if not isinstance(plain, (bool, int, float)):
        if _kind(plain) in _NUMBERS and np.prod(np.shape(plain)) == 1:
            advice += ", or .item() of an array with one element"
        raise ValueRefused(key, wanted, described(value), advice)
    try:
        found = float(plain)
    except OverflowError:
        found = float("inf")
    if found != plain and not isnan(found):
        raise ValueRefused(key, f"{wanted} that a float holds", described(value), advice)
    return found


def _plain(value: Any) -> Any:
    """Convert a NumPy or torch scalar, or an array without dimensions, to a Python number."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return value.item() if not value.ndim else value
    if isinstance(value, (np.ndarray, np.generic)):
        if value.ndim or value.dtype.kind not in _NUMBERS:
            return value
        if value.dtype.itemsize > 8:
            return float(value) if float(value) == value else value
        return value.item()
    if not isinstance(value, (bool, int, float, str, bytes)) and hasattr(value, "__array__"):
        found = np.asarray(value)  # JAX arrays and others
        return found.item() if not found.ndim and found.dtype.kind in _NUMBERS else found
    return value


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    dtype = getattr(value, "dtype", None)
    return str(getattr(dtype, "kind", "")) or "-"


def described(value: Any) -> str:
    """Format a value for a message. Arrays appear as dtype, shape and, if small, their content."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return f"{value!r:.60} ({type(value).__name__})"
    name = str(dtype).removeprefix("torch.")
    return f"{name} {list(shape)}" + (f" {value!s:.40}" if np.prod(shape) < 4 else "")


class ExactRow:
    """Converts values of one leaf of a space to arrays of its dtype and shape.

    Floats with more digits than the dtype of the space are rounded, as Gymnasium itself does when
    it concatenates lanes. The first rounding issues a warning. Every other value is kept exactly.

    Args:
        key: key of the column.
        shape: shape of the values of one lane.
        dtype: dtype of the column.
        any_bools: accept the numbers 0 and 1 as bools.
    """

    def __init__(
        self, key: Key, shape: tuple[int, ...], dtype: np.dtype[Any], *, any_bools: bool = False
    ) -> None:
        self.key, self.shape, self.dtype = key, shape, dtype
        self._any_bools = any_bools and dtype == np.bool_
        self._scalar = None if shape else dtype.type
        self._counts = not shape and dtype.kind in "iu"
        self._warned = False

    def is_right(self, value: Any) -> bool:
        """Return True if ``value`` can be written to the column without a conversion."""
        if type(value) is np.ndarray:
            return value.dtype is self.dtype and value.shape == self.shape
        if type(value) is int:
            return self._counts and 0 <= value < 128
        return type(value) is self._scalar

    def puts_bits(self, value: Any, row: Array) -> bool:
        """Write an array of one-byte integers 0 and 1 to ``row``, a row of bools.

        Return False if ``value`` is not such an array. The content of ``row`` is then undefined.
        This method takes a twentieth of the time of :meth:`array`.
        """
        if not (
            self._any_bools
            and type(value) is np.ndarray
            and value.dtype.kind in "iu"
            and value.itemsize == 1
            and value.shape == self.shape
        ):
            return False
        row[...] = value
        return row.tobytes() == value.tobytes()

    def are_right(self, values: Sequence[Any]) -> bool:
        """Return True if all of ``values`` are arrays that need no conversion."""
        dtype, shape = self.dtype, self.shape
        for value in values:
            if type(value) is not np.ndarray or value.dtype is not dtype or value.shape != shape:
                return False
        return True

    def array(self, value: Any, *, first: bool = False) -> Array:
        """Convert ``value`` to an array of the dtype and shape.

        ``first`` is True if a reset returned the value.

        Raises:
            ValueRefused: the shape is wrong, or the conversion would change the value.
        """
        if self.is_right(value):
            return value  # type: ignore[no-any-return]
        found = _as_array(value)
        if found is None or found.shape != self.shape or not self._takes(found.dtype):
            raise self.refused(described(value if found is None else found), first=first)
        if found.dtype == self.dtype:
            return found
        taken, lost = cast(found, self.dtype)
        if lost is None:
            return taken
        if found.dtype.kind in "fc" and self.dtype.kind in "fc":
            with np.errstate(all="ignore"):
                taken = found.astype(self.dtype)
            lost = lost & (np.isfinite(found) != np.isfinite(taken))
            if found.dtype.kind == "c" and self.dtype.kind != "c":
                lost |= found.imag != 0
            if not lost.any():
                self._say_rounded(found.dtype)
                return taken
        at = tuple(int(index) for index in np.argwhere(lost)[0])
        where = f" at {list(at)}" if at else ""
        raise self.refused(f"{found[at]} of {found.dtype}{where}", first=first)

    def of_lane(self, lane: int, value: Any, *, first: bool = False) -> Array:
        """Convert ``value`` like :meth:`array`, and name the lane in errors."""
        if self.is_right(value):
            return value  # type: ignore[no-any-return]
        try:
            return self.array(value, first=first)
        except ValueRefused as error:
            error.locate(lane=lane)
            raise

    def refused(
        self,
        got: str,
        *,
        first: bool,
        advice: str = "correct the space, or cast in a wrapper",
    ) -> ValueRefused:
        """Return the error for a value that does not fit the column."""
        return ValueRefused(
            self.key if first else (NEXT, *self.key),
            f"{self.dtype} {list(self.shape)} as the space declares it",
            got,
            advice,
        ).locate(step=0 if first else None)

    def _takes(self, dtype: np.dtype[Any]) -> bool:
        """Return True if Gymnasium converts numbers of ``dtype`` when it concatenates lanes."""
        if dtype.kind not in "biufc":
            return False
        return self._any_bools or np.can_cast(dtype, self.dtype, "same_kind")

    def _say_rounded(self, dtype: np.dtype[Any]) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{format_key(self.key)}: the space declares {self.dtype}, but the environment "
                f"returns {dtype}, so values are rounded. Declare {dtype} in the space, or cast in "
                "a wrapper (gymnasium.wrappers.DtypeObservation).",
                RoundedWarning,
                stacklevel=2,
            )


def _as_array(value: Any) -> Array | None:
    """Return ``value`` as a NumPy array; None if it is not an array of numbers."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    elif hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray):
        value = np.from_dlpack(value)
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        return None
    try:
        return np.asarray(value)
    except (TypeError, ValueError):  # rows of different lengths
        return None


_put = np.ndarray.__setitem__


class CheckedRewards(np.ndarray):
    """Rewards of all lanes that validate each value written to them."""

    read: Any = None

    def __setitem__(self, at: Any, value: Any) -> None:
        if type(value) is not float and self.read is not None:
            value = _of_lane(self.read, at, value)
        _put(self, at, value)


class CheckedFlags(np.ndarray):
    """Flags of all lanes that validate each value written to them."""

    read: Any = None

    def __setitem__(self, at: Any, value: Any) -> None:
        if value is not False and value is not True and self.read is not None:
            value = _of_lane(self.read, at, value)
        _put(self, at, value)


def _of_lane(read: Any, at: Any, value: Any) -> Any:
    if type(at) is not int:
        return value
    try:
        return read(value)
    except ValueRefused as error:
        error.locate(lane=at)
        raise


def checked(values: Array, read: Any, *, flags: bool) -> Array:
    """Return a view of ``values`` that converts each value written to a lane with ``read``."""
    found: Any = values.view(CheckedFlags if flags else CheckedRewards)
    found.read = read  # a view has no constructor that takes an argument
    return found  # type: ignore[no-any-return]
