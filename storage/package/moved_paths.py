"""Deprecated import paths that warn and forward to the new module."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def moved_modules(package: str, table: Mapping[str, str]) -> None:
    """Make modules of ``package`` importable by their former paths.

    Pickles name the modules of their classes, so old pickles need these paths.

    Args:
        package: the name of the package.
        table: the present path for each former one. An entry for a folder also covers the modules
            inside it.
    """
    sys.meta_path.append(_Finder({f"{package}.{old}": new for old, new in table.items()}))


class _Finder(MetaPathFinder, Loader):
    """Finder for moved modules, placed last, so that it handles only otherwise unknown names."""

    def __init__(self, table: Mapping[str, str]) -> None:
        self._table = table

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a module spec if the module has moved, else None."""
        new = self._present(fullname)
        if new is None or (new not in self._table.values() and find_spec(new) is None):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Copy the names of the module at the present path into this module."""
        new = self._present(module.__name__)
        assert new is not None
        said = f"{module.__name__} is {new} now"
        warnings.warn(said, DeprecationWarning, stacklevel=2)
        names = vars(import_module(new)).items()
        vars(module).update({name: value for name, value in names if not name.startswith("__")})

    def _present(self, name: str) -> str | None:
        """Return the present path of a module, or None if it never had another one."""
        above, below = name, ""
        while above not in self._table:
            above, _, last = above.rpartition(".")
            if not above:
                return None
            below = f".{last}{below}"
        return self._table[above] + below
