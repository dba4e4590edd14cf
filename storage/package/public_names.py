"""Public names of a package, read from the stub beside its ``__init__.py``.

Type checkers read the stub directly. At run time the stub maps each name to its module, which is
imported when the name is first used. torch and TorchRL take seconds to import, and commands such
as ``tallyroll --help`` do not need them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path


def homes_of_names(init: str) -> dict[str, str]:
    """Return the module of each name that the stub beside the file ``init`` imports."""
    stub = ast.parse(Path(init).with_suffix(".pyi").read_text("utf-8"))
    return dict(sorted(pair for node in stub.body for pair in _names_in(node)))


def _names_in(node: ast.stmt) -> Iterator[tuple[str, str]]:
    if not isinstance(node, ast.ImportFrom):
        return
    assert node.module is not None
    for each in node.names:
        names = import_module(node.module).__all__ if each.name == "*" else [each.name]
        yield from ((name, node.module) for name in names)
