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
    """The names of the systems that are registered, whether their packages are installed or not."""
    return sorted({point.name for point in _points()})


def find(env_id: str) -> tuple[type[System], str] | None:
    """The system that ``SYSTEM:name`` names, and the name; None where none is registered so.

    Raises:
        MissingExtra: the system needs a package that is not installed.
        ArgumentError: the entry point names no system.
    """
    system, colon, name = env_id.partition(":")
    for point in _points() if colon else ():
        if point.name == system:
            return _loaded(point), name
    return None


def load(name: str) -> type[System]:
    """The system of that name, one of :func:`names`.

    Raises:
        MissingExtra: its author's module needs a package that is not installed.
        ArgumentError: the entry point names no system.
    """
    return _loaded(next(point for point in _points() if point.name == name))


def adopt(made: object) -> System | None:
    """A system over ``made``, an environment of the kind of one that is registered.

    Systems whose packages are not installed cannot have made it.
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
    """In the order of their names; read anew when something was installed."""
    changed = []
    for folder in sys.path:
        with suppress(OSError, ValueError):
            changed.append((folder, os.stat(folder or ".").st_mtime_ns))
    return _read(tuple(changed))


@lru_cache(maxsize=1)
def _read(_changed: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    # It opens a file of each distribution, for 5 ms.
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
