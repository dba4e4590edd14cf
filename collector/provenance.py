"""What made the data: versions, and the part of a call that is worth keeping."""

import platform
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("tallyroll", "torch", "tensordict", "torchrl", "gymnasium", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that the data depends on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
