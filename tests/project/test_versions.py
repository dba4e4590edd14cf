"""Versions are found without an import, and are those that the packages give themselves."""

from __future__ import annotations

import subprocess
import sys

import gymnasium
import numpy as np
import tensordict
import torch
import torchrl

from tallyroll.storage.package.versions import versions


def test_versions_are_those_of_the_packages() -> None:
    found = versions()
    assert found["torch"] == torch.__version__
    for package in (gymnasium, np, tensordict, torchrl):
        assert found[package.__name__] == package.__version__.partition("+")[0]


def test_versions_are_the_same_before_torch_is_imported() -> None:
    code = "from tallyroll.storage.package.versions import versions; print(versions())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(versions())
