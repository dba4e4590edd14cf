"""Import of optional packages, with an error that names the extra to install."""

from importlib import import_module
from types import ModuleType

from tallyroll.collector.errors import MissingExtra


def needs(module: str, extra: str, user: str | None = None) -> ModuleType:
    """Import ``module``, which ``user`` needs. By default, environments of ``extra`` need it.

    Raises:
        MissingExtra: the module is not installed; ``extra`` of tallyroll installs it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"{user or f'environments of {extra}'} need the package "
            f"{(error.name or module).partition('.')[0]}, which is not installed: "
            f'pip install "tallyroll[{extra}]"'
        ) from error
