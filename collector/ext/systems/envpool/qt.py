"""Load Qt 5 from a wheel for EnvPool's Procgen, which links to Qt but does not ship it."""

import ctypes
import importlib
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

from tallyroll.collector.errors import MissingExtra

_WHEEL = "PyQt5-Qt5"
LINKED = ("libQt5Core.so.5", "libQt5Gui.so.5")  # each library needs those before it


def made_with_qt(name: str, make: Callable[[], Any]) -> Any:
    """Call ``make`` and return its result; call it again after loading Qt if Qt was missing.

    Raises:
        MissingExtra: the task ``name`` needs a library that is not installed.
    """
    try:
        try:
            return make()
        except ImportError as error:
            if "Qt 5" not in str(error) or not _load_qt():
                raise
            return make()
    except ImportError as error:
        said = f"envpool cannot make {name!r}: {error}"
        if "Qt 5" in said:
            said += '. Run pip install "tallyroll[envpool-procgen]" to install Qt 5'
        raise MissingExtra(said) from error


def _load_qt() -> bool:
    """Load Qt from its wheel and import Procgen again; return False if Qt cannot be loaded."""
    try:
        files = metadata.files(_WHEEL) or []
    except metadata.PackageNotFoundError:
        return False
    paths = {file.name: str(file.locate()) for file in files if file.name in LINKED}
    if paths.keys() != {*LINKED}:  # the wheel is for another platform
        return False
    try:
        for library in LINKED:
            ctypes.CDLL(paths[library], ctypes.RTLD_GLOBAL)
        importlib.reload(sys.modules["envpool.procgen"])
    except (KeyError, OSError):  # EnvPool's own error has more detail
        return False
    return True
