"""A distribution whose entry points name systems, laid out as pip would install it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parent


def distribution(site: Path, project: str, **systems: str) -> None:
    """Write a distribution into the folder `site`. `systems` maps names to ``module:Class``."""
    info = site / f"{project}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n")
    lines = [f"{name} = {value}\n" for name, value in systems.items()]
    (info / "entry_points.txt").write_text("".join(["[tallyroll.envs]\n", *lines]))


def install(site: Path, monkeypatch: pytest.MonkeyPatch, **systems: str) -> None:
    """Write a distribution, and add it to the path of this process and of its children."""
    distribution(site, "toys", **systems)
    monkeypatch.syspath_prepend(str(site))
    # Workers and commands run in their own processes.
    paths = [str(site), str(SUPPORT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
