"""Attributes that a class had before: they work still, and say where they are now."""

import warnings
from operator import attrgetter
from typing import Any


class Moved:
    """An attribute that is at another ``path`` of the same object now, as ``"part.name"``."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __set_name__(self, owner: type, name: str) -> None:
        self._said = f"{owner.__name__}.{name} is {owner.__name__}.{self._path} now"

    def __get__(self, holder: Any, owner: type) -> Any:
        if holder is None:
            return self
        warnings.warn(self._said, DeprecationWarning, stacklevel=2)
        return attrgetter(self._path)(holder)

    def __set__(self, holder: Any, value: Any) -> None:
        warnings.warn(self._said, DeprecationWarning, stacklevel=2)
        part, _, name = self._path.rpartition(".")
        setattr(attrgetter(part)(holder), name, value)
