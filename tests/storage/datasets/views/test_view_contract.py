"""Run the contract of readers on a view in a storage with other trajectories."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.testing import ReaderContract

from chosen_reader import write_among_others

ENTRY_POINTS = """
[tallyroll.readers]
chosen = chosen_reader:ChosenReader
"""


@pytest.fixture(autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write the files that an installer leaves for a package with this entry point."""
    site = tmp_path_factory.mktemp("site")
    about = site / "chosen-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: chosen\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        yield site


class TestView(ReaderContract):
    def write_rows(self, source: DiskStorage, path: Path) -> None:
        write_among_others(source, path)
