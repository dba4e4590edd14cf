"""Deprecated attributes that warn and forward to their new location."""

import sys
import warnings
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any


class MovedAttribute:
    """Descriptor for an attribute that moved to another part of the same object.

    Args:
        path: the new location, as ``"part.name"``.
        adapt: a function that converts the new value to the former one, or None if both are the
            same.
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


class MovedMethod:
    """Descriptor for a method that is now a function, named ``function``, of the same module."""

    def __init__(self, function: str) -> None:
        self._function = function

    def __set_name__(self, owner: type, name: str) -> None:
        self._module, self._said = owner.__module__, f"{owner.__name__}.{name} is"

    def __get__(self, holder: Any, owner: type) -> Any:
        if holder is None:
            return self
        said = f"{self._said} {self._module}.{self._function} now"
        warnings.warn(said, DeprecationWarning, stacklevel=2)
        return partial(getattr(sys.modules[self._module], self._function), holder)
