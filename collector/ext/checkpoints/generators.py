"""The global generators of random numbers: of torch, NumPy and Python."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tallyroll.collector.compat import generator_states, gpus_in_use

_NUMBERS = {"MT19937": 624, "Philox": 4}


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


def require(found: dict[str, Any]) -> None:
    """Raise an error of any kind unless :meth:`load` would accept a result of :meth:`states`."""
    torch.Generator().set_state(found["torch"])
    _, _, place, _, _ = found["numpy"]
    require_place("MT19937", place)
    np.random.RandomState(0).set_state(tuple(found["numpy"]))
    version, numbers, gauss = found["python"]
    random.Random(0).setstate((version, tuple(numbers), gauss))


def require_bits(state: Mapping[str, Any]) -> None:
    """Raise ValueError if the state of a NumPy bit generator points outside of its numbers."""
    if state["bit_generator"] == "MT19937":
        require_place("MT19937", state["state"]["pos"])
    elif state["bit_generator"] == "Philox":
        require_place("Philox", state["buffer_pos"])


def require_place(kind: str, place: Any) -> None:
    """Raise ValueError if a place is outside of the numbers of a generator: NumPy reads there."""
    if type(place) is not int or not 0 <= place <= _NUMBERS[kind]:
        raise ValueError(f"place {place!r:.40} of {_NUMBERS[kind]} numbers of {kind}")


def load(found: dict[str, Any]) -> None:
    """Go on from a result of :meth:`states`. Those of devices that are not here are left out."""
    torch.set_rng_state(found["torch"])
    if torch.cuda.is_available():
        for device, state in enumerate(found["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)
    np.random.set_state(tuple(found["numpy"]))
    version, numbers, gauss = found["python"]
    random.setstate((version, tuple(numbers), gauss))
