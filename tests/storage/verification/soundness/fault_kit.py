"""Lists of faults, each injected into a sound dataset by code that is independent of the checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LENGTHS = (12, 9, 30, 10)
"""Transitions per episode of the sound datasets."""
ROWS = sum(LENGTHS)
BEGINS = [sum(LENGTHS[:number]) for number in range(len(LENGTHS))]
ENDS = [begin + count - 1 for begin, count in zip(BEGINS, LENGTHS, strict=True)]

Inject = Callable[[Path], None]


@dataclass(frozen=True)
class Fault:
    """A fault: the check that must find it, the place to report, and the injection."""

    name: str
    check: str
    at: dict[str, Any]
    inject: Inject


class Faults(list[Fault]):
    """The faults of a format, in order."""

    def __call__(self, check: str, **at: Any) -> Callable[[Inject], Inject]:
        """Return a decorator that adds a function. ``at`` gives fields of the place."""

        def add(inject: Inject) -> Inject:
            self.append(Fault(inject.__name__.strip("_"), check, at, inject))
            return inject

        return add


def walk(seed: int, count: int, width: int) -> np.ndarray:
    """Return states [count, width] of a random walk. All states differ."""
    steps = np.random.default_rng(seed).normal(size=(count, width))
    return np.cumsum(steps, 0).astype(np.float32)


def actions(seed: int, count: int, width: int) -> np.ndarray:
    """Return actions [count, width] between -1 and 1."""
    return np.tanh(walk(seed + 1000, count, width)).astype(np.float32)


def rewrite(path: Path, at: int, content: bytes) -> None:
    """Write bytes into a file. A negative offset counts from its end."""
    with path.open("r+b") as file:
        file.seek(at, 0 if at >= 0 else 2)
        file.write(content)


def halve(path: Path) -> None:
    """Truncate a file to half of its size."""
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
