"""Seeds and options of resets in random runs: rows must repeat those that the reset received."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from tallyroll.collector import Resets, choice, uniform

Given = Literal["", "seeds", "options", "both"]

_SAMPLER: dict[str, Any] = {"gravity": uniform(-15, -5), "level": choice([1, 2, 3])}
RESETS: dict[Given, Resets] = {
    "seeds": Resets(seeds=True),
    "options": Resets(sampler=_SAMPLER),
    "both": Resets(sampler={**_SAMPLER, "map": choice(["sea", "moon"])}, seeds=True),
}


def faults_of_resets(
    resets: Given,
    columns: Mapping[Any, np.ndarray],
    given: Sequence[tuple[int | None, Mapping[str, Any]] | None],
) -> list[str]:
    """Return the faults in rows of episodes whose resets were ``given`` a seed and options."""
    drawn, found = RESETS[resets], []
    names = [name for name in _SAMPLER if drawn.sampler is not None]
    for at, own in enumerate(given):
        assert own is not None
        seed, options = own
        if drawn.seeds:
            if columns["collector", "reset_seed"][at] != seed:
                found.append(f"reset_seed of row {at} is not {seed}, which the reset was given")
            elif drawn.options_of(seed or 0) != dict(options):
                found.append(f"the seed of row {at} draws other options than {options}")
        for name in names:
            if columns["collector", "context", name][at] != options.get(name):
                found.append(f"{name} of row {at} is not that of {options}")
    return found[:1]
