"""Switches for the fast paths, for tests and benchmarks.

Rows and batches do not depend on which fast paths are on. The private environment variable
``TALLYROLL_PLAN`` switches off paths of `FAST_PATHS`. It is read when this module is imported::

    TALLYROLL_PLAN=-kernel,-network

An object reads the switches when it is constructed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

VARIABLE: Final = "TALLYROLL_PLAN"

FAST_PATHS: Final = {
    "kernel": "the C extension replaces Python and NumPy code",
    "network": "a policy's network is called without the TensorDicts around it",
    "sequential": "the collector itself steps the lanes of a bare SyncVectorEnv, one by one",
    "wrappers": "wrappers that use only rewards and ends get nothing else",
    "step-write": "one call of the extension writes a step to its slot",
    "fast-collect": "one call of the extension stores few slots, and lays them out as a batch",
    "once": "workers that send their rows send an observation that two slots share only once",
    "address": "TensorDicts with the same layout are copied to a storage by address",
}
"""Each fast path and a description of its effect."""


class UnknownWay(ValueError):
    """A setting names a fast path that does not exist."""


def parsed(setting: str) -> frozenset[str]:
    """Return the fast paths that ``setting``, such as ``-kernel,-network``, switches off.

    Raises:
        UnknownWay: a word of the setting is not a minus sign followed by the name of a fast path.
    """
    words = [word.strip() for word in setting.split(",") if word.strip()]
    for word in words:
        if not word.startswith("-") or word[1:] not in FAST_PATHS:
            raise UnknownWay(
                f"{VARIABLE}: expected the fast paths to switch off, one or more of "
                f"{', '.join(f'-{w}' for w in FAST_PATHS)}, got {word!r}"
            )
    return frozenset(word[1:] for word in words)


_off = parsed(os.environ.get(VARIABLE, ""))


def is_on(way: str) -> bool:
    """Return True if the fast path ``way`` is on."""
    return way not in _off


def off() -> frozenset[str]:
    """Return the fast paths that are switched off."""
    return _off


def switch_off(ways: frozenset[str]) -> None:
    """Switch off exactly the fast paths ``ways``, for objects that this process makes later."""
    global _off
    _off = parsed(",".join(f"-{way}" for way in sorted(ways)))


@contextmanager
def switched_off(*ways: str) -> Iterator[None]:
    """Switch off ``ways`` too, for objects that are made inside the context.

    Raises:
        UnknownWay: a fast path of that name does not exist.
    """
    before = _off
    switch_off(before.union(ways))
    try:
        yield
    finally:
        switch_off(before)
