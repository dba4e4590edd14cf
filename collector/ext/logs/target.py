"""The door of logs: what a target takes, and the kinds that there are by name."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import NamedTuple, TypeAlias

from tallyroll.collector.errors import ArgumentError

Row: TypeAlias = Mapping[str, int | float]
"""Numbers by name, ``frames`` first; one that is unknown is NaN."""

_KINDS = {
    "tensorboard": "tallyroll.collector.ext.logs.tensorboard:TensorboardLog",
    "wandb": "tallyroll.collector.ext.logs.wandb:WandbLog",
}
EXPECTED = "a path that ends in .csv, tensorboard:DIR, wandb:PROJECT, or a function of a row"


class Newest(NamedTuple):
    """The last row that a log has."""

    frames: int
    seconds: float = 0.0
    seed: int | None = None
    """The seed of its run; None: the log does not say."""


class LogTarget(ABC):
    """A place that rows are written to, open for one run. Its name is shown in errors."""

    newest: Newest | None = None
    """The last row that was there when it was opened; None: there was none, or none is known."""
    name: str

    @abstractmethod
    def write(self, row: Row) -> None:
        """Write a row whole, or raise; a row that is there already is left out."""

    @abstractmethod
    def forget_after(self, frames: int) -> None:
        """Remove rows of more ``frames``: their transitions were lost, and are collected again."""

    @abstractmethod
    def close(self) -> None:
        """Leave it to others. Idempotent."""


class Function(LogTarget):
    """A function of the caller's, which is called with each row, a new dict."""

    name = "the function"

    def __init__(self, call: Callable[[dict[str, int | float]], object]) -> None:
        self._call = call

    def write(self, row: Row) -> None:
        """Call it."""
        self._call(dict(row))

    def forget_after(self, frames: int) -> None:
        """Do nothing: it says of no row that it is there."""

    def close(self) -> None:
        """Do nothing: it is the caller's."""


Target: TypeAlias = str | os.PathLike[str] | Callable[[dict[str, int | float]], object] | LogTarget


def open_target(target: Target) -> LogTarget:
    """Open the target of a log, before anything is collected.

    Raises:
        ArgumentError: there is no such kind, another run writes to it, or it cannot be opened.
        MissingExtra: the package that writes it is not installed.
    """
    if isinstance(target, LogTarget):
        return target
    if callable(target):
        return Function(target)
    if not isinstance(target, str | os.PathLike):
        raise ArgumentError(f"log: expected {EXPECTED}, got {target!r}")
    try:
        return _opened(os.fspath(target))
    except OSError as error:
        raise ArgumentError(
            f"log: {target} cannot be opened: {error.strerror}; give another path"
        ) from error


def _opened(text: str) -> LogTarget:
    kind, colon, place = text.partition(":")
    if colon and kind in _KINDS:
        if not place:
            raise ArgumentError(f"log: expected {EXPECTED}, got {text!r}, which names no place")
        module, _, name = _KINDS[kind].partition(":")
        opened: LogTarget = getattr(import_module(module), name)(place)
        return opened
    if text.endswith(".csv"):
        from tallyroll.collector.ext.logs.csv_file import CsvLog

        return CsvLog(text)
    raise ArgumentError(f"log: expected {EXPECTED}, got {text!r}")
