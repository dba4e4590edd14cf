"""Runs that the tests of reports share and do not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from report_kit import POLICIES, SEEDS, collected

Made = dict[str, tuple[list[dict[str, Any]], Any, Any]]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Made]:
    """Return a folder of runs, and the results of their collectors by the names of the storages."""
    folder = tmp_path_factory.mktemp("reported")
    names = [(f"{policy}-{seed}", policy, seed) for policy in POLICIES for seed in SEEDS]
    return folder, {name: collected(folder / name, *more) for name, *more in names}
