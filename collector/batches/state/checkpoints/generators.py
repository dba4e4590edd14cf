"""The global generators of random numbers: of torch, NumPy and Python."""

import random
from typing import Any

import numpy as np
import torch

from tallyroll.collector.compat import generator_states, gpus_in_use


def states() -> dict[str, Any]:
    """Return the states of all of them."""
    cpu, *cuda = generator_states(gpus_in_use())
    kind, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": cpu,
        "cuda": cuda,
        "numpy": [kind, keys, place, has_gauss, gauss],
        "python": random.getstate(),
    }


def load(found: dict[str, Any]) -> None:
    """Go on from a result of :meth:`states`. Those of devices that are not here are left out."""
    torch.set_rng_state(found["torch"])
    if torch.cuda.is_available():
        for device, state in enumerate(found["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)
    np.random.set_state(tuple(found["numpy"]))
    version, numbers, gauss = found["python"]
    random.setstate((version, tuple(numbers), gauss))
