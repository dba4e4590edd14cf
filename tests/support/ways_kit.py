"""Ways that are switched off, drawn by a number."""

from __future__ import annotations

import numpy as np

from tallyroll.storage import ways


def drawn_off(number: int) -> list[str]:
    """Draw the ways that a run of this number goes without: none of every third."""
    if number % 3 == 0:
        return []
    rng = np.random.default_rng([number, 71])
    share = rng.choice([0.1, 0.4, 0.8])
    return [way for way in ways.WAYS if rng.random() < share]
