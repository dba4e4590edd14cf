"""Ways that are switched off, drawn by a number; and the extensions, where they are built."""

from __future__ import annotations

import shutil
from typing import TypeVar

import numpy as np
import pytest

from tallyroll.storage import fast_paths

Functions = TypeVar("Functions")


def drawn_off(number: int) -> list[str]:
    """Draw the ways that a run of this number goes without: none of every third."""
    if number % 3 == 0:
        return []
    rng = np.random.default_rng([number, 71])
    share = rng.choice([0.1, 0.4, 0.8])
    return [way for way in fast_paths.FAST_PATHS if rng.random() < share]


def built(found: Functions | None) -> Functions:
    """Return the functions of an extension, which are there wherever a compiler was."""
    if found is None:
        assert "kernel" in fast_paths.off() or shutil.which("cc") is None, (
            "there is a compiler, and no kernel was built"
        )
        pytest.skip("there is no compiler")
    return found
