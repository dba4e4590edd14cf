"""Lists of faults, each injected into a sound dataset by a program that knows no checker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LENGTHS = (12, 9, 30, 10)
"""Transitions of each episode of the sound datasets."""
ROWS = sum(LENGTHS)
BEGINS = [sum(LENGTHS[:number]) for number in range(len(LENGTHS))]
ENDS = [begin + count - 1 for begin, count in zip(BEGINS, LENGTHS, strict=True)]

Inject = Callable[[Path], None]


@dataclass(frozen=True)
class Fault:
    """One fault: the check that has to find it, the place that has to be named, the injection."""

    name: str
    check: str
    at: dict[str, Any]
    inject: Inject


class Faults(list[Fault]):
    """The faults of a format, in their order."""

    def __call__(self, check: str, **at: Any) -> Callable[[Inject], Inject]:
        """Add the function below; ``at`` are fields of the place."""

        def add(inject: Inject) -> Inject:
            self.append(Fault(inject.__name__.strip("_"), check, at, inject))
            return inject

        return add


def walk(seed: int, count: int, width: int) -> np.ndarray:
    """Return states [count, width] of a random walk, no two alike."""
    steps = np.random.default_rng(seed).normal(size=(count, width))
    return np.cumsum(steps, 0).astype(np.float32)


def actions(seed: int, count: int, width: int) -> np.ndarray:
    """Return actions [count, width] between -1 and 1."""
    return np.tanh(walk(seed + 1000, count, width)).astype(np.float32)


def rewrite(path: Path, at: int, content: bytes) -> None:
    """Write bytes into a file; a negative place counts from its end."""
    with path.open("r+b") as file:
        file.seek(at, 0 if at >= 0 else 2)
        file.write(content)


def halve(path: Path) -> None:
    """Cut a file in the middle."""
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
