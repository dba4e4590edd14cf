"""Deprecated attributes that warn and forward to their new location."""

import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import Any


class MovedAttribute:
    """Descriptor for an attribute that moved to another part of the same object.

    Args:
        path: the new location, as ``"part.name"``.
        adapt: converts the new value to the former one; None: the values are the same.
    """

    def __init__(self, path: str, adapt: Callable[[Any], Any] | None = None) -> None:
        self._path, self._adapt = path, adapt

    def __set_name__(self, owner: type, name: str) -> None:
        self._said = f"{owner.__name__}.{name} is {owner.__name__}.{self._path} now"

    def __get__(self, holder: Any, owner: type) -> Any:
        if holder is None:
            return self
        warnings.warn(self._said, DeprecationWarning, stacklevel=2)
        found = attrgetter(self._path)(holder)
        return found if self._adapt is None else self._adapt(found)

    def __set__(self, holder: Any, value: Any) -> None:
        warnings.warn(self._said, DeprecationWarning, stacklevel=2)
        part, _, name = self._path.rpartition(".")
        setattr(attrgetter(part)(holder), name, value)
