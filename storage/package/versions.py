"""Versions of the packages that data depends on, found without importing one of them."""

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
    """Look them up once: metadata are files, which take longer to read than a collector to make."""
    found = {"python": platform.python_version(), "torch": _torch()}
    for package in _PACKAGES:
        found[package] = installed(package) or "not installed"
    return found


def installed(package: str) -> str:
    """Return the version in a package's metadata, or in those of its nightly; empty without."""
    for name in (package, f"{package}-nightly"):
        try:
            return version(name)
        except PackageNotFoundError:
            pass
    return ""


def _torch() -> str:
    """Return torch's own version: it names the CUDA release, which its metadata may leave out."""
    if "torch" in sys.modules:
        return str(sys.modules["torch"].__version__)
    # To import torch takes seconds. Its file version.py assigns a few names.
    package = find_spec("torch")
    if package is None or package.origin is None:
        return "not installed"
    spec = spec_from_file_location("torch_version", Path(package.origin).with_name("version.py"))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.__version__)
