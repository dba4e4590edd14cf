"""Checks of single values: each takes an argument's name and value, and returns the valid value."""

import contextlib
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import numpy as np
import torch

from tallyroll.collector.errors import ArgumentError, UnknownArgument
from tallyroll.collector.slab.info import Info, infos_of
from tallyroll.collector.slab.names import checked_exclude, checked_rename
from tallyroll.storage.package.near_names import did_you_mean

Check = Callable[[str, Any], Any]
"""Takes an argument's name and value, and returns the validated value or raises ArgumentError."""


def checked(name: str, value: Any, hint: Any) -> Any:
    """Validate ``value`` by the type ``hint``: a Literal, or a type annotated with a `Check`."""
    if get_origin(hint) is Annotated:
        return hint.__metadata__[0](name, value)
    if get_origin(hint) is Literal:
        one_of(name, value, hint)
    return value


def refuse_unknown(given: Iterable[str], known: Iterable[str], of: str) -> None:
    """Raise an error if a name in ``given`` is not a ``known`` argument.

    ``of`` names the object that takes the arguments.
    """
    names = {*known}
    for name in given:
        if name not in names:
            raise UnknownArgument(
                f"expected arguments of {of}, got {name}="
                f"{did_you_mean(name, names) or '; its docstring lists them'}"
            )


def _integer(name: str, value: Any) -> int:
    with contextlib.suppress(TypeError):  # arrays have the method, and most of them raise
        if not isinstance(value, bool):
            return operator.index(value)
    raise ArgumentError(f"{name}: expected an integer, got {value!r} ({type(value).__name__})")


def positive(name: str, value: Any) -> int:
    """Return ``value`` as an integer above 0."""
    number = _integer(name, value)
    if number <= 0:
        raise ArgumentError(f"{name}: expected an integer above 0, got {number}")
    return number


def at_most(most: int) -> Check:
    """Return a check of integers from 1 to ``most``."""

    def check(name: str, value: Any) -> int:
        if (number := positive(name, value)) > most:
            raise ArgumentError(f"{name}: expected at most {most:,}, got {number:,}")
        return number

    return check


def not_negative(name: str, value: Any) -> int:
    """Return ``value`` as an integer of at least 0."""
    number = _integer(name, value)
    if number < 0:
        raise ArgumentError(f"{name}: expected an integer of at least 0, got {number}")
    return number


def seconds(name: str, value: Any) -> float | None:
    """Return ``value`` as a number of seconds above 0, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ArgumentError(f"{name}: expected a number of seconds above 0, or None, got {value!r}")
    return float(value)


def flag(name: str, value: Any) -> bool:
    """Return ``value`` as a bool."""
    if not isinstance(value, (int, np.bool_)) or value not in (0, 1):
        raise ArgumentError(f"{name}: expected True or False, got {value!r}")
    return bool(value)


def one_of(name: str, value: Any, literal: Any) -> None:
    """Raise an error unless ``value`` is a value of the type ``literal``."""
    if value not in (allowed := get_args(literal)):
        raise ArgumentError(f"{name}: expected one of {list(allowed)}, got {value!r}")


def or_none(check: Check) -> Check:
    """Return a check that accepts None in addition to the values of ``check``."""
    return lambda name, value: None if value is None else check(name, value)


def frame_budget(name: str, value: Any) -> int | None:
    """Return a budget of frames; None for -1, which means no limit."""
    return None if _integer(name, value) == -1 else positive(name, value)


def tick_count(name: str, value: Any) -> int | str:
    """Return the ticks per transition, or the info key that counts them."""
    return value if isinstance(value, str) else positive(name, value)


def reward_dtype(name: str, value: Any) -> torch.dtype:
    """Return the dtype of reward columns, given as a dtype or by name."""
    found = value.removeprefix("torch.") if isinstance(value, str) else value
    for dtype in (torch.float32, torch.float64):
        if found is dtype or found == str(dtype).removeprefix("torch."):
            return dtype
    raise ArgumentError(f"{name}: expected torch.float32 or torch.float64, got {value!r}")


def available_device(name: str, value: Any) -> torch.device:
    """Return ``value`` as a device that this machine has."""
    try:
        # The device of a tensor exists, and has its full name ("cuda:0", not "cuda").
        return torch.empty(0, device=value).device
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ArgumentError(
            f"{name}: expected a torch device of this machine, got {value!r}: {error}"
        ) from error


def named_device(name: str, value: Any) -> torch.device:
    """Return ``value`` as a device of any machine; the driver is not queried."""
    try:
        return torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"{name}: expected a torch device, got {value!r}: {error}") from error


def a_callable(name: str, value: Any) -> Any:
    """Return ``value``, which must be callable."""
    if not callable(value):
        raise ArgumentError(f"{name}: expected a callable, got {type(value).__name__}")
    return value


def keyword_arguments(name: str, value: Any) -> dict[str, Any]:
    """Return a copy of ``value``, a mapping of keyword arguments."""
    if not isinstance(value, Mapping):
        raise ArgumentError(f"{name}: expected a mapping of keyword arguments, got {value!r}")
    if is_deeper(value, _MOST_DEPTH):
        raise ArgumentError(
            f"{name}: expected values that are nested at most {_MOST_DEPTH} deep, because the "
            "manifest stores them. Pass a factory that contains the values."
        )
    return dict(value)


def is_deeper(value: Any, most: int) -> bool:
    """Return True if mappings and lists in ``value`` are nested deeper than ``most``."""
    level = [value]
    for _ in range(most):
        inner = (each.values() if isinstance(each, Mapping) else each for each in level)
        below = (each for some in inner for each in some if isinstance(each, _NESTING))
        level = [*{id(each): each for each in below}.values()]  # a container may contain itself
        if not level:
            return False
    return True


def info_declarations(name: str, value: Any) -> tuple[str | tuple[str, ...] | Info, ...]:
    """Return a copy of ``value``, the declarations of infos as they were given."""
    given = value if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
    infos_of(given)
    return tuple(given)


def column_names(name: str, value: Any) -> tuple[str | tuple[str, ...], ...]:
    """Return a copy of ``value``, the names of columns to exclude as they were given."""
    return checked_exclude(value)


def new_names(name: str, value: Any) -> dict[Any, Any]:
    """Return a copy of ``value``, which maps old names of columns to new ones; empty for None."""
    if value is None:
        return {}
    checked_rename(value)
    return dict(value)


_NESTING = (Mapping, list, tuple)
_MOST_DEPTH = 64
