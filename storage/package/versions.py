"""Versions of the packages that data depends on, determined without importing them."""

import platform
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

_PACKAGES = ("tallyroll", "tensordict", "torchrl", "gymnasium", "numpy")


def versions() -> dict[str, str]:
    """Return versions of Python and of the packages that the data depends on."""
    return dict(_versions())


@cache
def _versions() -> dict[str, str]:
    """Look up the versions once: reading metadata files takes longer than making a collector."""
    found = {"python": platform.python_version(), "torch": _torch()}
    for package in _PACKAGES:
        found[package] = installed(package) or "not installed"
    return found


def installed(package: str) -> str:
    """Return the version of a package or of its nightly; "" if neither is installed."""
    for name in (package, f"{package}-nightly"):
        try:
            return version(name)
        except PackageNotFoundError:
            pass
    return ""


def _torch() -> str:
    """Return torch's own version, which names the CUDA release.

    The version in the package metadata may omit that release.
    """
    if "torch" in sys.modules:
        return str(sys.modules["torch"].__version__)
    # Importing torch takes seconds. Its file version.py only assigns a few names.
    package = find_spec("torch")
    if package is None or package.origin is None:
        return "not installed"
    spec = spec_from_file_location("torch_version", Path(package.origin).with_name("version.py"))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.__version__)
