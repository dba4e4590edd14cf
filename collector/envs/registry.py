"""Environment systems by name: the entry points of the group ``tallyroll.envs``."""

import os
import sys
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from tallyroll.collector.envs.system import System
from tallyroll.collector.errors import ArgumentError, MissingExtra

GROUP = "tallyroll.envs"


def names() -> list[str]:
    """Return the names of the registered systems, even if their packages are not installed."""
    return sorted({point.name for point in _points()})


def find(env_id: str) -> tuple[type[System], str] | None:
    """Return the system to which ``SYSTEM:name`` refers, and the name; None if it is unknown.

    Raises:
        MissingExtra: the system needs a package that is not installed.
        ArgumentError: the entry point does not name a `System`.
    """
    system, colon, name = env_id.partition(":")
    for point in _points() if colon else ():
        if point.name == system:
            return _loaded(point), name
    return None


def load(name: str) -> type[System]:
    """Return the system called ``name``, one of :func:`names`.

    Raises:
        MissingExtra: the system's module needs a package that is not installed.
        ArgumentError: the entry point does not name a `System`.
    """
    return _loaded(next(point for point in _points() if point.name == name))


def adopt(made: object) -> System | None:
    """Return a system over ``made``, an environment of a registered kind; otherwise None.

    Systems whose packages are not installed are skipped, because they cannot have made it.
    """
    for point in _points():
        try:
            kind = _loaded(point)
        except MissingExtra:
            continue
        system = kind.adopt(made)
        if system is not None:
            return system
    return None


def _points() -> tuple[EntryPoint, ...]:
    """Return the entry points in order of name. Installing a package refreshes them."""
    changed = []
    for folder in sys.path:
        with suppress(OSError, ValueError):
            changed.append((folder, os.stat(folder or ".").st_mtime_ns))
    return _read(tuple(changed))


@lru_cache(maxsize=1)
def _read(_changed: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    # Cached, because opening a file of each distribution takes 5 ms.
    return tuple(sorted(entry_points(group=GROUP), key=lambda point: point.name))


def _loaded(point: EntryPoint) -> type[System]:
    try:
        kind = point.load()
    except ImportError as error:
        raise MissingExtra(
            f"{point.name}: its environments need a package that is not installed ({error})"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, System)):
        raise ArgumentError(
            f"{point.name}: expected the entry point {point.value} to name a System, got {kind!r}"
        )
    return kind
