"""A distribution whose entry points name systems, as pip would install it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parent


def distribution(site: Path, project: str, **systems: str) -> None:
    """Put one into the folder `site`: systems by their names, each ``module:Class``."""
    info = site / f"{project}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n")
    lines = [f"{name} = {value}\n" for name, value in systems.items()]
    (info / "entry_points.txt").write_text("".join(["[tallyroll.envs]\n", *lines]))


def install(site: Path, monkeypatch: pytest.MonkeyPatch, **systems: str) -> None:
    """The same, where this process and those that it starts look for it."""
    distribution(site, "toys", **systems)
    monkeypatch.syspath_prepend(str(site))
    # Workers and commands are processes of their own.
    paths = [str(site), str(SUPPORT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
