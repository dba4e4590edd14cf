"""Tests that versions are found without an import, and equal those that packages report."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import tensordict
import torch
import torchrl

from tallyroll.storage.package.versions import installed, versions


def test_versions_are_those_of_the_packages() -> None:
    found = versions()
    assert found["torch"] == torch.__version__
    for package in (gymnasium, np, tensordict, torchrl):
        assert found[package.__name__] == package.__version__.partition("+")[0]


def test_a_nightly_is_found_where_the_package_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed("atomroll") == ""
    for name, version in {"atomroll-nightly": "2026.10.27", "atomroll": "0.15.0"}.items():
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        assert installed("atomroll") == version


def test_versions_are_the_same_before_torch_is_imported() -> None:
    code = "from tallyroll.storage.package.versions import versions; print(versions())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(versions())
