"""Import paths that modules had before: they work still, and say where the names are now."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def moved_modules(package: str, table: Mapping[str, str]) -> None:
    """Find modules of ``package`` by the names that they had, the keys of ``table``."""
    sys.meta_path.append(_Finder({f"{package}.{old}": new for old, new in table.items()}))


def moved_names(package: str, module: str, *names: str) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a package whose ``names`` have moved to ``module``."""

    def getattr_(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        _warn(f"{package}.{name}", f"{module}.{name}", 2)
        return getattr(import_module(module), name)

    return getattr_


class _Finder(MetaPathFinder, Loader):
    """Comes last, so that it is asked for what is nowhere else."""

    def __init__(self, table: Mapping[str, str]) -> None:
        self._table = table

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that has another name now."""
        return ModuleSpec(fullname, self) if fullname in self._table else None

    def exec_module(self, module: ModuleType) -> None:
        """Give it the names of the module that it is now."""
        new = self._table[module.__name__]
        _warn(module.__name__, new, 2)
        names = vars(import_module(new)).items()
        vars(module).update({name: value for name, value in names if not name.startswith("__")})


def _warn(old: str, new: str, level: int) -> None:
    warnings.warn(f"{old} is {new} now", DeprecationWarning, stacklevel=level + 1)
