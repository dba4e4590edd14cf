"""Distributions of one option of a reset: uniform, a choice, or a constant."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from tallyroll.collector.errors import ArgumentError

Sampler: TypeAlias = Mapping[str, Any] | Callable[[np.random.Generator], Mapping[str, Any]]
"""Draws the options of a reset."""
_CALL = re.compile(r"(?P<kind>[A-Za-z_]\w*)\s*\((?P<inner>.*)\)", re.DOTALL)


class Draw(Protocol):
    """A distribution from which values are drawn."""

    def draw(self, rng: np.random.Generator) -> Any:
        """Draw a value."""

    @property
    def examples(self) -> Sequence[Any]:
        """Possible values, which include every type of value."""

    @property
    def spelling(self) -> str:
        """Text form, which :func:`parsed` parses."""


@dataclass(frozen=True)
class Uniform:
    """Uniform distribution over a range of numbers; made by :func:`uniform`."""

    low: float
    high: float

    def draw(self, rng: np.random.Generator) -> float:
        """Draw a number."""
        return self.low + (self.high - self.low) * rng.random()

    @property
    def examples(self) -> Sequence[Any]:
        """The bounds."""
        return self.low, self.high

    @property
    def spelling(self) -> str:
        """Text form, a call of :func:`uniform`."""
        return f"uniform({self.low!r}, {self.high!r})"


@dataclass(frozen=True)
class Choice:
    """Uniform distribution over some values; made by :func:`choice`."""

    values: tuple[Any, ...]

    def draw(self, rng: np.random.Generator) -> Any:
        """Draw one of the values."""
        return self.values[int(rng.random() * len(self.values))]

    @property
    def examples(self) -> Sequence[Any]:
        """All values."""
        return self.values

    @property
    def spelling(self) -> str:
        """Text form, a call of :func:`choice`."""
        return f"choice({', '.join(map(json.dumps, self.values))})"


@dataclass(frozen=True)
class Constant:
    """The same value every time."""

    value: Any

    def draw(self, rng: np.random.Generator) -> Any:
        """Return the value."""
        return self.value

    @property
    def examples(self) -> Sequence[Any]:
        """The value."""
        return (self.value,)

    @property
    def spelling(self) -> str:
        """Text form, in JSON."""
        return json.dumps(self.value)


def uniform(low: float, high: float) -> Uniform:
    """Return the uniform distribution of float64 from ``low`` (inclusive) to ``high`` (exclusive).

    If the bounds are equal, the distribution always draws ``low``.

    Raises:
        ArgumentError: a bound is not a finite number, or ``low`` is above ``high``.

    Examples:
        >>> from tallyroll.collector import Resets, uniform
        >>> resets = Resets(sampler={"gravity": uniform(-15, -5)}, seeds=True)
        >>> -15 <= resets.options_of(reset_seed=7)["gravity"] < -5
        True
    """
    for bound in (low, high):
        wrong = isinstance(bound, (bool, np.bool_)) or not isinstance(
            bound, (int, float, np.integer, np.floating)
        )
        if wrong or not math.isfinite(bound):
            raise ArgumentError(f"uniform: expected two finite numbers, got {low!r}, {high!r}")
    if not (low <= high and math.isfinite(float(high) - float(low))):
        raise ArgumentError(
            f"uniform: expected the lower bound first, and a finite range, got {low!r}, {high!r}"
        )
    return Uniform(float(low), float(high))


def choice(values: Sequence[Any]) -> Choice:
    """Return the uniform distribution over ``values``: JSON values, or a NumPy array of numbers.

    Numbers become a column: int64 if all are integers, bool if all are bools, otherwise float64.

    Raises:
        ArgumentError: ``values`` is not a sequence or is empty, or one of the values is not a JSON
            value.
    """
    if isinstance(values, np.ndarray) and values.ndim == 1:
        values = values.tolist()
    if isinstance(values, (str, bytes)) or not isinstance(values, (list, tuple, range)):
        raise ArgumentError(f"choice: expected a list of values, got {values!r}")
    if not values:
        raise ArgumentError("choice: expected at least one value, got none")
    return Choice(tuple(json_value("choice", each) for each in values))


def json_value(name: str, value: Any) -> Any:
    """Return ``value`` after a round trip through JSON.

    NumPy numbers become Python numbers.

    Raises:
        ArgumentError: the value is not a JSON value, or has a number that is not finite.
    """
    plain = value.item() if isinstance(value, np.generic) else value
    try:
        same = json.loads(json.dumps(plain, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(
            f"{name}: expected a finite number or another JSON value, got {value!r}"
        ) from error
    if type(same) is not type(plain) and not isinstance(plain, tuple):
        raise ArgumentError(f"{name}: expected a JSON value, got {value!r}")
    return same


def draw_of(name: str, value: Any) -> Draw:
    """Return the distribution of an option: ``value`` itself, or a constant.

    Raises:
        ArgumentError: the value is neither a distribution nor a JSON value.
    """
    if isinstance(value, (Uniform, Choice, Constant)):
        return value
    return Constant(json_value(name, value))


def parsed(text: str) -> Draw:
    """Parse the text form of a distribution: ``uniform(-15, -5)``, ``choice(1, 2)`` or JSON.

    The text is not evaluated as code.

    Raises:
        ArgumentError: the text is not a distribution.
    """
    wanted = f"expected uniform(LOW, HIGH), choice(A, B, …) or a JSON value, got {text!r}"
    match = _CALL.fullmatch(text.strip())
    try:
        if match is None:
            return Constant(_json(text))
        values = _json(f"[{match['inner']}]")
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{wanted}; write strings in double quotes") from error
    if match["kind"] == "uniform":
        if len(values) != 2:
            raise ArgumentError(f"uniform: expected two numbers, got {match['inner']!r}")
        return uniform(*values)
    if match["kind"] == "choice":
        return choice(values)
    raise ArgumentError(f"{wanted}; {match['kind']!r} is not a distribution")


def _json(text: str) -> Any:
    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    value = json.loads(text, parse_constant=refuse)
    json.dumps(value, allow_nan=False)  # 1e999 is read as infinite
    return value
