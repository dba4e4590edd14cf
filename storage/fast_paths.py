"""Names of the fast paths, each of which tests and benchmarks can switch off.

A run without some of them gives the same rows and batches as one with all of them. The variable is
private, read when this module is imported, and names paths of `FAST_PATHS`::

    TALLYROLL_PLAN=-kernel,-network

An object looks at the switches when it is made.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

VARIABLE: Final = "TALLYROLL_PLAN"

FAST_PATHS: Final = {
    "kernel": "the extension in C does what Python and NumPy do otherwise",
    "network": "a policy's network is called without the TensorDicts around it",
    "sequential": "the lanes of a bare SyncVectorEnv are stepped one after the other",
    "wrappers": "wrappers that look at rewards and ends alone are handed nothing else",
    "step-write": "a step is written to its slot in one call of the extension",
    "fast-collect": "few slots are stored, and laid out as a batch, in one call of the extension",
    "once": "an observation of two slots comes once from workers that send their rows",
    "address": "TensorDicts of one layout are copied to a storage by address",
}
"""Each fast path, and what it does."""


class UnknownWay(ValueError):
    """A setting names no way that can be switched off."""


def parsed(setting: str) -> frozenset[str]:
    """Return the ways that ``setting``, as ``-kernel,-network``, switches off.

    Raises:
        UnknownWay: it is none such.
    """
    words = [word.strip() for word in setting.split(",") if word.strip()]
    for word in words:
        if not word.startswith("-") or word[1:] not in FAST_PATHS:
            raise UnknownWay(
                f"{VARIABLE}: expected ways to switch off, of "
                f"{', '.join(f'-{w}' for w in FAST_PATHS)}, got {word!r}"
            )
    return frozenset(word[1:] for word in words)


_off = parsed(os.environ.get(VARIABLE, ""))
if os.environ.get("TALLYROLL_KERNEL") == "0":  # its older name
    _off |= {"kernel"}


def is_on(way: str) -> bool:
    """Return whether ``way`` may be taken."""
    return way not in _off


def off() -> frozenset[str]:
    """Return the ways that are switched off."""
    return _off


def switch_off(ways: frozenset[str]) -> None:
    """Switch off ``ways``, and all others on, for what this process makes from now on."""
    global _off
    _off = parsed(",".join(f"-{way}" for way in sorted(ways)))


@contextmanager
def switched_off(*ways: str) -> Iterator[None]:
    """Switch off ``ways`` too, for what is made within.

    Raises:
        UnknownWay: there is no such way.
    """
    before = _off
    switch_off(before.union(ways))
    try:
        yield
    finally:
        switch_off(before)
