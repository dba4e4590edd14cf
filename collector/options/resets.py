"""Resets with seeds, options and contexts that are drawn from the seed of the run."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.options.checks import flag
from tallyroll.collector.options.draws import Choice, Constant, Draw, Sampler, draw_of, json_value
from tallyroll.collector.options.objects import OptionObject
from tallyroll.collector.user_code import ENDS, user_code
from tallyroll.storage.rows.keys import can_be_stored

_OF_OPTIONS = 1
"""Number of the stream of options among a seed's streams; environments use other streams."""
_KINDS: dict[str, type] = {"b": bool, "i": int, "f": float}
_INT64, _FLOAT = 2**63, sys.float_info.max
_DTYPES = {kind: np.dtype(each) for kind, each in _KINDS.items()}


class Streams:
    """Generators of reset options, one per seed; only the last returned one is valid.

    A Philox key per seed makes the generators independent. Setting a key takes a tenth of the time
    of making a new generator.
    """

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=np.array([0, _OF_OPTIONS], np.uint64))
        self._rng = np.random.Generator(self._bits)
        self._state = self._bits.state
        self._key = self._state["state"]["key"]

    def of(self, reset_seed: int) -> np.random.Generator:
        """Return the generator of a seed in its initial state.

        Every call returns the same object, so earlier results are no longer valid.
        """
        self._key[0] = reset_seed
        self._bits.state = self._state
        return self._rng


def sampler_of(name: str, value: Any) -> Any:
    """Return a copy of a sampler; None and callables are returned unchanged.

    Raises:
        ArgumentError: the object is not a sampler, or an option's name or value is not valid.
    """
    if value is None or (callable(value) and not isinstance(value, Mapping)):
        return value
    if not isinstance(value, Mapping):
        raise ArgumentError(
            f"{name}: expected options by name, such as {{'gravity': uniform(-15, -5)}}, or a "
            f"function of a generator, got {type(value).__name__}"
        )
    if not value:
        raise ArgumentError(f"{name}: expected at least one option, got none. Leave {name} out.")
    for option in value:
        require_name(name, option)
    return {option: draw_of(f"{name}: {option}", each) for option, each in value.items()}


def require_name(name: str, option: object) -> None:
    """Raise an error unless the name of an option can name a column.

    Raises:
        ArgumentError: the name cannot be the name of a column.
    """
    if not isinstance(option, str) or not can_be_stored(option) or option.startswith((".", "_")):
        raise ArgumentError(
            f"{name}: expected a valid name of a column, without '/' and without a leading '.' or "
            f"'_', got {option!r}"
        )


@dataclass(frozen=True, kw_only=True)
class Resets(OptionObject):
    """Seeds, options and contexts of resets, stored with the rows; an argument of collectors.

    They are drawn for each trajectory from the run's seed, the lane, the incarnation of the lane,
    and the number of the trajectory in the lane. They do not depend on the number of workers. As
    keywords of a collector, the fields are ``reset_sampler`` and ``reset_seeds``.

    Args:
        sampler: a mapping of option names to :func:`uniform`, :func:`choice` or constants; or a
            function that takes a NumPy generator and returns a mapping of options, always with the
            same names. Numbers become columns ``("collector", "context", name)``; other options are
            JSON values, and :meth:`options_of` draws them again. A system that declares a context
            gets the options as its context; other environments get them as ``options`` of
            ``env.reset``.
        seeds: True gives each reset a seed, stored in the column ``("collector", "reset_seed")``.

    Raises:
        ArgumentError: an argument is not valid.

    Examples:
        >>> from tallyroll.collector import Resets, SyncCollector, uniform
        >>> low = uniform(-0.05, 0.0)
        >>> resets = Resets(sampler={"low": low, "high": 0.05}, seeds=True)
        >>> with SyncCollector(
        ...     "CartPole-v1", frames_per_batch=50, total_frames=50, resets=resets
        ... ) as collector:
        ...     rows = next(iter(collector))["collector"]
        >>> seed = int(rows["reset_seed"][0])
        >>> resets.options_of(seed)["low"] == float(rows["context", "low"][0])
        True
    """

    sampler: Sampler | None = field(
        default=None, metadata={"check": sampler_of, "keyword": "reset_sampler"}
    )
    seeds: bool = field(default=False, metadata={"check": flag, "keyword": "reset_seeds"})

    @property
    def draws(self) -> bool:
        """True if there is anything to draw."""
        return self.seeds or self.sampler is not None

    @property
    def options_vary(self) -> bool:
        """True if options may differ between resets."""
        if self.sampler is None or callable(self.sampler):
            return self.sampler is not None
        return not all(isinstance(each, Constant) for each in self.sampler.values())

    def options_of(self, reset_seed: int) -> dict[str, Any]:
        """Draw the options of a trajectory again, from the seed in its rows.

        Raises:
            ArgumentError: the seed is not valid, or the sampler is a function that did not return
                options.
        """
        seed = int(reset_seed)
        if not 0 <= seed < _INT64:
            raise ArgumentError(f"options_of: expected a reset_seed from rows, got {reset_seed!r}")
        return drawn_from(self, Streams().of(seed))

    def columns(self) -> dict[str, np.dtype[Any]]:
        """Return the options that become columns, and their dtypes; a function is called once.

        Raises:
            ArgumentError: an option is neither a number nor a JSON value.
        """
        if self.sampler is None:
            return {}
        if callable(self.sampler):
            draws: dict[str, Draw] = {}
            for name, value in self.options_of(0).items():
                require_name("reset_sampler", name)
                draws[name] = draw_of(f"reset_sampler: {name}", value)
        else:
            draws = dict(self.sampler)
        found = {name: dtype_of(each.examples) for name, each in draws.items()}
        return {name: dtype for name, dtype in found.items() if dtype is not None}

    def described(self) -> dict[str, Any]:
        """Return a description in JSON values for a manifest."""
        if self.sampler is None or callable(self.sampler):
            name = getattr(self.sampler, "__qualname__", type(self.sampler).__qualname__)
            return {"seeds": self.seeds, "sampler": None if self.sampler is None else name}
        spelled = {name: each.spelling for name, each in self.sampler.items()}
        return {"seeds": self.seeds, "sampler": spelled}


def drawn_from(resets: Resets, rng: np.random.Generator) -> dict[str, Any]:
    """Draw options from ``rng``; the caller uses them before ``rng`` is used again.

    Raises:
        ArgumentError: the sampler is a function that did not return options.
    """
    if resets.sampler is None:
        return {}
    if not callable(resets.sampler):
        return {name: each.draw(rng) for name, each in resets.sampler.items()}
    try:
        drawn = resets.sampler(rng)
        if isinstance(drawn, Mapping):
            return dict(drawn)
    except ENDS as error:
        raise user_code.error("reset_sampler", error) from error
    raise ArgumentError(
        "reset_sampler: expected a function that returns options by name, got "
        f"{type(drawn).__name__}"
    )


def dtype_of(values: Sequence[Any]) -> np.dtype[Any] | None:
    """Return the dtype of a column of ``values``; None if they are not all numbers."""
    if not all(isinstance(each, (bool, int, float)) for each in values):
        return None
    kinds = {np.asarray(each).dtype.kind for each in values}
    if not kinds <= {"b", "i", "f"}:  # integers beyond 64 bits
        return None
    if kinds == {"b"}:
        return _DTYPES["b"]
    if "b" in kinds:  # bools mixed with numbers do not become a column
        return None
    return _DTYPES["f" if "f" in kinds else "i"]


def number_of(name: str, value: Any, dtype: np.dtype[Any]) -> Any:
    """Return ``value`` as a Python number for a column of ``dtype``.

    Raises:
        ArgumentError: the value is not a finite number, or the column cannot represent it.
    """
    found = value.item() if isinstance(value, np.generic) else value
    kind: str = dtype.kind
    number: bool | int | float | None = None
    if isinstance(found, bool) or kind == "b":
        number = found if isinstance(found, bool) and kind == "b" else None
    elif isinstance(found, (int, float)) and -_INT64 <= found < _INT64 and kind == "i":
        number = int(found)
    elif isinstance(found, (int, float)) and abs(found) <= _FLOAT and kind == "f":
        number = float(found)
    if number is None or number != found:
        raise ArgumentError(
            f"reset_sampler: expected a finite number of {dtype} for {name!r} in every draw, got "
            f"{value!r}"
        )
    return number


def column_draw(name: str, draw: Draw, dtype: np.dtype[Any]) -> Draw:
    """Return the ``draw`` of an option that is a column, with values converted to ``dtype``."""
    if isinstance(draw, Choice):
        return Choice(tuple(number_of(name, each, dtype) for each in draw.values))
    return Constant(number_of(name, draw.value, dtype)) if isinstance(draw, Constant) else draw


def other_of(name: str, value: Any) -> Any:
    """Return the ``value`` of an option that is not a column, as a JSON value.

    Raises:
        ArgumentError: the value is not a JSON value.
    """
    return json_value(f"reset_sampler: {name}", value)
