"""Packages that only some users need: imported where they are used, and named where absent."""

from importlib import import_module
from types import ModuleType

from tallyroll.collector.errors import MissingExtra


def needs(module: str, extra: str) -> ModuleType:
    """The module, imported.

    Raises:
        MissingExtra: it is not installed, and ``extra`` of tallyroll brings it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"environments of {extra} need the package {(error.name or module).partition('.')[0]}, "
            f"which is not installed: pip install 'tallyroll[{extra}]'"
        ) from error
