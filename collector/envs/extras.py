"""Packages that only some users need: imported where they are used, and named where absent."""

from importlib import import_module
from types import ModuleType

from tallyroll.collector.errors import MissingExtra


def needs(module: str, extra: str, user: str | None = None) -> ModuleType:
    """Import a module for a ``user``, by default the environments of the extra.

    Raises:
        MissingExtra: it is not installed, and ``extra`` of tallyroll brings it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"{user or f'environments of {extra}'} need the package "
            f"{(error.name or module).partition('.')[0]}, which is not installed: "
            f"pip install 'tallyroll[{extra}]'"
        ) from error
