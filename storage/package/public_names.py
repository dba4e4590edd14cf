"""Public names of a package, read from the stub beside its ``__init__.py``.

Type checkers read the stub directly. At run time the stub maps each name to its module, which is
imported when the name is first used. torch and TorchRL take seconds to import, and commands such
as ``tallyroll --help`` do not need them.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any


def public_names(
    package: str, init: str
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__all__``, ``__getattr__`` and ``__dir__`` of ``package``.

    The public names are those that the stub beside the file ``init`` imports.
    """
    stub = ast.parse(Path(init).with_suffix(".pyi").read_text("utf-8"))
    homes = dict(sorted(pair for node in stub.body for pair in _names_in(node)))

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return [*homes], find, lambda: sorted({*vars(sys.modules[package]), *homes})


def _names_in(node: ast.stmt) -> Iterator[tuple[str, str]]:
    if not isinstance(node, ast.ImportFrom):
        return
    assert node.module is not None
    for each in node.names:
        names = import_module(node.module).__all__ if each.name == "*" else [each.name]
        yield from ((name, node.module) for name in names)
