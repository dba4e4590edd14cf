"""Random choice of the fast paths to switch off, and access to the built extensions."""

from __future__ import annotations

import shutil
from typing import TypeVar

import numpy as np
import pytest

from tallyroll.storage import fast_paths

Functions = TypeVar("Functions")


def drawn_off(number: int) -> list[str]:
    """Draw the fast paths to switch off in the run `number`. Every third run has all of them."""
    if number % 3 == 0:
        return []
    rng = np.random.default_rng([number, 71])
    share = rng.choice([0.1, 0.4, 0.8])
    return [way for way in fast_paths.FAST_PATHS if rng.random() < share]


def built(found: Functions | None) -> Functions:
    """Return the functions of an extension, which must exist wherever a compiler does."""
    if found is None:
        assert "kernel" in fast_paths.off() or shutil.which("cc") is None, (
            "there is a compiler, and no kernel was built"
        )
        pytest.skip("there is no compiler")
    return found
